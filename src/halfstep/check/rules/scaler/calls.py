"""HS124-HS126, HS131: arguments of GradScaler and its methods, and a scaler alongside a framework's own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import TraceRule, function_around, scalers_at, switched_off, without_amp
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.updates import is_passed_in
from halfstep.check.script.objects.engines import ACCELERATE, Engine, engines_of, lightning_methods, trains_in_fp16
from halfstep.check.script.objects.values import Scaler, argument, constant, text_of
from halfstep.check.script.regions.devices import is_condition
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Outline
from halfstep.check.script.syntax.scaler_class import SCALER_ARGUMENTS, is_data_scaler

__all__ = ["RULES", "framework_precisions", "on_another_path"]

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


# The constructor's arguments in order, with their limits.
_LIMITS = {
    "init_scale": "above 0",
    "growth_factor": "above 1",
    "backoff_factor": "below 1",
    "growth_interval": "above 0",
}


_FLAG = regex(r"(^|[._])(use_|with_|enable_)?(amp|fp16|half|mixed_precision|autocast)(_enabled)?$", re.IGNORECASE)
_DEVICE = regex(r"(^|[._])device(_type|\.type)?$", re.IGNORECASE)


def _is_valid(value: float, limits: str) -> bool:
    word, limit = limits.split()
    return value > float(limit) if word == "above" else value < float(limit)


_MISNAMED = {"torch.cuda.GradScaler", "torch.cpu.GradScaler"}
_ASKS = regex(r"attr\(|version", re.IGNORECASE)


class ScalerArguments(ScriptRule):
    """A GradScaler is constructed with an invalid or misplaced argument."""

    code = "HS124"
    name = "scaler-arguments"
    severity = "error"
    reason = (
        "`torch.amp.GradScaler(device, init_scale, ...)` and the older `torch.cuda.amp.GradScaler(init_scale, ...)` differ "
        "in their first argument, so a bare number, a flag or a device can land in the wrong place, and only the first accepts `device=`, "
        "which raises TypeError in the other. No version of torch has `device_type`, which is autocast's. growth_factor must be above 1 "
        "and backoff_factor below 1, or the constructor raises; with a growth_interval below 1 the scale never grows, and a "
        "scale of 0 gives NaN. No version of torch has `torch.cuda.GradScaler`: AttributeError."
    )
    bad = (
        "import torch\nscaler = torch.cuda.amp.GradScaler('cuda')\n",
        "import torch\nscaler = torch.amp.GradScaler(2**10)\n",
        "import torch\nscaler = torch.amp.GradScaler('cuda', growth_factor=1.0)\n",
        "import torch\nscaler = torch.cuda.amp.GradScaler(device='cuda')\n",
        "import torch\nscaler = torch.cuda.GradScaler()\n",
        "import torch\nscaler = torch.cuda.amp.GradScaler(args.use_amp)\n",
        "import torch\nscaler = torch.amp.GradScaler(args.dtype == 'float16')\n",
        "import torch\ntry:\n    scaler = torch.amp.GradScaler(device_type='cuda')\nexcept TypeError:\n    scaler = torch.amp.GradScaler()\n",
    )
    good = (
        "import torch\nscaler = torch.amp.GradScaler('cuda')\n",
        "import torch\nscaler = torch.amp.GradScaler('cuda', init_scale=2**10)\n",
        "import torch\nscaler = torch.amp.GradScaler('cuda', 2.0**10, 2.0, 0.5, 1000)\n",
    )
    references = (f"{_AMP}#torch.amp.GradScaler",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Scalers with a literal argument that is invalid, and names that torch does not have."""
        for call, _ in script.outline.calls.get("GradScaler", ()):
            full = script.outline.names.full(call.func)
            above = [n for n in script.above(call) if isinstance(n, (ast.If, ast.IfExp, ast.Try))]
            is_asked = any(isinstance(n, ast.Try) or _ASKS.search(text_of(n.test)) for n in above)
            if full in _MISNAMED and not is_asked:
                yield self.finding(
                    script.where(call), f"torch has no `{full}`: AttributeError", instead='torch.amp.GradScaler("cuda")'
                )
        for scaler in script.scalers:
            if script.outline.names.ambiguous(scaler.node.func):
                continue
            fault = self._fault(script.outline, scaler)
            if not fault:
                continue
            is_handled = fault.endswith("TypeError") and _is_handled(script, scaler.node)
            first = scaler.node.args[0] if scaler.node.args else ast.Constant(None)
            is_flag = _FLAG.search(key_of(first)) or is_condition(script.outline, first, scaler.function)
            right = f"enabled={text_of(first)}" if is_flag else "init_scale=2.0**16"
            yield self.finding(
                script.where(scaler.node),
                f"{fault} in every version of torch, so the handler always runs" if is_handled else fault,
                instead=f'torch.amp.GradScaler("cuda", {right})',
                severity="advice" if is_handled else None,
            )

    @staticmethod
    def _fault(outline: Outline, scaler: Scaler) -> str:
        call, first = scaler.node, constant(scaler.node.args[0]) if scaler.node.args else ...
        old = scaler.api == "torch.cuda.amp.GradScaler"
        shift = 0 if old else 1
        if old and isinstance(first, str):
            return f"torch.cuda.amp.GradScaler expects init_scale first, not {first!r}"
        if scaler.api == "torch.amp.GradScaler" and isinstance(first, (int, float)):
            return f"torch.amp.GradScaler expects the device first, not {first!r}; init_scale is not set"
        if "Sharded" in scaler.api or scaler.api not in {"torch.amp.GradScaler", "torch.cuda.amp.GradScaler"}:
            return ""
        name = key_of(call.args[0]) if call.args else ""
        if call.args and is_condition(outline, call.args[0], scaler.function):
            effect = "a scale of 1 or 0" if old else "the scaler is always enabled"
            return f"{scaler.api} expects {'init_scale' if old else 'the device'} first, not the condition `{text_of(call.args[0])}`: {effect}"
        if _FLAG.search(name) or (old and _DEVICE.search(name)):
            expected = "init_scale" if old else "the device"
            return f"{scaler.api} expects {expected} first, not `{name}`" + (
                "" if _DEVICE.search(name) else ": the scaler is always enabled"
            )
        names = SCALER_ARGUMENTS - {"device"} if old else SCALER_ARGUMENTS
        unknown = [k.arg for k in call.keywords if k.arg is not None and k.arg not in names]
        if unknown:
            return f"{scaler.api} has no argument `{unknown[0]}`: TypeError"
        for position, (name, limits) in enumerate(_LIMITS.items(), start=shift):
            value = constant(argument(call, position, name))
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not _is_valid(value, limits):
                return f"{name}={value!r} must be {limits}"
        return ""


