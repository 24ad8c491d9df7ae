"""The loss-scale update: five published rules, one function, no host synchronisation.

Every dynamic loss scaler lowers the scale after overflows and raises it after a run of clean steps. The
systems people come from disagree on the details, so the details have names:

    rule                    lowers the scale                    counts clean steps    refills hysteresis
    torch                   at every overflow                   grows at the N-th     has none
    apex                    when h overflows come in a row      grows at the N-th     at every clean step
    megatron                from the h-th overflow on           grows at the N-th     when the scale grows
    deepspeed               from the h-th overflow on           grows at the N+1st,   when the scale grows
                                                                then at every N-th
    deepspeed-consecutive   when h overflows come in a row      as deepspeed          at every clean step

(N is `growth_interval`, h is `hysteresis`. The table of trajectories in docs/scaler.md shows one trace under
all five.) Inside [min_scale, max_scale] each rule reproduces its system exactly; at the borders the scale
stays on the border. The state is one fp32 scale and one int64 vector, both on the device, and the function
is a fixed sequence of tensor operations without host values, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.counters import COUNTERS, new_counters
from halfstep.precision.loss_scale import LossScale

__all__ = ["COUNTERS", "new_counters", "scale_update"]


@torch.no_grad()
def scale_update(scale: Tensor, counters: Tensor, found_inf: Tensor, rule: LossScale) -> None:
    """Advance `scale` and `counters` in place by one step that overflowed (`found_inf` not 0) or was clean."""
    if _one_launch_is_exact(rule) and triton_runs_on(scale.device):
        from halfstep.kernels import scale_update_triton

        scale_update_triton.scale_update(scale, counters, found_inf.reshape(()).to(torch.float32), rule)
        return
    # Not `found_inf == 1`: torch sums flags over devices, and a NaN flag is not a clean step either.
    overflow = (found_inf != 0).to(torch.int64).reshape(())
    clean = 1 - overflow
    tracker, left, consecutive, skips, updates, last = counters.unbind()

    if rule.mode == "dynamic":
        new_tracker = (tracker + 1) * clean
        if rule.semantics.startswith("deepspeed"):
            # s clean steps lie between the last overflow and this one: 0 % N == 0, so DeepSpeed excludes s = 0.
            s = updates - last - 1
            grow = clean.bool() & (s > 0) & (s % rule.growth_interval == 0)
        else:
            # torch compares with ==, so that lowering the interval below the counter stops growth for good.
            grow = clean.bool() & (new_tracker >= rule.growth_interval)
        new_tracker = new_tracker * (~grow).to(torch.int64)
        lower, new_left = _hysteresis(left, overflow, grow, rule)
        scale.copy_(_next_scale(scale, lower, grow, rule))
    else:
        new_tracker, new_left = tracker, left
    advanced = (
        new_tracker,
        new_left,
        (consecutive + 1) * overflow,
        skips + overflow,
        updates + 1,
        last * clean + updates * overflow,
    )
    counters.copy_(torch.stack(advanced))


def _one_launch_is_exact(rule: LossScale) -> bool:
    """The kernel multiplies in fp32; with factors that are powers of two and a finite cap, as is usual, that is exact."""
    return rule.max_scale <= 2.0**127 and all(
        math.frexp(f)[0] == 0.5 for f in (rule.growth_factor, rule.backoff_factor)
    )


def _hysteresis(left: Tensor, overflow: Tensor, grow: Tensor, rule: LossScale) -> tuple[Tensor, Tensor]:
    """Whether this overflow lowers the scale, and how many more may pass."""
    hit, full = overflow.bool(), rule.hysteresis
    clean = 1 - overflow
    grown = grow.to(torch.int64)
    match rule.semantics:
        case "torch":
            return hit, left
        case "apex":
            spent = left - 1
            return hit & (spent <= 0), spent * overflow + full * clean
        case "megatron":
            spent = left - overflow
            return hit & (spent <= 0), spent * (1 - grown) + full * grown
        case _:
            lower = hit & (left <= 1)
            spent = left - (hit & ~lower).to(torch.int64)
            refill = clean if rule.semantics == "deepspeed-consecutive" else grown
            return lower, spent * (1 - refill) + full * refill


def _next_scale(scale: Tensor, lower: Tensor, grow: Tensor, rule: LossScale) -> Tensor:
    """The scale after this step, in fp32."""
    growth, backoff = rule.growth_factor, rule.backoff_factor
    if rule.semantics == "megatron":  # Megatron keeps its factors in fp32
        growth, backoff = _to_fp32(growth), _to_fp32(backoff)
    # torch multiplies by its factors in float64 and rounds once; Apple's GPUs have no float64.
    wide = scale if scale.device.type == "mps" else scale.double()
    lowered = (wide * backoff).clamp(min=rule.min_scale).to(scale.dtype)
    raised = (wide * growth).clamp(max=rule.max_scale).to(scale.dtype)
    raised = torch.where(raised.isfinite(), raised, scale)
    return torch.where(lower, lowered, torch.where(grow, raised, scale))


def _to_fp32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
