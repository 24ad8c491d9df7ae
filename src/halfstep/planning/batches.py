"""Batches of any size without loading them: extrapolated from the shapes of two small batches.

A plan needs batches of thousands of images, which nobody wants to load. So the job's data is called for two small batch
sizes, and every dimension that grows in proportion to the size is extrapolated. If anything else differs between the two
(sequences padded to the longest of the batch, for example), the batch of the requested size is loaded after all.

An extrapolated batch has no data except its integers (token ids, masks, labels), which are few and decide control flow;
those of the small batch are repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.backends.context import RunContext
from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.errors import SettingError
from halfstep.jobs.job import Job
from halfstep.planning.fakes import CPU
from halfstep.planning.integers import MAX_NUMEL, is_integer

__all__ = ["Batches", "look_at_data"]

_SIZES = (2, 3)


@dataclass(frozen=True)
class Batches:
    """Returns the batch of any size, as tensors without data where that is possible."""

    at: Callable[[int], Any]
    notes: tuple[str, ...] = ()
    fixed: bool = False  # whether every batch is the same, whatever size is requested
    size: int | None = None  # of a fixed batch, where its tensors agree on one


@dataclass(frozen=True)
class _Dimension:
    """A dimension whose size is `factor * batch + rest`."""

    factor: int
    rest: int

    def at(self, batch: int) -> int:
        return self.factor * batch + self.rest


def look_at_data(job: Job, context: RunContext) -> Batches:
    """Load two small batches of the job's data and extrapolate their shapes."""

    def draw(size: int) -> Any:
        before = rng_state()
        try:
            loader = job.call("data", replace(context, batch_size=size), split="train", epoch=0)
            with job.guard("data"):
                batch = next(iter(loader), None)
        finally:
            restore_rng(before)
        if batch is None:
            raise SettingError(
                f"{job.describe('data')} yields no batch for split='train' and batch_size={size}; a plan needs one."
            )
        return batch

    first, second = (draw(size) for size in _SIZES)
    leaves, structure = pytree.tree_flatten(first, is_leaf=_is_plain_list)
    others, structure2 = pytree.tree_flatten(second, is_leaf=_is_plain_list)
    shapes = [_dimensions(a, b) for a, b in zip(leaves, others, strict=False)]
    if structure != structure2 or any(shape is None for shape in shapes):
        note = "Shapes depend on more than the batch size, so each size is planned with the first batch of that size."
        return Batches(draw, (note,))
    if not any(dimension.factor for shape in shapes for dimension in shape or ()):
        sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
        own = sizes.pop() if len(sizes) == 1 else None
        note = (
            f"The data ignores batch_size and always yields {f'batches of {own}' if own else 'the same batches'}. The plan is for "
            "those, without the fewest GPUs and the largest micro-batch. To get them, make `data` use batch_size."
        )
        return Batches(lambda _: first, (note,), fixed=True, size=own)

    def at(size: int) -> Any:
        resized = [
            _resized(leaf, [dimension.at(size) for dimension in shape or ()])
            for leaf, shape in zip(leaves, shapes, strict=True)
        ]
        return pytree.tree_unflatten(resized, structure)

    return Batches(at)


def _is_plain_list(value: Any) -> bool:
    """Whether a value is a list without tensors, such as the names of a batch's files."""
    return isinstance(value, list) and bool(value) and not any(isinstance(v, Tensor) for v in pytree.tree_leaves(value))


def _resized(leaf: Any, shape: list[int]) -> Any:
    """A leaf of this shape: integers and lists repeated from `leaf`, other tensors without data, anything else unchanged."""
    if isinstance(leaf, list) and shape:
        return (leaf * -(-shape[0] // len(leaf)))[: shape[0]]
    if not isinstance(leaf, Tensor):
        return leaf
    if not is_integer(leaf) or not leaf.numel() or math.prod(shape) > MAX_NUMEL:
        return torch.empty(shape, dtype=leaf.dtype, device="meta")
    times = [-(-size // small) for size, small in zip(shape, leaf.shape, strict=True)]
    return leaf.to(CPU).repeat(times)[tuple(map(slice, shape))].contiguous()


def _dimensions(a: Any, b: Any) -> list[_Dimension] | None:
    """How each dimension of a leaf grows with the batch; None if one is neither constant nor proportional."""
    if isinstance(a, list) and isinstance(b, list):
        shapes = [(len(a), len(b))]
    elif not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return [] if type(a) is type(b) else None
    elif a.dim() != b.dim() or a.dtype != b.dtype:
        return None
    else:
        shapes = list(zip(a.shape, b.shape, strict=True))
    dimensions = []
    for low, high in shapes:
        factor = high - low  # the two sizes differ by one
        if factor and low != factor * _SIZES[0]:
            return None
        dimensions.append(_Dimension(factor, low - factor * _SIZES[0]))
    return dimensions
