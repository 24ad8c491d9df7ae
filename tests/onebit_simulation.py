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


class Settings(dict):
    """Hyperparameters with attribute access, at the optimizers' defaults."""

    def __init__(self, **values):
        defaults = {
            "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": False, "freeze_step": 100_000,
            "var_freeze_step": 100_000, "var_update_scaler": 16, "local_step_scaler": 32_678, "local_step_clipper": 16,
            "max_coeff": 10.0, "min_coeff": 0.01, "coeff_beta": 0.9, "factor_max": 4.0, "factor_min": 0.5, "factor_threshold": 0.1,
        }  # fmt: skip
        assert values.keys() <= defaults.keys()
        super().__init__(defaults | values)

    def __getattr__(self, name):
        return self[name]


class Simulation:
    """All ranks of one run; `weights[i][k]` is parameter k on rank i, flat and in float64."""

    def __init__(self, weights, num_ranks, settings, masks=None, *, padded=False, first_step=0):
        self.h, self.num_ranks, self.padded, self.t = settings, num_ranks, padded, first_step
        self.p = [[np.array(w, dtype=np.float64).reshape(-1) for w in weights] for _ in range(num_ranks)]
        self.sizes = [w.size for w in self.p[0]]
        self.masks = masks or [1.0] * len(self.sizes)
        self.m = [[np.zeros(n) for n in self.sizes] for _ in range(num_ranks)]
        self.v = [np.zeros(n) for n in self.sizes]
        self.reducers = [AllReduce(n, num_ranks, padded=padded) for n in self.sizes]
        self.sent_bits = 0

    @property
    def ranks(self):
        return range(self.num_ranks)

    def reduce(self, k, tensors):
        """The compressed mean of parameter k, masked."""
        return self.reducers[k](tensors) * self.masks[k]

    @property
    def closest(self):
        return min(reducer.closest for reducer in self.reducers)

    def first_factor(self):
        return 1 - self.h.betas[0] ** self.t if self.h.bias_correction else 1.0

    def second_factor(self, updates):
        return 1 - self.h.betas[1] ** updates if self.h.bias_correction else 1.0

    def denominator(self, v, updates):
        return np.sqrt(v / self.second_factor(updates)) + self.h.eps

    def averages(self, k, g):
        """Adam's averages of parameter k with the mean gradient, on all ranks."""
        b1, b2 = self.h.betas
        self.v[k] = b2 * self.v[k] + (1 - b2) * g * g
        for i in self.ranks:
            self.m[i][k] = b1 * self.m[i][k] + (1 - b1) * g

    def mean(self, grads, k):
        return sum(grads[i][k] for i in self.ranks) / self.num_ranks


class Adam(Simulation):
    """1-bit Adam."""

    def step(self, grads):
        h, b1 = self.h, self.h.betas[0]
        frozen = self.t >= h.freeze_step  # steps done before this one
        self.t += 1
        for k in range(len(self.sizes)):
            if not frozen:
                self.averages(k, self.mean(grads, k))
            else:
                momentum = self.reduce(k, [b1 * self.m[i][k] + (1 - b1) * grads[i][k] for i in self.ranks])
                for i in self.ranks:
                    self.m[i][k] = momentum
            for i in self.ranks:
                d = self.m[i][k] / self.first_factor() / self.denominator(self.v[k], min(self.t, h.freeze_step))
                self.p[i][k] = self.p[i][k] - h.lr * (d + h.weight_decay * self.p[i][k])


