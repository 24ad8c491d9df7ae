"""How far the first gradients of a run are from those that another run saved to a file.

The other run is fp32, and for a compiled row also the same precision without compilation. The first step has the same
weights and the same batch in every row, so a difference of its gradients is caused by the precision, or by the compiler,
alone. The cosine shows whether the step still points in the same direction; 1 minus it is about half the square of the
relative error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from halfstep.checkpoint.names import match_names
from halfstep.comparison.measurements import GradientDifference
from halfstep.optim.shards import is_sharded

__all__ = ["compare_gradients", "gather_gradients", "save_gradients"]

Gradients = Sequence[tuple[str, Tensor]]


@torch.no_grad()
def save_gradients(path: Path, gradients: Gradients, divisor: float) -> None:
    """Write the unscaled gradients in fp32."""
    save_file({name: (_whole(grad).float() / divisor).cpu().contiguous() for name, grad in gradients}, path)


def gather_gradients(gradients: Gradients) -> None:
    """Take part in what another rank does with sharded gradients."""
    for _, grad in gradients:
        _whole(grad)


def _whole(grad: Any) -> Tensor:
    """The gradient of all ranks; every rank must ask for the same ones in the same order."""
    whole: Tensor = grad.full_tensor() if is_sharded(grad) else grad
    return whole


@torch.no_grad()
def compare_gradients(path: Path, gradients: Gradients, divisor: float) -> GradientDifference:
    """Cosine and relative error with respect to the saved gradients, and the number of elements that became zero.

    Only one tensor at a time is on the device, so that the comparison does not raise the peak.
    """
    dot = own = other = error = 0.0
    vanished = 0
    with safe_open(path, framework="pt") as file:
        saved = match_names((name for name, _ in gradients), file.keys())
        for name, grad in gradients:
            whole = _whole(grad)
            if name not in saved:
                continue
            mine = whole.float() / divisor
            theirs = file.get_tensor(saved[name]).to(mine.device)
            dot += (mine * theirs).sum(dtype=torch.float64).item()
            own += mine.square().sum(dtype=torch.float64).item()
            other += theirs.square().sum(dtype=torch.float64).item()
            error += (mine - theirs).square().sum(dtype=torch.float64).item()
            vanished += int(((mine == 0) & (theirs != 0)).sum())
    length = math.sqrt(own * other)
    return GradientDifference(
        cosine=dot / length if length else math.nan,
        relative_error=math.sqrt(error / other) if other else math.nan,
        vanished=vanished,
    )
