"""What 1-bit Adam and 1-bit LAMB share: dense steps, then compressed ones with a frozen variance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from halfstep.errors import SettingError
from halfstep.optim.onebit.base import OneBitOptimizer
from halfstep.optim.onebit.schedule import FreezePolicy, FreezeSchedule, Stability

__all__ = ["FreezingOptimizer"]


class FreezingOptimizer(OneBitOptimizer):
    """What 1-bit Adam and 1-bit LAMB share: dense steps, then compressed ones with a frozen variance."""

    schedule: FreezeSchedule
    policy: FreezePolicy

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], *, freeze_step: int | str, freeze_threshold: float, **shared: Any
    ) -> None:  # fmt: skip
        self.schedule = FreezeSchedule()
        super().__init__(params, defaults, **shared)
        self.policy = _freeze_policy(freeze_step, freeze_threshold, [g["betas"][1] for g in self.param_groups])

    def advanced(self, norm: float | None) -> FreezeSchedule:
        """One more step; the schedule freezes the variance at `freeze_step`, or when it is stable."""
        return self.schedule.advance(self.policy, norm if self.wanted_norm() else None)

    def wanted_norm(self) -> bool:
        """Only for `freeze_step="auto"`, at some steps."""
        return self.schedule.wants_norm(self.policy)

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The moments of the stage: errors, and what only compression needs, exist from the freeze on."""
        compressed = self.schedule.frozen and not group.get("non_freeze")
        return self.moments if compressed else self.moments[:2]


def _freeze_policy(freeze_step: int | str, threshold: float, beta2s: Sequence[float]) -> FreezePolicy:
    if not 0 < threshold <= 1:
        raise SettingError(f"freeze_threshold={threshold!r} must lie in (0, 1]; the default is 0.96.")
    stability = Stability(threshold, max((round(1 / (1 - beta2)) for beta2 in beta2s), default=1))
    if freeze_step == "auto":
        return FreezePolicy(None, stability)
    if not isinstance(freeze_step, int) or isinstance(freeze_step, bool) or freeze_step < 1:
        raise SettingError(
            f"freeze_step={freeze_step!r} must be a number of steps, at least 1, or 'auto': 15 to 25 % of all steps is usual."
        )
    return FreezePolicy(freeze_step, stability)
