"""HS124-HS126: what a scaler is made and called with."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.names import key_of
from halfstep.check.order import TraceRule
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script import Script
from halfstep.check.trace import Trace
from halfstep.check.values import Scaler, argument, constant

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


# The constructor's arguments in order, and what each must be.
_LIMITS = {
    "init_scale": "above 0",
    "growth_factor": "above 1",
    "backoff_factor": "below 1",
    "growth_interval": "above 0",
}


def _meets(value: float, need: str) -> bool:
    word, limit = need.split()
    return value > float(limit) if word == "above" else value < float(limit)


class ScalerArguments(ScriptRule):
    """A scaler is made with an argument that raises, is taken for another, or stops it from working."""

    code = "HS124"
    name = "scaler-arguments"
    severity = "error"
    reason = (
        "`torch.amp.GradScaler(device, init_scale, ...)` and the older `torch.cuda.amp.GradScaler(init_scale, ...)` begin "
        "differently, so a bare number or a device name lands in the wrong place. growth_factor must be above 1 and "
        "backoff_factor below 1, or the constructor raises; growth_interval below 1 never grows; a scale of 0 gives NaN."
    )
    bad = (
        "import torch\nscaler = torch.cuda.amp.GradScaler('cuda')\n",
        "import torch\nscaler = torch.amp.GradScaler(2**10)\n",
        "import torch\nscaler = torch.amp.GradScaler('cuda', growth_factor=1.0)\n",
    )
    good = (
        "import torch\nscaler = torch.amp.GradScaler('cuda', init_scale=2**10)\n",
        "import torch\nscaler = torch.amp.GradScaler('cuda', 2.0**10, 2.0, 0.5, 1000)\n",
    )
    references = (f"{_AMP}#torch.amp.GradScaler",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Scalers with a literal argument that cannot be meant."""
        for scaler in script.scalers:
            if script.outline.names.ambiguous(scaler.node.func):
                continue
            said = self._fault(scaler)
            if said:
                yield self.finding(
                    script.where(scaler.node), said, instead='torch.amp.GradScaler("cuda", init_scale=2.0**16)'
                )

    @staticmethod
    def _fault(scaler: Scaler) -> str:
        call, first = scaler.node, constant(scaler.node.args[0]) if scaler.node.args else ...
        old = scaler.api == "torch.cuda.amp.GradScaler"
        shift = 0 if old else 1
        if old and isinstance(first, str):
            return f"torch.cuda.amp.GradScaler takes init_scale first: {first!r} is not a number"
        if scaler.api == "torch.amp.GradScaler" and isinstance(first, (int, float)):
            return f"torch.amp.GradScaler takes the device first: {first!r} is not one, and the argument it was meant for is not set"
        if "Sharded" in scaler.api or scaler.api not in {"torch.amp.GradScaler", "torch.cuda.amp.GradScaler"}:
            return ""
        for position, (name, need) in enumerate(_LIMITS.items(), start=shift):
            value = constant(argument(call, position, name))
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not _meets(value, need):
                return f"{name}={value!r} must be {need}"
        return ""


class ScalerStepClosure(TraceRule):
    """A closure is passed through the scaler's step."""

    code = "HS125"
    name = "scaler-step-closure"
    severity = "error"
    reason = (
        "`scaler.step(optimizer, closure=...)` raises RuntimeError: a closure would run backward again on gradients the scaler "
        "has already unscaled. Given by position it is passed on unchecked, and the gradients of the second backward are used scaled."
    )
    bad = ("import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    scaler.scale(model(x)).backward()\n"
           "    scaler.step(optimizer, closure=closure)\n    scaler.update()\n",)  # fmt: skip
    good = (_TRAIN,)
    references = (f"{_AMP}#torch.amp.GradScaler.step",)
    kinds = ("scaler_step",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A second argument that is a closure."""
        call = trace[index].node
        assert isinstance(call, ast.Call)
        closure = argument(call, 1, "closure")
        if closure is None or isinstance(closure, ast.Constant) or "closure" not in (key_of(closure) or "closure"):
            return None
        return self.finding(
            script.where(call),
            "the scaler cannot step with a closure",
            instead="an optimizer that needs no closure, or bfloat16 without a scaler",
        )


class UpdateWithInt(TraceRule):
    """The scale is set to an integer."""

    code = "HS126"
    name = "update-with-int"
    severity = "error"
    reason = "`scaler.update(new_scale)` takes a float or a tensor; an int raises AttributeError: 'int' object has no attribute 'device'."
    bad = (_TRAIN + "scaler.update(1024)\n",)
    good = (_TRAIN + "scaler.update(1024.0)\n",)
    references = (f"{_AMP}#torch.amp.GradScaler.update",)
    kinds = ("update",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An update with a literal int."""
        call = trace[index].node
        value = constant(argument(call, 0, "new_scale")) if isinstance(call, ast.Call) else ...
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        return self.finding(script.where(call), f"{value} is an int: update raises", instead=f"{float(value)}")


RULES: tuple[type[Rule], ...] = (ScalerArguments, ScalerStepClosure, UpdateWithInt)
