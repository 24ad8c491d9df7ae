"""The compressed optimizers straight from their papers, slowly, in float64 and all ranks in one place: what tests compare with.

Nothing here is shared with halfstep. `padded=True` counts and compresses padding as DeepSpeed 0.19.6 does.
"""

import math

import numpy as np


def sign(x):
    """+1 for zero and above, -1 below."""
    return np.where(x >= 0, 1.0, -1.0)


class AllReduce:
    """The two-way compressed mean of one tensor of `size` elements over `num_ranks`, with its errors."""

    def __init__(self, size, num_ranks, *, padded=False):
        self.size, self.num_ranks = size, num_ranks
        multiple = num_ranks * math.lcm(num_ranks, 8) if padded else 8 * num_ranks
        self.total = -(-size // multiple) * multiple
        self.chunk = self.total // num_ranks
        self.real = self.total if padded else size  # elements that exist
        self.worker = [np.zeros(self.real) for _ in range(num_ranks)]
        self.server = [np.zeros(self._range(j)[1] - self._range(j)[0]) for j in range(num_ranks)]
        self.closest = math.inf  # how near an element came to zero, in units of its scale: there its sign is rounding

    def _range(self, j):
        return min(j * self.chunk, self.real), min((j + 1) * self.chunk, self.real)

    def _compress(self, v):
        if not v.size:
            return v, v
        scale = math.sqrt((v * v).sum() / v.size)
        if scale:
            self.closest = min(self.closest, (np.abs(v) / scale).min())
        return scale * sign(v), v - scale * sign(v)

    def __call__(self, tensors):
        """The mean that every rank receives of one flat tensor per rank."""
        if self.num_ranks == 1:
            return tensors[0].copy()
        sent = []
        for i, x in enumerate(tensors):
            v = np.zeros(self.real)
            v[: self.size] = x
            compressed, self.worker[i] = self._compress(v + self.worker[i])
            sent.append(compressed)
        result = np.zeros(self.real)
        for j in range(self.num_ranks):
            a, b = self._range(j)
            mean = sum(s[a:b] for s in sent) / self.num_ranks
            result[a:b], self.server[j] = self._compress(mean + self.server[j])
        return result[: self.size]