class ZeroOne(Simulation):
    """0/1 Adam."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.vi, self.vc, self.updates, self.li, self.lc, self.frozen, self.lrs = 1, 0, 0, 1, 0, False, 0.0
        self.u = [[np.zeros(n) for n in self.sizes] for _ in self.ranks]
        self.kinds = []

    def step(self, grads):
        h, b1 = self.h, self.h.betas[0]
        self.t += 1
        variance = not self.frozen and self.t % self.vi == 0
        synchronizes = self.frozen and self.t % self.li == 0
        self.kinds.append("dense" if variance else "sync" if synchronizes else "local" if self.frozen else "compressed")
        self.updates += variance
        self.lrs += h.lr if self.frozen else 0.0
        for k in range(len(self.sizes)):
            if variance:
                self.averages(k, self.mean(grads, k))
            elif not self.frozen:
                g = self.reduce(k, [grads[i][k] for i in self.ranks])
                for i in self.ranks:
                    self.m[i][k] = b1 * self.m[i][k] + (1 - b1) * g
            else:
                for i in self.ranks:
                    self.m[i][k] = b1 * self.m[i][k] + (1 - b1) * grads[i][k]
            den = self.denominator(self.v[k], self.updates)
            for i in self.ranks:
                d = self.m[i][k] / self.first_factor() / den + h.weight_decay * self.p[i][k]
                self.p[i][k] = self.p[i][k] - h.lr * d
                if self.frozen:
                    self.u[i][k] = self.u[i][k] - h.lr * d
            if synchronizes:
                z = self.reduce(k, [self.u[i][k] * den for i in self.ranks])
                for i in self.ranks:
                    self.p[i][k] = self.p[i][k] - self.u[i][k] + z / den
                    self.m[i][k] = -z / self.lrs * self.first_factor()
                    self.u[i][k] = np.zeros_like(z)
        self.lrs = 0.0 if synchronizes else self.lrs
        if variance:
            self.vc += 1
            if self.vc == h.var_update_scaler:
                self.vc, self.vi = 0, 2 * self.vi
        if self.frozen:
            self.lc += 1
            if self.lc == h.local_step_scaler:
                self.lc, self.li = 0, min(h.local_step_clipper, 2 * self.li)
        elif self.t > h.var_freeze_step:
            self.frozen = True
            self.reducers = [AllReduce(n, self.num_ranks, padded=self.padded) for n in self.sizes]


class Lamb(Simulation):
    """1-bit LAMB; with `padded` the padding of the fused tensor has momenta that are never cleared, as in DeepSpeed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        total = sum(self.sizes)
        multiple = self.num_ranks * math.lcm(self.num_ranks, 8)
        ghosts = -(-total // multiple) * multiple - total if self.padded else 0
        self.reducers = [AllReduce(total + ghosts, self.num_ranks)]
        self.ghosts = np.zeros(ghosts)
        self.c0, self.last = [0.0] * len(self.sizes), [1.0] * len(self.sizes)
        self.coeff = None

    def step(self, grads):
        frozen = self.t >= self.h.freeze_step
        self.t += 1
        if frozen:
            self._compressed(grads)
        else:
            self._dense(grads)

    def _dense(self, grads):
        h = self.h
        for k in range(len(self.sizes)):
            self.averages(k, self.mean(grads, k))
            for i in self.ranks:
                u = (
                    self.m[i][k] / self.first_factor() / self.denominator(self.v[k], self.t)
                    + h.weight_decay * self.p[i][k]
                )
                norm, size = np.linalg.norm(self.p[i][k]), np.linalg.norm(u)
                c = min(max(norm / size, h.min_coeff), h.max_coeff) if norm and size else 1.0
                if c != 1.0 and i == 0:
                    self.c0[k] = h.coeff_beta * self.c0[k] + (1 - h.coeff_beta) * c
                self.p[i][k] = self.p[i][k] - h.lr * c * u
        self.fresh = [v.copy() for v in self.v]

    def _compressed(self, grads):
        h, (b1, b2) = self.h, self.h.betas
        before = [m.copy() for m in self.m[0]]
        if self.coeff is None:
            scales = [np.linalg.norm(m) / math.sqrt(m.size) for m in before]
            self.coeff = [sum(scales) / len(scales) / s if s else 1.0 for s in scales]
        flat = [
            np.concatenate(
                [(b1 * before[k] + (1 - b1) * grads[i][k]) * self.coeff[k] for k in range(len(before))] + [self.ghosts]
            )
            for i in self.ranks
        ]
        result = self.reducers[0](flat)
        self.ghosts = result[sum(self.sizes) :]
        parts = np.split(result, np.cumsum(self.sizes))
        for k in range(len(self.sizes)):
            m = parts[k] / self.coeff[k] * self.masks[k]
            g = (m - b1 * before[k]) / (1 - b1)
            self.fresh[k] = b2 * self.fresh[k] + (1 - b2) * g * g
            den = self.denominator(self.v[k], h.freeze_step)
            up = m / self.first_factor() / den
            f0 = (den / self.denominator(self.fresh[k], self.t)).max()
            last = self.last[k]
            for i in self.ranks:
                u, f = up + h.weight_decay * self.p[i][k], f0
                if h.weight_decay:
                    r = min(1.0, np.linalg.norm(up) / np.linalg.norm(u))
                    f = f * r + (1 - r)
                f = min(max(f, h.factor_min), h.factor_max)
                f = min(max(f, last * (1 - h.factor_threshold)), last * (1 + h.factor_threshold))
                self.last[k] = f
                self.p[i][k] = self.p[i][k] - h.lr * self.c0[k] * f * u
                self.m[i][k] = m
