"""Gradient clipping with a scaler: the order, and what clipping does not cure."""

from __future__ import annotations

import torch
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.learning.experiment import Outcome, Reading

__all__ = ["non_finite", "order", "update_norm"]

_MAX_NORM = 1.0


def _problem() -> tuple[nn.Linear, torch.optim.Optimizer, torch.Tensor]:
    """A model whose gradient is longer than max_norm; with lr=1 the update is the gradient.

    Its elements are small enough for fp16 at a scale of 65536.
    """
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), 4 * torch.randn(16, 32)


def update_norm(precision: str) -> float:
    """The norm of one SGD update with lr=1 and max_norm=1 by the Engine."""
    model, optimizer, x = _problem()
    before = [p.detach().clone() for p in model.parameters()]
    engine = Engine(model, optimizer, precision, max_norm=_MAX_NORM)
    with engine.forward():
        loss = model(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return _distance(before, model)


def _distance(before: list[torch.Tensor], model: nn.Module) -> float:
    differences = [(a - b.detach()).reshape(-1) for a, b in zip(before, model.parameters(), strict=True)]
    return float(torch.cat(differences).norm())


def _scaled(*, unscale_first: bool) -> tuple[float, float]:
    """The norm that clipping saw, and the norm of the update."""
    model, optimizer, x = _problem()
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(x)
    scaler.scale(output.float().square().mean()).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM))
    scaler.step(optimizer)
    scaler.update()
    return norm, _distance(before, model)


def order() -> Outcome:
    """The update with lr=1, by clipping after and before unscale_, and by the Engine."""
    (true_norm, right), (scaled_norm, wrong) = _scaled(unscale_first=True), _scaled(unscale_first=False)
    engine = update_norm("fp16")
    readings = (
        Reading("norm of the true gradient", true_norm),
        Reading("norm of the scaled gradient", scaled_norm),
        Reading("update, unscale_ then clip", right, f"{right:.6f}"),
        Reading("update, clip without unscale_", wrong, f"{wrong:.3e}"),
        Reading("update by the Engine, max_norm=1.0", engine, f"{engine:.6f}"),
    )
    holds = abs(right - 1) < 1e-3 and abs(engine - 1) < 1e-2 and abs(wrong * 65536 - 1) < 1e-3
    return Outcome(
        readings,
        holds,
        f"With lr = 1 and SGD the update is the clipped gradient, so its norm must be max_norm = 1. Clipped before unscale_ it is "
        f"{wrong:.1e}, which is 1/65536: nothing raises, and SGD hardly trains. Adam's loss curve may not show it, because Adam divides by the "
        "gradient's size; the clipping is as wrong.",
    )


def non_finite() -> Outcome:
    """What clip_grad_norm_ makes of gradients with an inf."""
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.tensor([1.0, float("inf"), 2.0, 3.0])
    norm = float(nn.utils.clip_grad_norm_([weight], _MAX_NORM))
    clipped = weight.grad.tolist()
    return Outcome(
        (
            Reading("norm of [1, inf, 2, 3]", str(norm)),
            Reading("gradient after clipping at 1", str(clipped), ", ".join(f"{g:g}" for g in clipped)),
        ),
        norm == float("inf") and any(g != g for g in clipped) and clipped[0] == 0,  # noqa: PLR0124 - NaN
        "The norm is inf, so every gradient is multiplied by 0: finite ones become 0, and the inf becomes NaN. The scaler's check, not clipping, "
        "protects the weights; with unscale_ first it has recorded the inf, and step() is skipped.",
    )
