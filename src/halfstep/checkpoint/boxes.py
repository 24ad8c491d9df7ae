"""Rectangular parts of tensors: which part of a sharded tensor a rank stores, and where two parts overlap."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from halfstep.errors import SettingError
from halfstep.optim.shards import is_sharded, local

__all__ = ["Box", "box_of", "is_first_copy"]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it starts in each dimension, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """The part that two boxes of one tensor have in common, or None."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The indices of this box in a tensor that has just the elements of `outer`."""
        starts = [a - b for a, b in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


def box_of(tensor: Any, name: str) -> Box:
    """The part of a tensor that this rank stores; raises for placements that are not boxes."""
    box = Box.whole(tuple(tensor.shape))
    if not is_sharded(tensor):
        return box
    from torch.distributed.tensor import Replicate, Shard

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # the mesh does not contain this rank
        return Box(box.offset, (0,) * len(box.shape))
    offset, shape = list(box.offset), list(box.shape)
    for size, index, placement in zip(tensor.device_mesh.shape, coordinate, tensor.placements, strict=True):
        if type(placement) is Shard:
            longest = -(-shape[placement.dim] // size)  # as torch.chunk: all parts but the last ones have this length
            start = min(longest * index, shape[placement.dim])
            offset[placement.dim] += start
            shape[placement.dim] = min(longest, shape[placement.dim] - start)
        elif type(placement) is not Replicate:
            raise SettingError(
                f"{name} is placed as {placement} over ranks, which a checkpoint cannot store; it stores Shard and Replicate. Redistribute "
                "it first, or shard the dimension over one dimension of the mesh only."
            )
    part = local(tensor)
    if tuple(part.shape) != tuple(shape) and part.numel() + math.prod(shape) > 0:
        raise SettingError(
            f"{name} has a local part of shape {tuple(part.shape)} on this rank, and {tuple(tensor.placements)} of {tuple(tensor.shape)} "
            f"gives {tuple(shape)}; a checkpoint stores evenly chunked tensors only."
        )
    return Box(tuple(offset), tuple(shape))


def is_first_copy(tensor: Tensor, rank: int) -> bool:
    """Whether this rank writes its part: of equal parts on several ranks, one does."""
    if not is_sharded(tensor):
        return rank == 0
    from torch.distributed.tensor import Replicate

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    pairs = zip(coordinate, tensor.placements, strict=True)
    return all(index == 0 for index, placement in pairs if isinstance(placement, Replicate))
