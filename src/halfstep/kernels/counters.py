"""The counters of a loss scaler: one int64 vector on the device, with named positions."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.precision.loss_scale import LossScale

__all__ = ["COUNTERS", "new_counters"]

COUNTERS = (
    "growth_tracker",  # clean steps since the last overflow or growth
    "hysteresis_left",  # overflows that may still pass; apex and megatron count on below zero
    "consecutive_skips",
    "skips",
    "updates",  # DeepSpeed's cur_iter
    "last_overflow",  # DeepSpeed's last_overflow_iter, -1 before the first
)


def new_counters(rule: LossScale, device: torch.device | str = "cpu") -> Tensor:
    """The counters of a scaler before its first step."""
    counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
    counters[COUNTERS.index("hysteresis_left")].fill_(rule.hysteresis)
    counters[COUNTERS.index("last_overflow")].fill_(-1)
    return counters
