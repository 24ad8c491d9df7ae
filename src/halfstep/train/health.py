"""Whether a run is healthy: finite weights, a finite loss, and at least one step that was applied."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfstep.engine.engine import Engine
from halfstep.hardware.units import few

__all__ = ["describe_problem", "nonfinite_parameters"]


def nonfinite_parameters(engine: Engine) -> list[str]:
    """The parameters with a non-finite weight or master; waits for the device once.

    Buffers are not checked: a mask rightly contains -inf. A split master is non-finite exactly where its weight is.
    """
    tensors: list[tuple[str, Tensor]] = []
    for name, param in engine.model.named_parameters():
        if param.is_floating_point():
            tensors.append((name, param.detach()))
            for optimizer in engine.optimizers:
                master = optimizer.state.get(param, {}).get("master")
                if isinstance(master, Tensor):
                    tensors.append((name, master))
    if not tensors:
        return []
    finite = torch.stack([torch.isfinite(tensor).all().to(engine.device) for _, tensor in tensors]).tolist()
    return list(dict.fromkeys(name for (name, _), ok in zip(tensors, finite, strict=True) if not ok))


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