def _is_handled(script: Script, call: ast.Call) -> bool:
    """Whether a handler catches the TypeError of a call: another signature is tried next."""
    inner: ast.AST = call
    for outer in script.above(call):
        if isinstance(outer, ast.Try) and any(inner is statement for statement in outer.body):
            types = [text_of(handler.type) if handler.type is not None else "" for handler in outer.handlers]
            if any(not t or re.search(r"\b(TypeError|Exception|BaseException)\b", t) for t in types):
                return True
        inner = outer
    return False


class ScalerStepClosure(TraceRule):
    """A closure is passed to scaler.step."""

    code = "HS125"
    name = "scaler-step-closure"
    severity = "error"
    reason = (
        "`scaler.step(optimizer, closure=...)` raises RuntimeError: a closure would run backward again after the scaler has unscaled "
        "the gradients. A positional closure is passed on unchecked, and the gradients of the second backward stay scaled."
    )
    bad = ("import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    scaler.scale(model(x)).backward()\n"
           "    scaler.step(optimizer, closure=closure)\n    scaler.update()\n",)  # fmt: skip
    good = (
        "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    scaler.scale(model(x)).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
        _TRAIN,
    )
    references = (f"{_AMP}#torch.amp.GradScaler.step",)
    kinds = ("scaler_step",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A second argument that is a closure."""
        call = trace[index].node
        assert isinstance(call, ast.Call)
        closure = argument(call, 1, "closure")
        if closure is None or isinstance(closure, ast.Constant) or not self._is_closure(script, call, closure):
            return None
        if not self._is_torch(script, trace, index):
            return None  # a project's own scaler may accept one
        if key_of(closure) in trace[index].function.params:
            return None  # the `step(self, closure=None)` of a wrapper, which passes None on
        return self.finding(
            script.where(call),
            f"`{trace[index].scaler}.step` does not support closures",
            instead="use an optimizer without a closure, or bfloat16 without a scaler",
        )

    @staticmethod
    def _is_closure(script: Script, call: ast.Call, closure: ast.expr) -> bool:
        """Whether an argument of step is a function: by the name of the parameter, its own name, or its definition."""
        name = key_of(closure)
        is_named = any(k.value is closure for k in call.keywords) or "closure" in (name or "closure")
        return is_named or any(f.name == name for f in script.outline.functions)

    @staticmethod
    def _is_torch(script: Script, trace: Trace, index: int) -> bool:
        """Whether the scaler is created in this file, and only by torch's class, or is passed in and used like torch's."""
        event = trace[index]
        last = event.scaler.rsplit(".", 1)[-1]
        bound = [b for key, bs in script.outline.bindings.items() if key.rsplit(".", 1)[-1] == last for b in bs]
        makers = [n for b in bound if b.value is not None for n in ast.walk(b.value) if isinstance(n, ast.Call)]
        known = {scaler.node for scaler in script.scalers}
        named = [m for m in makers if text_of(m.func).endswith("Scaler") and not is_data_scaler(text_of(m.func))]
        is_created = any(m in known for m in makers) and all(m in known for m in named)
        return is_created or is_passed_in(script, trace, event)


_FRAMEWORKS = {
    "accelerate.Accelerator": "mixed_precision",
    "lightning.Fabric": "precision",
    "lightning.fabric.Fabric": "precision",
    "lightning_fabric.Fabric": "precision",
}
_ACCELERATE = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp16")
{scaler}model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    with accelerator.autocast():
        loss = loss_fn(model(x), y)
    {backward}
    {step}
"""


def framework_precisions(script: Script) -> set[str]:
    """The 16-bit dtypes that Accelerate or Fabric is set to in this script; "?" where they cannot be determined."""
    dtypes = set()
    for api in _FRAMEWORKS.keys() & script.outline.library_calls.keys():
        for call, _ in script.outline.library_calls[api]:
            value = argument(call, 3 if api.endswith("Fabric") else 2, _FRAMEWORKS[api])
            text = str(constant(value)) if constant(value) is not ... else "?"
            dtypes.add("bfloat16" if "bf16" in text else "float16" if "16" in text else "?")
    return dtypes


class ScalerWithFramework(TraceRule):
    """The script uses its own GradScaler in addition to that of Accelerate, Fabric or Lightning."""

    code = "HS131"
    name = "second-scaler"
    severity = "error"
    reason = (
        "With mixed_precision='fp16' Accelerate has its own GradScaler, and the optimizer that `prepare` returns steps through it; so "
        "does Fabric with precision='16-mixed', and Lightning's Trainer for the optimizers of `self.optimizers()`. A second scaler either scales the loss twice, or steps an optimizer whose own "
        "scaler has not scaled any loss, which raises AssertionError. Without the argument, `accelerate launch` decides the precision. "
        "With a DeepSpeedPlugin the prepared optimizer's step does nothing: only `accelerator.backward` steps."
    )
    bad = (
        _ACCELERATE.format(
            scaler="scaler = torch.amp.GradScaler('cuda')\n",
            backward="scaler.scale(loss).backward()",
            step="scaler.step(optimizer)\n    scaler.update()",
        ),
        _ACCELERATE.format(
            scaler="scaler = torch.amp.GradScaler('cuda')\n",
            backward="accelerator.backward(scaler.scale(loss))",
            step="optimizer.step()",
        ),
    )
    good = (_ACCELERATE.format(scaler="", backward="accelerator.backward(loss)", step="optimizer.step()"),)
    references = ("https://huggingface.co/docs/accelerate/package_reference/accelerator",)
    kinds = ("scaler_step", "scale")

    def check(self, script: Script) -> Iterator[Finding]:
        """The findings in `script`, one per scaler; also for Lightning modules, whose optimizers are the Trainer's."""
        by_place = {(finding.line, finding.column): finding for finding in super().check(script)}
        yield from by_place.values()
        # `self.scaler.step(self.optimizers())`: the optimizer steps through the scaler of the Trainer.
        steps = [e for e in script.events("scaler_step") if e.scaler] if "ightning" in script.source.text else []
        methods = set(lightning_methods(script)) if steps and trains_in_fp16(script) else set()
        for event in steps:
            scalers = scalers_at(script, event) if event.function in methods and not switched_off(script, event) else []
            for scaler in scalers[:1]:
                yield self.finding(
                    script.where(scaler.node),
                    f"`{event.scaler}` steps an optimizer ({script.at(event.node)}) that already has the float16 scaler of Lightning's Trainer",
                    instead="remove the scaler; call self.manual_backward(loss), then optimizer.step()",
                )

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A step of the script's own scaler, or a loss it scales, when the framework runs in float16."""
        event = trace[index]
        twice = isinstance(script.outline.parents.get(event.node), ast.Call)  # framework.backward(scaler.scale(loss))
        if event.kind == "scale" and not (twice and script.has("owned_backward")):
            return None
        scales, stops = self._conflict(script, trace, event)
        if not (scales or stops) or switched_off(script, event) or without_amp(event):
            return None
        scalers = scalers_at(script, event)
        if not scalers or not script.outline.calls.keys() & {"prepare", "setup", "setup_optimizers"}:
            return None
        conflict = "scales a loss that the framework scales again with its own"
        if event.kind == "scaler_step":
            conflict = "steps an optimizer that already has the framework's own"
        message = f"{'' if scales == 'always' else 'in fp16 '}`{event.scaler}` {conflict} float16 scaler"
        if stops:
            message = f"`{event.scaler}` bypasses `{stops}`: DeepSpeed's engine never steps"
        return self.finding(
            script.where(scalers[0].node),
            message,
            instead="remove the scaler; call accelerator.backward(loss) or fabric.backward(loss), then optimizer.step()",
            severity=None if stops or scales == "always" else "warning",
        )

    @staticmethod
    def _conflict(script: Script, trace: Trace, event: Event) -> tuple[str, str]:
        """Whether the framework scales (always, maybe), and the Accelerator that only steps through DeepSpeed's engine."""
        engines = [engine for engine in engines_of(script) if not _of_another_class(script, engine, event)]
        engines = [engine for engine in engines if not on_another_path(script, trace, engine, event)]
        precisions = {engine.precision for engine in engines}
        scales = "always" if precisions == {"fp16"} else "maybe" if precisions == {"?"} else ""
        deepspeed = [e.key for e in engines if e.plugin == "deepspeed" and e.library == ACCELERATE]
        return scales, deepspeed[0] if deepspeed and len(deepspeed) == len(engines) else ""


def _of_another_class(script: Script, engine: Engine, event: Event) -> bool:
    """Whether the engine is an attribute of other classes than the scaler: two training loops in one file."""
    sites = script.outline.calls.get("backward", ())
    used = [(key_of(call.func.value), f.cls) for call, f in sites if isinstance(call.func, ast.Attribute)]
    owners = {cls for key, cls in used if key == f"self.{engine.name}" and cls}
    if engine.function is not None and engine.key.startswith("self.") and engine.function.cls:
        owners.add(engine.function.cls)
    return event.scaler.startswith("self.") and bool(owners) and event.function.cls not in {"", *owners}


def on_another_path(script: Script, trace: Trace, engine: Engine, event: Event) -> bool:
    """Whether only a function that is called instead of the scaler's creates the engine: one loop with the library, one without."""
    if engine.function is None or engine.function.parent is None:
        return False
    around = {event.function.node, *(function_around(script, root) for root in event.roots)}
    owned = [e for e in trace if e.kind == "owned_backward" and e.local.subject == engine.key]
    return engine.function.node not in around and bool(owned) and not any(compatible(e, event) for e in owned)


class UpdateWithInt(TraceRule):
    """scaler.update is called with an int."""

    code = "HS126"
    name = "update-with-int"
    severity = "error"
    reason = "`scaler.update(new_scale)` expects a float or a tensor; an int raises AttributeError: 'int' object has no attribute 'device'."
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
        return self.finding(
            script.where(call), f"update() raises AttributeError for the int {value}", instead=f"{float(value)}"
        )


RULES: tuple[type[Rule], ...] = (ScalerArguments, ScalerStepClosure, UpdateWithInt, ScalerWithFramework)
