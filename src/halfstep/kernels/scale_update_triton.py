"""The loss-scale update in one launch; `kernels.scale_update` is the readable reference, rule by rule.

The reference is about forty small tensor operations, each a separate launch on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels.counters import COUNTERS
from halfstep.precision.loss_scale import SEMANTICS, LossScale

__all__ = ["scale_update"]

_TRACKER, _LEFT, _CONSECUTIVE, _SKIPS, _UPDATES, _LAST = (tl.constexpr(i) for i in range(len(COUNTERS)))
_TORCH, _APEX, _MEGATRON, _DEEPSPEED, _CONSECUTIVE_DEEPSPEED = (tl.constexpr(i) for i in range(len(SEMANTICS)))


@triton.jit
def _scale_update_kernel(
    scale_at,  # fp32 ()
    counters,  # int64 (6,): COUNTERS
    found_inf,  # fp32 ()
    growth_interval,
    hysteresis,
    growth,  # fp32 factors; the powers of two in use are exact
    backoff,
    min_scale,
    max_scale,
    RULE: tl.constexpr,  # index in SEMANTICS
    DYNAMIC: tl.constexpr,
):
    flag = tl.load(found_inf)
    overflow = ((flag != 0) | (flag != flag)).to(tl.int64)
    clean = 1 - overflow
    updates = tl.load(counters + _UPDATES)
    last = tl.load(counters + _LAST)
    if DYNAMIC:
        tracker = (tl.load(counters + _TRACKER) + 1) * clean
        left = tl.load(counters + _LEFT)
        if RULE >= _DEEPSPEED:  # both of DeepSpeed's
            since = updates - last - 1
            grow = ((since > 0) & (since % growth_interval == 0)).to(tl.int64) * clean
        else:
            grow = (tracker >= growth_interval).to(tl.int64) * clean
        if RULE == _TORCH:
            lower = overflow
        elif RULE == _APEX:
            lower = overflow * (left - 1 <= 0).to(tl.int64)
            left = (left - 1) * overflow + hysteresis * clean
        elif RULE == _MEGATRON:
            left = left - overflow
            lower = overflow * (left <= 0).to(tl.int64)
            left = left * (1 - grow) + hysteresis * grow
        else:
            lower = overflow * (left <= 1).to(tl.int64)
            left = left - overflow * (1 - lower)
            refill = clean if RULE == _CONSECUTIVE_DEEPSPEED else grow
            left = left * (1 - refill) + hysteresis * refill
        scale = tl.load(scale_at)
        lowered = tl.maximum(scale * backoff, min_scale)
        raised = tl.minimum(scale, max_scale / growth) * growth
        tl.store(scale_at, tl.where(lower == 1, lowered, tl.where(grow == 1, raised, scale)))
        tl.store(counters + _TRACKER, tracker * (1 - grow))
        tl.store(counters + _LEFT, left)
    tl.store(counters + _CONSECUTIVE, (tl.load(counters + _CONSECUTIVE) + 1) * overflow)
    tl.store(counters + _SKIPS, tl.load(counters + _SKIPS) + overflow)
    tl.store(counters + _UPDATES, updates + 1)
    tl.store(counters + _LAST, last * clean + updates * overflow)


def scale_update(scale: Tensor, counters: Tensor, found_inf: Tensor, rule: LossScale) -> None:
    """Advance `scale` and `counters` in place by one step, as the reference does."""
    _scale_update_kernel[(1,)](
        scale,
        counters,
        found_inf,
        rule.growth_interval,
        rule.hysteresis,
        float(rule.growth_factor),
        float(rule.backoff_factor),
        float(rule.min_scale),
        float(rule.max_scale),
        RULE=SEMANTICS.index(rule.semantics),
        DYNAMIC=rule.mode == "dynamic",
        num_warps=1,
    )
