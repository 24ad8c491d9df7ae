"""Whether a run is healthy: finite weights, a finite loss, and at least one step that was applied."""

from __future__ import annotations

import math

from halfstep.hardware.units import few

__all__ = ["describe_problem"]


def describe_problem(
    *,
    steps: int,
    applied: int,
    loss: float | None,
    scale: float | None,
    validation: dict[str, float],
    nonfinite: list[str],
) -> str | None:
    """Why a run that reached its end did not train, or None; `steps` and `applied` are those of this process."""
    if nonfinite:
        return f"the weights are not finite (in {few(nonfinite)}); no checkpoint was replaced by them"
    if steps and not applied:
        skipped = "the only step was skipped" if steps == 1 else f"all {steps} steps were skipped"
        starting = loss is not None and math.isfinite(loss) and scale is not None and scale > 1
        advice = f". The loss scale is {scale:g} and still falls: train for more steps" if starting else ""
        return f"{skipped}, because their gradients were not finite, so nothing was trained{advice}"
    if loss is not None and not math.isfinite(loss):
        return f"the training loss is {loss} at the last step"
    if not math.isfinite(validation.get("loss", 0.0)):
        return f"the validation loss is {validation['loss']}"
    return None
