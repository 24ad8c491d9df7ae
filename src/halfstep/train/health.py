"""Whether a run is healthy: finite weights, a finite loss on every rank, and at least one step that was applied."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.backends.context import RunContext
from halfstep.hardware.units import few

__all__ = ["describe_problem", "mean_loss"]


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


def mean_loss(loss: Tensor, weight: float, run: RunContext) -> Tensor:
    """The weighted mean over ranks, and the first rank whose loss is not finite, or -1; the host does not wait for them."""
    own = torch.stack((loss.detach().float(), loss.new_full((), weight, dtype=torch.float32)))
    if run.world_size == 1:
        return torch.stack((own[0], own.new_full((), -1.0)))
    message = [torch.empty_like(own) for _ in range(run.world_size)]
    dist.all_gather(message, own, group=run.process_group)
    losses, weights = torch.stack(message).unbind(1)
    counted = torch.where(weights > 0, losses, 0)  # a rank without examples computes some other batch again
    broken = ~counted.isfinite()
    first = torch.where(broken.any(), broken.float().argmax(), -1)
    return torch.stack(((counted * weights).sum() / weights.sum(), first.float()))
