"""Flags and counts of skipped steps, on the device: each operation is launched in every step, so there are few."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.kernels.table import copied_to

__all__ = ["count_step", "flag_of_all"]


def flag_of_all(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Other than 0 if one of the flags is, one per device; the flag of a single device is returned as it is."""
    if len(flags) == 1 and flags[0].device == device:
        return flags[0]
    return torch.stack([copied_to(flag, device).reshape(()) for flag in flags]).amax()


def count_step(counts: Tensor, skipped: Tensor) -> None:
    """Add a step to the counts of steps, of skips and of skips in a row; `skipped` is a bool or integer of 0 or 1, without dimensions.

    In place, so that a captured CUDA graph counts at every replay.
    """
    steps, skips, consecutive = counts.unbind()
    steps.add_(1)
    skips.add_(skipped)
    consecutive.add_(1).mul_(skipped)
