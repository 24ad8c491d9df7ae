"""The loss-scale update in one launch; `kernels.scale_update` is the readable reference, rule by rule.

The reference is some forty small tensor operations, and on a GPU each is a launch of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from halfstep.precision.loss_scale import SEMANTICS, LossScale

__all__ = ["scale_update"]


@triton.jit
def _scale_update_kernel(
    scale_at,  # fp32 ()
    counters,  # int64 (6,): growth_tracker, hysteresis_left, consecutive_skips, skips, updates, last_overflow
    found_inf,  # fp32 ()
    growth_interval,
    hysteresis,
    growth,  # fp32 factors; the powers of two in use are exact
    backoff,
    min_scale,
    max_scale,
    RULE: tl.constexpr,  # the place in SEMANTICS
    DYNAMIC: tl.constexpr,
):
    flag = tl.load(found_inf)
    overflow = ((flag != 0) | (flag != flag)).to(tl.int64)
    clean = 1 - overflow
    updates = tl.load(counters + 4)
    last = tl.load(counters + 5)
    if DYNAMIC:
        tracker = (tl.load(counters) + 1) * clean
        left = tl.load(counters + 1)
        if RULE >= 3:
            since = updates - last - 1
            grow = ((since > 0) & (since % growth_interval == 0)).to(tl.int64) * clean
        else:
            grow = (tracker >= growth_interval).to(tl.int64) * clean
        if RULE == 0:
            lower = overflow
        elif RULE == 1:
            lower = overflow * (left - 1 <= 0).to(tl.int64)
            left = (left - 1) * overflow + hysteresis * clean
        elif RULE == 2:
            left = left - overflow
            lower = overflow * (left <= 0).to(tl.int64)
            left = left * (1 - grow) + hysteresis * grow
        else:
            lower = overflow * (left <= 1).to(tl.int64)
            left = left - overflow * (1 - lower)
            refill = clean if RULE == 4 else grow
            left = left * (1 - refill) + hysteresis * refill
        scale = tl.load(scale_at)
        lowered = tl.maximum(scale * backoff, min_scale)
        raised = tl.minimum(scale, max_scale / growth) * growth
        tl.store(scale_at, tl.where(lower == 1, lowered, tl.where(grow == 1, raised, scale)))
        tl.store(counters, tracker * (1 - grow))
        tl.store(counters + 1, left)
    tl.store(counters + 2, (tl.load(counters + 2) + 1) * overflow)
    tl.store(counters + 3, tl.load(counters + 3) + overflow)
    tl.store(counters + 4, updates + 1)
    tl.store(counters + 5, last * clean + updates * overflow)


def scale_update(scale: Tensor, counters: Tensor, found_inf: Tensor, rule: LossScale) -> None:
    """As the reference's: advance scale and counters in place by one step."""
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
