"""The batch sizes of a DeepSpeed configuration: micro-batch per rank and micro-batches per step.

DeepSpeed has three keys with train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks,
and computes the missing one. Halfstep writes the two factors, because formats depend on the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.errors import SettingError
from halfstep.precision.deepspeed_keys import Block, auto_value, is_auto, rejected

__all__ = ["Batches", "read_batches"]

_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Batches:
    """Samples of one micro-batch on one rank, and micro-batches of one step."""

    size: int
    accumulate: int
    is_decided: bool = True  # whether the file or the program decides the size

    def __str__(self) -> str:
        return f"{self.size} samples per rank and micro-batch, {self.accumulate} micro-batches per step"


def read_batches(
    config: Mapping[str, Any], *, accumulate: int | None, batch_size: int | None, world_size: int | None
) -> Batches:
    """The two factors: the program's, else the file's, else what DeepSpeed would compute; a size of 1 where nothing decides."""
    top = Block("", {key: config[key] for key in _KEYS if key in config and not is_auto(config[key])})
    total, micro, count = (top.whole(key) for key in _KEYS)
    for key, value in zip(_KEYS, (total, micro, count), strict=True):
        if value == 0:
            raise rejected(key, 0, "it must be 1 or more")
    size, count = batch_size or micro, accumulate or count
    if count is None:
        if is_auto(config.get("gradient_accumulation_steps")):
            raise auto_value("gradient_accumulation_steps", "accumulate")
        count = 1 if total is None or size is None else _quotient(total, size, world_size)
    if size is not None:
        return Batches(size, count)
    if total is None or world_size is None:
        return Batches(1, count, is_decided=False)
    return Batches(_share(total, count * world_size), count)


def _quotient(total: int, size: int, world_size: int | None) -> int:
    if world_size is None:
        raise SettingError(
            f"DeepSpeed keys train_batch_size={total} and train_micro_batch_size_per_gpu={size} leave the number of "
            "micro-batches to the number of ranks; set gradient_accumulation_steps, or pass accumulate."
        )
    return _share(total, size * world_size)


def _share(total: int, parts: int) -> int:
    if total % parts:
        raise rejected("train_batch_size", total, f"it is not a multiple of {parts}, the product of the other factors")
    return total // parts
