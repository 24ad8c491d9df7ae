"""What goes wrong: underflow without a scaler, overflow, and weights that stop changing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.learning.experiment import Outcome, Reading

__all__ = ["lost_updates", "overflow", "scaler_by_format", "standing_still", "underflow_nan"]

_STEPS = 40


@dataclass(frozen=True)
class _Run:
    losses: list[float]
    zero_share: float  # of the elements of all gradients of the first step
    has_nan: bool

    @property
    def reduction(self) -> float:
        """First loss by last loss."""
        return self.losses[0] / self.losses[-1]


def _train_small_targets(
    dtype: torch.dtype | None, *, scaled: bool = False, batch: int = 128, target: float = 5e-5
) -> _Run:
    """Regression on targets of 5e-5 with a loss averaged over 8192 outputs: the gradients of the outputs are about 1e-8.

    The sizes are chosen so that every gradient underflows in fp16. With gradients four times as large (batch=64, target=1e-4) few
    do, and training hardly suffers: `scaler_by_format` shows that too.
    """
    torch.manual_seed(0)
    x = torch.randn(batch, 16)
    y = target * torch.tanh(x @ torch.randn(16, 64))
    model = nn.Linear(16, 64)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6, eps=1e-15)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    losses, zero_share = [], 0.0
    for step in range(_STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            output = model(x)
        loss = F.mse_loss(output.float(), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        grads = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        if step == 0:
            zero_share = float((grads == 0).float().mean())
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return _Run(losses, zero_share, any(loss != loss for loss in losses))  # noqa: PLR0124 - NaN differs from itself


def _readings(name: str, run: _Run) -> tuple[Reading, ...]:
    return (
        Reading(f"{name}: gradients that are 0", run.zero_share, f"{run.zero_share:.1%}"),
        Reading(f"{name}: loss, {_STEPS} steps", run.losses[-1], f"{run.losses[0]:.3e} -> {run.losses[-1]:.3e}"),
    )


def scaler_by_format() -> Outcome:
    """The same training in fp32, fp16 with and without scaler, and bf16 without."""
    runs = {
        "fp32": _train_small_targets(None),
        "fp16, no scaler": _train_small_targets(torch.float16),
        "fp16 + GradScaler": _train_small_targets(torch.float16, scaled=True),
        "bf16, no scaler": _train_small_targets(torch.bfloat16),
    }
    lost = runs.pop("fp16, no scaler")
    mild = _train_small_targets(torch.float16, batch=64, target=1e-4)
    holds = (
        lost.zero_share > 0.99
        and mild.zero_share < 0.5
        and mild.reduction > 2
        and all(run.zero_share < 0.01 and run.reduction > 2 for run in runs.values())
    )
    return Outcome(
        tuple(
            reading
            for name, run in {**runs, "fp16, no scaler": lost, "fp16, no scaler, 4x gradient": mild}.items()
            for reading in _readings(name, run)
        ),
        holds,
        "The gradients here are about 1e-8. fp16 cannot store them; multiplied by 65536 it can, and the scaler divides them "
        "again in fp32. bf16 stores 1e-8 as it is, so a scaler would only add work. The problem is built to show it: with gradients four times as large fp16 trains "
        "without a scaler, and what it loses goes unnoticed.",
    )


def standing_still() -> Outcome:
    """fp16 without a scaler: the loss of every step."""
    run, reference = _train_small_targets(torch.float16), _train_small_targets(None)
    num_losses = len(set(run.losses))
    readings = (
        *_readings("fp16, no scaler", run),
        Reading("fp16, no scaler: different losses in all steps", num_losses),
        Reading("fp16, no scaler: NaN losses", run.has_nan, "yes" if run.has_nan else "none"),
        *_readings("fp32", reference),
    )
    return Outcome(
        readings,
        run.zero_share > 0.99 and num_losses == 1 and not run.has_nan and reference.reduction > 2,
        "The problem is built so that all gradients underflow. Every gradient is exactly 0, so no weight moves and the loss is the same number in every step. Nothing is NaN and "
        "nothing raises: look for layers whose gradients are 0, not for NaN.",
    )


def overflow() -> Outcome:
    """A forward pass beyond fp16's range, and the loss that follows."""
    x = torch.full((4, 8), 300.0)
    losses = {}
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        activations = (x.to(dtype) * x.to(dtype)).float()  # 90000 each
        losses[name] = float((activations - activations.mean(dim=1, keepdim=True)).square().mean())
    readings = tuple(
        Reading(f"{name}: loss with activations of 90000", str(value), f"{value:g}") for name, value in losses.items()
    )
    return Outcome(
        readings,
        losses["fp16"] != losses["fp16"] and losses["bf16"] == losses["fp32"] == 0.0,
        "300 * 300 is inf in fp16, and inf - inf is NaN. No loss scale helps, because the loss scale changes only the backward "
        "pass: use bf16, or compute that layer in fp32.",
    )


