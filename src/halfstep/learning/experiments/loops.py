"""The loop of autocast and GradScaler, and what the scaler does in it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.learning.experiment import Outcome, Reading
from halfstep.precision.formats import format_name
from halfstep.precision.loss_scale import LossScale
from halfstep.scaling.scaler import LossScaler

__all__ = ["lesson_loop", "missing_update", "scale_defaults", "skipped_step"]


def _classifier() -> tuple[nn.Module, Tensor, Tensor]:
    """A small classifier, and data that it can learn."""
    x = torch.randn(64, 8)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), x, y


def lesson_loop() -> Outcome:
    """The lesson's loop on the CPU: dtypes of everything in it, and the loss."""
    model, x, y = _classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu")
    losses, dtypes = [], {}
    for _ in range(40):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
        weight = next(model.parameters())
        assert weight.grad is not None
        dtypes = {"weights": weight, "logits": logits, "loss": loss, "gradients": weight.grad}
    names = {name: format_name(tensor.dtype) for name, tensor in dtypes.items()}
    readings = [Reading(f"dtype of {name}", dtype) for name, dtype in names.items()]
    readings += [
        Reading("loss, 40 steps", losses[-1], f"{losses[0]:.3f} -> {losses[-1]:.3f}"),
        Reading("loss scale", scaler.get_scale(), f"{scaler.get_scale():.0f}"),
    ]
    return Outcome(
        tuple(readings),
        names == {"weights": "fp32", "logits": "fp16", "loss": "fp32", "gradients": "fp32"}
        and losses[-1] < losses[0] / 2,
        "The weights are the fp32 master; autocast casts them for each product. The gradient of an fp32 weight is fp32, but it was "
        "computed in fp16, and that is where small values are lost without the scaler.",
    )


def missing_update() -> Outcome:
    """The loop with scaler.update() left out."""
    model, x, y = _classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    applied, error = 0, ""
    try:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            applied += 1
    except RuntimeError as raised:
        error = str(raised).splitlines()[0]
    return Outcome(
        (Reading("steps before the error", applied), Reading("error of torch", error or "none")),
        applied == 1 and "update" in error,
        "The lesson states that a missing update() freezes the scale. In torch it cannot go unnoticed: the second step() raises. A "
        "scale freezes where update() runs only now and then, or is called on another scaler.",
    )


def skipped_step() -> Outcome:
    """One step with an inf in a gradient."""
    model, x, y = _classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scales, changed = [], []
    for overflow in (False, True, False):
        before = [p.detach().clone() for p in model.parameters()]
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
        if overflow:
            grad = next(model.parameters()).grad
            assert grad is not None
            grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    scales.append(scaler.get_scale())
    readings = (
        Reading(
            "weights changed: finite, inf, finite",
            " ".join(map(str, changed)),
            ", ".join("yes" if c else "no" for c in changed),
        ),
        Reading("scale before each step, and after", scales[-1], ", ".join(f"{s:.0f}" for s in scales)),
    )
    return Outcome(
        readings,
        changed == [True, False, True] and scales[2] == scales[1] / 2,
        "The scaler found the inf, left the weights as they were and halved the scale. Some skipped steps at the start are normal: "
        "that is the search for a scale. Many in a row are not: look at the layer that overflows.",
    )


def scale_defaults() -> Outcome:
    """The scale of Halfstep's scaler, whose defaults are DeepSpeed's, over overflows and clean steps."""
    settings = LossScale()
    scaler = LossScaler()

    def after(found_inf: float, num_steps: int, stop: Callable[[float], bool]) -> tuple[int, float]:
        for step in range(1, num_steps + 1):
            scaler.update(found_inf)
            if stop(scaler.get_scale()):
                return step, scaler.get_scale()
        return num_steps, scaler.get_scale()

    start = scaler.get_scale()
    num_overflows, lower = after(1.0, 5, lambda scale: scale < start)
    num_clean, higher = after(0.0, 2 * settings.growth_interval, lambda scale: scale > lower)
    readings = (
        Reading("scale at the start", start, f"{start:.0f}"),
        Reading("overflows until it falls", num_overflows, f"{num_overflows}, to {lower:.0f}"),
        Reading("clean steps until it grows again", num_clean, f"{num_clean}, to {higher:.0f}"),
    )
    return Outcome(
        readings,
        start == 65536
        and num_overflows == 2
        and num_clean == settings.growth_interval + 1
        and lower == start / 2
        and higher == start,
        "The first overflow only skips its step; the second lowers the scale. DeepSpeed counts one clean step more than its window "
        "after an overflow, and so does Halfstep under its name. torch has no hysteresis and waits 2000 steps.",
    )
