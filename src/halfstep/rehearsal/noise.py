"""Which gradients are rounding noise in fp32 itself, so that no format loses anything of them.

Some gradients are 0 in exact arithmetic: that of a router whose single weight is normalised to 1, or of a bias before a normalisation. What
fp32 computes for them is the rounding error of terms that cancel, many powers of two below the gradients around it, and often below
the range of fp16. Their size alone does not show this; gradients behind a deep stack of sigmoids are as small and are exact.

How it works. The same step is computed twice more with the same random numbers. In the second of these, each result and each gradient is
multiplied by a random factor in [1 - 2^-20, 1], which is 16 times the rounding error of fp32. A gradient that is determined by
the model changes by about that much, times the cancellation in its sums (1e-4 at most on stacks of 20 sigmoid layers). One
that is noise becomes other noise. One that changes by half of its length has lost 3 % to the rounding of fp32, and all to that of fp16, at any scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["STRENGTH", "Probe", "changed"]

STRENGTH = 2.0**-20  # 16 times the rounding error of fp32
_CHANGED = 0.5  # relative change from which a gradient is noise
_SAMPLE = 4096  # elements of each tensor that are compared; all of them would need the memory of the activations again

Key = tuple[str, str]
Samples = Mapping[Key, list[Tensor]]


class Probe:
    """Samples the gradients of one step, with every result disturbed by a relative `strength`."""

    def __init__(self, strength: float) -> None:
        self.strength = strength
        self.samples: defaultdict[Key, list[Tensor]] = defaultdict(list)
        self._generators: dict[torch.device, torch.Generator] = {}

    def add(self, key: Key, values: Tensor) -> None:
        """Keep some elements of a gradient, evenly spread."""
        flat = values.detach().reshape(-1)
        self.samples[key].append(flat[:: -(-flat.numel() // _SAMPLE)].to(torch.float64, copy=True))

    def disturb(self, result: Tensor) -> None:
        """Change the values of a result; autograd does not see it, and outputs that it saved change too."""
        if self.strength and result.layout is torch.strided:
            result.data.mul_(self._factors(result))

    def disturbed(self, gradient: Tensor) -> Tensor:
        """A gradient with changed values."""
        return gradient * self._factors(gradient) if self.strength and gradient.layout is torch.strided else gradient

    def _factors(self, like: Tensor) -> Tensor:
        # At most 1, so that the sentinels of masks (torch.finfo.min) stay finite; from generators that the step does not use.
        generator = self._generators.get(like.device)
        if generator is None:
            generator = self._generators[like.device] = torch.Generator(like.device).manual_seed(0)
        noise = torch.rand(like.shape, generator=generator, device=like.device, dtype=like.dtype)
        return 1 - self.strength * noise


def changed(before: Samples, after: Samples) -> frozenset[Key]:
    """The gradients that differ by half of their length or more; one with other sizes, or without a value, is not compared."""
    names = set()
    for key, tensors in before.items():
        others = after.get(key, [])
        if [t.shape for t in tensors] != [t.shape for t in others]:
            continue
        first, second = torch.cat(tensors), torch.cat(others)
        if first.any() and (first - second).norm() >= _CHANGED * first.norm():
            names.add(key)
    return frozenset(names)