def underflow_nan() -> Outcome:
    """One step of Adam with gradients of zero, on fp16 and on fp32 weights, and with a larger eps."""
    weights = {}
    for name, dtype, eps in (
        ("fp16 weights, eps=1e-8", torch.float16, 1e-8),
        ("fp16 weights, eps=1e-4", torch.float16, 1e-4),
        ("fp32 weights, eps=1e-8", torch.float32, 1e-8),
    ):
        weight = nn.Parameter(torch.ones(4, dtype=dtype))
        weight.grad = torch.zeros_like(weight)  # what underflow leaves
        torch.optim.Adam([weight], lr=1e-3, eps=eps, foreach=False).step()
        weights[name] = float(weight.detach()[0])
    readings = tuple(Reading(f"{name}: weight after a step", str(w), f"{w:g}") for name, w in weights.items())
    return Outcome(
        readings,
        math.isnan(weights["fp16 weights, eps=1e-8"]) and all(w == 1 for w in list(weights.values())[1:]),
        "Here the lesson is right that underflow leads to NaN: after model.half(), Adam's moments are fp16, eps=1e-8 rounds to 0, and "
        "the update is 0/0. Under autocast weights and moments are fp32, and this does not happen.",
    )


def lost_updates() -> Outcome:
    """Adam with lr=1e-3 on weights of about 1: in fp32, in pure bf16, and in bf16 with a master."""
    x = torch.randn(64, 16)
    y = x @ torch.full((16, 1), 1.5)
    moved, losses = {}, {}
    for name in ("fp32", "bf16 without master", "bf16-lean"):
        model = nn.Linear(16, 1, bias=False)
        nn.init.ones_(model.weight)
        if name == "bf16 without master":
            model = model.bfloat16()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        engine = Engine(model, optimizer, name) if name == "bf16-lean" else None
        for _ in range(100):
            loss = _step(model, optimizer, engine, x, y)
        moved[name] = float((model.weight.detach().float() != 1).float().mean())
        losses[name] = loss
    readings = [
        Reading(f"{name}: weights that changed in 100 steps", share, f"{share:.0%}") for name, share in moved.items()
    ]
    readings += [Reading(f"{name}: last loss", loss, f"{loss:.4f}") for name, loss in losses.items()]
    frozen = losses["bf16 without master"]
    return Outcome(
        tuple(readings),
        moved == {"fp32": 1.0, "bf16 without master": 0.0, "bf16-lean": 1.0}
        and abs(losses["bf16-lean"] / losses["fp32"] - 1) < 0.05
        and frozen > 1.2 * losses["fp32"],
        "Adam's update is 0.001, and half the spacing of bf16 at 1 is 0.0039: weight + update rounds back to the weight, in every "
        "step. With a master (16 more bits per weight in bf16-lean) the updates add up, and the loss follows fp32.",
    )


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None, x: torch.Tensor, y: torch.Tensor
) -> float:
    """One step with the Engine or without; returns the loss."""
    if engine is not None:
        with engine.forward():
            loss = F.mse_loss(model(x).float(), y)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())
    optimizer.zero_grad()
    weight = next(model.parameters())
    loss = F.mse_loss(model(x.to(weight.dtype)).float(), y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())
