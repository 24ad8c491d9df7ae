"""Batches of any size without loading them: the shapes of two small batches, and the line through them.

A plan asks about batches of thousands of images, which nobody wants to load. So the job's data is asked for batches of two
small sizes, and every dimension that grows in step with the size is taken to go on like that. Where something else
differs between the two (sequences padded to the longest of the batch, say), there is no line, and the batch of the
asked size is loaded after all.

A batch made up like this has no numbers, apart from its integers (token ids, masks, labels), which are few and decide
things; those of the small batch are repeated.
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
from halfstep.planning.integers import MOST_NUMBERS, is_integer

__all__ = ["Batches", "look_at_data"]

_SIZES = (2, 3)


@dataclass(frozen=True)
class Batches:
    """Gives the batch of any size, as tensors without numbers where that is possible."""

    at: Callable[[int], Any]
    notes: tuple[str, ...] = ()
    fixed: bool = False  # whether every batch is the same, whatever size is asked
    size: int | None = None  # of a fixed batch, where its tensors agree on one


def look_at_data(job: Job, context: RunContext) -> Batches:
    """Draw two small batches of the job's data and find the line through their shapes."""

    def draw(size: int) -> Any:
        before = rng_state()
        try:
            loader = job.call("data", replace(context, batch_size=size), split="train", epoch=0)
            with job.guard("data"):
                batch = next(iter(loader), None)
        finally:
            restore_rng(before)
        if batch is None:
            raise SettingError(f"{job.describe('data')} gave no batch of {size} for split='train'; a plan needs one.")
        return batch

    first, second = (draw(size) for size in _SIZES)
    leaves, structure = pytree.tree_flatten(first, is_leaf=_is_plain_list)
    others, structure2 = pytree.tree_flatten(second, is_leaf=_is_plain_list)
    lines = [_line(a, b) for a, b in zip(leaves, others, strict=False)]
    if structure != structure2 or any(line is None for line in lines):
        note = "The shapes of batches change with more than their size; each size was planned with the first batch of that size."
        return Batches(draw, (note,))
    if not any(factor for line in lines for factor, _ in line or ()):
        sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
        own = sizes.pop() if len(sizes) == 1 else None
        note = (
            f"The data takes no notice of batch_size: it gives {f'batches of {own}' if own else 'the same batches'}, whatever size is asked. The "
            "plan is for those, and tells neither the fewest GPUs nor the largest micro-batch. Let `data` take batch_size."
        )
        return Batches(lambda _: first, (note,), fixed=True, size=own)

    def at(size: int) -> Any:
        made = [
            _at(leaf, [factor * size + rest for factor, rest in line or ()])
            for leaf, line in zip(leaves, lines, strict=True)
        ]
        return pytree.tree_unflatten(made, structure)

    return Batches(at)


def _is_plain_list(value: Any) -> bool:
    """Whether a value is a list without tensors, such as the names of a batch's files."""
    return isinstance(value, list) and bool(value) and not any(isinstance(v, Tensor) for v in pytree.tree_leaves(value))


def _at(leaf: Any, shape: list[int]) -> Any:
    """A leaf of this shape: integers and lists repeated from `leaf`, other tensors without numbers, anything else as it is."""
    if isinstance(leaf, list) and shape:
        return (leaf * -(-shape[0] // len(leaf)))[: shape[0]]
    if not isinstance(leaf, Tensor):
        return leaf
    if not is_integer(leaf) or not leaf.numel() or math.prod(shape) > MOST_NUMBERS:
        return torch.empty(shape, dtype=leaf.dtype, device="meta")
    times = [-(-size // small) for size, small in zip(shape, leaf.shape, strict=True)]
    return leaf.to(CPU).repeat(times)[tuple(map(slice, shape))].contiguous()


def _line(a: Any, b: Any) -> list[tuple[int, int]] | None:
    """For each dimension of a leaf, (factor, rest) with size = factor * batch + rest; None if it is no such line."""
    if isinstance(a, list) and isinstance(b, list):
        shapes = [(len(a), len(b))]
    elif not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return [] if type(a) is type(b) else None
    elif a.dim() != b.dim() or a.dtype != b.dtype:
        return None
    else:
        shapes = list(zip(a.shape, b.shape, strict=True))
    found = []
    for low, high in shapes:
        factor = high - low  # the two sizes differ by one
        if factor and low != factor * _SIZES[0]:
            return None
        found.append((factor, low - factor * _SIZES[0]))
    return found
