"""HS129, HS149: validation needs autocast but not the scaler."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.order import TraceRule
from halfstep.check.script.script import Script
from halfstep.check.script.trace import Trace

__all__ = ["RULES"]

_AMP = "https://docs.pytorch.org/docs/stable/amp.html"
_TRAIN = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


class ScalerInValidation(TraceRule):
    """The loss is scaled although no gradients are computed."""

    code = "HS129"
    name = "scaler-in-validation"
    severity = "warning"
    reason = (
        "Scaling only protects gradients. Without them the validation loss is up to 65536 times too large, and what is logged, "
        "averaged or used for early stopping changes whenever the scale changes."
    )
    bad = (_TRAIN + "with torch.no_grad():\n    val_loss = scaler.scale(loss_fn(model(x), y))\n",)
    good = (
        _TRAIN
        + 'with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):\n    val_loss = loss_fn(model(x), y)\n',
    )
    references = (f"{_AMP}#gradient-scaling",)
    kinds = ("scale",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """scaler.scale inside no_grad or inference_mode."""
        event = trace[index]
        if event.inside("no_grad") is None:
            return None
        if event.roots and event.guards:
            return None  # a function for training and validation that distinguishes the two
        return self.finding(
            script.where(event.node),
            f"`{event.scaler}.scale` is called where no gradients are computed: the loss is up to 65536 times too large",
            instead="use the loss without scaling",
        )


class EvaluationWithoutAutocast(ScriptRule):
    """Training runs under autocast, but validation does not."""

    code = "HS149"
    name = "evaluation-without-autocast"
    severity = "advice"
    reason = (
        "Validation in float32 needs up to twice the time and memory of validation under autocast, and evaluates different arithmetic "
        "than training uses. Validation needs autocast, but not the scaler."
    )
    bad = (_TRAIN + "model.eval()\nwith torch.no_grad():\n    for x, y in valid:\n        out = model(x)\n",)
    good = (
        _TRAIN
        + 'model.eval()\nwith torch.no_grad():\n    for x, y in valid:\n        with torch.autocast("cuda", dtype=torch.float16):\n            out = model(x)\n',
    )
    references = (f"{_AMP}#torch.autocast",)

    def check(self, script: Script) -> Iterator[Finding]:
        """The first forward without gradients outside any autocast region, in scripts that train inside one."""
        trains = any(e.autocast() and not e.inside("no_grad") for e in script.events("forward"))
        if not trains or not script.has("backward"):
            return
        for event in script.events("forward"):
            if event.inside("no_grad") and not any(r.kind in {"autocast", "owned", "other"} for r in event.regions):
                yield self.finding(
                    script.where(event.node),
                    f"`{event.subject}` runs in float32 here, but under autocast in training",
                    instead='with torch.no_grad(), torch.autocast("cuda", ...):',
                )
                return


RULES: tuple[type[Rule], ...] = (ScalerInValidation, EvaluationWithoutAutocast)
