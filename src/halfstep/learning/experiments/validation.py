"""Validation under autocast: what it needs and what it does not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from halfstep.learning.experiment import Outcome, Reading
from halfstep.learning.experiments.memory import saved_bytes

__all__ = ["validate"]


def validate() -> Outcome:
    """The lesson's validation pattern next to fp32."""
    x, y = torch.randn(128, 16), torch.randint(4, (128,))
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    scaler = torch.amp.GradScaler("cpu")
    scale = scaler.get_scale()

    def evaluate(*, autocast: bool) -> tuple[float, torch.Tensor]:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = model(x)
            return float(F.cross_entropy(logits, y)), logits.argmax(-1)

    model.eval()
    before = norm.running_mean.clone()
    (full, classes), (mixed, mixed_classes) = evaluate(autocast=False), evaluate(autocast=True)
    agree = float((classes == mixed_classes).float().mean())
    saved = {grad: saved_bytes(model, x, torch.bfloat16, grad=grad) for grad in (True, False)}
    unchanged = torch.equal(before, norm.running_mean)
    model.train()
    evaluate(autocast=True)
    moved = not torch.equal(before, norm.running_mean)
    readings = (
        Reading("validation loss, fp32", full, f"{full:.4f}"),
        Reading("validation loss, autocast bf16", mixed, f"{mixed:.4f}"),
        Reading("same class predicted", agree, f"{agree:.1%}"),
        Reading("saved for backward, with gradients", saved[True], f"{saved[True]} bytes"),
        Reading("saved for backward, no_grad", saved[False], f"{saved[False]} bytes"),
        Reading("loss scale before and after", scaler.get_scale(), f"{scale:.0f}, {scaler.get_scale():.0f}"),
        Reading("statistics unchanged after eval()", unchanged, "yes" if unchanged else "no"),
        Reading("statistics unchanged without eval()", not moved, "no" if moved else "yes"),
    )
    return Outcome(
        readings,
        abs(mixed - full) < 0.02 and agree > 0.9 and saved[False] == 0 < saved[True] and unchanged and moved
        and scaler.get_scale() == scale,
        "There is no backward pass, so there is nothing to scale. no_grad saves the activations' memory, autocast the time where "
        "16 bits are fast. eval() is a separate matter: without it, validation changes the batch-norm statistics.",
    )  # fmt: skip
