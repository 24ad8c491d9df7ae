"""HS123: float16 autocast without a scaler, wherever the region is opened."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.examples import PLAIN_LOOP, SCALED_LOOP
from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.script.flow.absent import is_never_passed_none
from halfstep.check.script.flow.event import Event, Guard, compatible
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.flow.order import (
    TraceRule,
    allows_float16,
    between,
    earlier,
    is_amp,
    later,
    scalers_at,
    switched_off,
    without_amp,
)
from halfstep.check.script.flow.origin import comes_from_call, region_of_loss, regions_in_model
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.engines import ACCELERATE, Engine, engine_at, loop_class
from halfstep.check.script.objects.modules import is_on, is_on_by_default
from halfstep.check.script.objects.outputs import in_no_grad
from halfstep.check.script.objects.scaling import has_scaler, is_elsewhere, is_forgotten, is_out_of_reach, is_owned
from halfstep.check.script.objects.values import UNKNOWN, Autocast, is_misplaced, text_of
from halfstep.check.script.pairing.mps import omitted_on_mps, works_on_cuda_only
from halfstep.check.script.pairing.records import omitted_by_record
from halfstep.check.script.pairing.scaler_condition import (
    is_always_float16,
    is_chosen_elsewhere,
    is_entered_without,
    is_other_switch,
    omitted_float16,
    omitted_in_runs,
)
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_AMP = "https://docs.pytorch.org/docs/stable/amp.html"
_SCALED = SCALED_LOOP.format(scaler='scaler = torch.amp.GradScaler("cuda")', dtype="float16")
_ITEM = """\
import torch
for batch in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.{dtype}):
        out = model(**batch)
    out["loss"].backward()
    optimizer.step()
"""
_SCALE = 'use torch.amp.GradScaler("cuda"), or autocast with dtype=torch.bfloat16'
_DEVICE = regex(r"cuda|gpu|cpu|mps|xpu|npu|device|available", re.IGNORECASE)  # without it autocast is off as well
_FLOAT16 = regex(r"== (torch\.)?['\"]?(float16|fp16|half)")
_MODULE_STEPS = {"training_step", "forward", "shared_step", "_shared_step", "compute_loss"}
_PLAIN_TRAINERS = ("pytorch_metric_learning.trainers.",)
_SETTING = regex(r"(self\.)?_?(args|cfg|config|conf|hparams|opts?|flags|settings)\.[\w.]+$")
_FORMAT = regex(r"16|dtype|bf|half|float", re.IGNORECASE)


class Fp16WithoutScaler(TraceRule):
    """float16 autocast is used for training without a GradScaler."""

    code = "HS123"
    name = "fp16-without-scaler"
    severity = "error"
    reason = (
        "The smallest positive float16 value is 6e-8, and many gradients are smaller: without a loss scale they become zero and "
        "their weights stop learning; the loss stalls or becomes NaN. bfloat16 has the range of float32 and needs no scaler. "
        "A warning where only another value of a setting than the file's own leads there, another device, or a dtype of None, for which CUDA takes float16."
    )
    bad = (
        PLAIN_LOOP.format(dtype="float16"),
        "import torch\nfrom torch.cuda.amp import autocast\nfor x, y in loader:\n    optimizer.zero_grad()\n    with autocast():\n"
        "        out = model(x)\n        loss = criterion(out, y)\n    loss.backward()\n    optimizer.step()\n",
        _ITEM.format(dtype="float16"),
    )
    good = (PLAIN_LOOP.format(dtype="bfloat16"), _SCALED, _ITEM.format(dtype="bfloat16"))
    references = (f"{_AMP}#gradient-scaling", "https://arxiv.org/abs/1710.03740")
    kinds = ("backward", "owned_backward")
    lines = ("training_step",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Every event of the traces, and the regions of Lightning modules, whose backward is Lightning's."""
        yield from super().check(script)
        for call, function in script.outline.calls.get("autocast", ()):
            owner = loop_class(script, function.cls) if function.name in _MODULE_STEPS else None
            if owner is None or owner.base not in {"automatic", "manual"} or owner.precision not in {"fp32", "bf16"}:
                continue
            if owner.base == "manual" and has_scaler(script):
                continue
            region = next((a for a in script.autocasts if a.node is call), None)
            if region is None or region.dtype != "float16" or region.enabled != "yes" or in_no_grad(script, call):
                continue
            trained = "fp32" if owner.precision == "fp32" else "bf16-mixed"
            yield self.finding(
                script.where(call),
                f"this region computes in float16, and the Trainer ({trained}) does not scale the loss: gradients below 6e-8 become zero",
                instead="Trainer(precision='16-mixed') without this region",
            )
        yield from self._in_trainer(script)

    def _in_trainer(self, script: Script) -> Iterator[Finding]:
        """The regions in methods of a trainer whose library runs a plain backward and step."""
        names = script.outline.names
        classes = {
            cls
            for cls, bases in script.outline.bases.items()
            if any(names.full(base).startswith(_PLAIN_TRAINERS) for base in bases)
        }
        if not classes or has_scaler(script):
            return
        for call, function in script.outline.calls.get("autocast", ()):
            region = next((a for a in script.autocasts if a.node is call), None)
            is_float16 = region is not None and region.dtype == "float16" and region.enabled != "no"
            if function.cls in classes and is_float16 and not in_no_grad(script, call):
                yield self.finding(
                    script.where(call),
                    f"this region computes in float16, and the trainer that `{function.cls}` extends does not scale the loss: "
                    "gradients below 6e-8 become zero",
                    instead=_SCALE,
                )

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A backward under float16 autocast that no scaler scales, in a script that leaves the scaling to no library."""
        event = trace[index]
        if event.kind == "owned_backward":
            return self._under_engine(script, trace, index)
        if is_owned(script, trace, event):
            return None
        if event.scaled == "yes":
            return (
                self._switched_off(script, trace, index)
                or self._left_out(script, trace, index)
                or self._switched_by_flag(script, trace, index)
            )
        if event.scaled != "no" or not any(True for _ in later(trace, index, "opt_step")):
            return None
        if has_scaler(script) and not is_forgotten(script, trace, index) and not is_elsewhere(script, trace):
            return self._beside_scaler(script, trace, index) or self._without_its_scaler(script, trace, index)
        if without_amp(event):
            return None
        opened = region_of_loss(script, trace, index)
        if opened is not None:
            return self._report(script, event, opened) if _may_be_float16(script, opened) else None
        return self._decorated(script, trace, index) or self._in_forward(script, trace, index)

    def _under_engine(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a loss of torch's float16 autocast that an Accelerator or Fabric does not scale."""
        event = trace[index]
        func = event.node.func if isinstance(event.node, ast.Call) else None
        engine = engine_at(script, key_of(func.value), event.function) if isinstance(func, ast.Attribute) else None
        # In bf16 the forward of a prepared model opens a region of its own, inside this one.
        launched = engine is not None and engine.precision == "?" and _is_left_to_launcher(script, engine)
        if engine is None or not (launched or engine.precision == "fp32") or engine.plugin == "deepspeed":
            return None
        opened = region_of_loss(script, trace, index)
        if without_amp(event) or opened is None or not _may_be_float16(script, opened):
            return None
        if between(trace, trace.index(opened), index, "scale"):
            return None  # `accelerator.backward(scaler.scale(loss))`
        region = _float16_region(opened)
        is_certain = all(a.dtype == "float16" for a in opened.regions[-1].autocasts)
        if not is_certain and _tests_format(region, opened, event):
            return None
        when = "this region computes in float16, and" if is_certain else _condition(region)
        unless = "unless it is launched with mixed precision, " if launched else ""
        return self.finding(
            script.where(region.node),
            f"{when} {unless}`{engine.key}` does not scale the loss ({script.at(event.node)}): gradients below 6e-8 become zero",
            instead="Accelerator(mixed_precision='fp16') with accelerator.autocast(), or dtype=torch.bfloat16"
            if engine.library == ACCELERATE
            else "Fabric(precision='16-mixed') with fabric.autocast(), or dtype=torch.bfloat16",
            severity="warning" if launched or not is_certain else None,
        )

    def _switched_by_flag(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a scaler that a flag disables, while the region is always in float16."""
        event = trace[index]
        scalers = scalers_at(script, event)
        flag = scalers[0].enabled if len({s.enabled for s in scalers}) == 1 else "no"
        if flag in {"yes", "no", UNKNOWN} or _DEVICE.search(flag) or any(map(is_amp, event.guards)):
            return None
        scaler = scalers[0]
        opened = region_of_loss(script, trace, index)
        if opened is None or any(map(is_amp, opened.guards)) or not is_always_float16(script, opened, flag):
            return None
        if _FLOAT16.search(flag) and any(a.dtype_node or _is_chosen(script, a) for a in opened.regions[-1].autocasts):
            return None  # `dtype == "float16"`, where the region shows that it is
        if any(guard.text == flag for guard in (*event.guards, *opened.guards)) or is_other_switch(script, scaler):
            return None
        return self.finding(
            script.where(scaler.node),
            f"without `{flag}` the scaler is disabled, but the region at {script.at(opened.node)} still computes in float16: gradients below 6e-8 become zero",
            instead=f"torch.autocast(..., enabled={flag})",
            severity="warning",
        )

    def _left_out(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a scaler whose condition is reversed, or true on CUDA alone."""
        event, scalers = trace[index], scalers_at(script, trace[index])
        is_open = scalers or works_on_cuda_only(script, event, scalers)
        if not is_open or (opened := region_of_loss(script, trace, index)) is None:
            return None
        case = omitted_float16(script, scalers, opened) or omitted_by_record(script, scalers, opened)
        case = case or omitted_on_mps(script, trace, index, scalers, opened)
        case = case or omitted_in_runs(script, event, scalers, opened)
        if case is None:
            return None
        return self.finding(
            script.where(case.node),
            f"{case.when} the loss under float16 autocast ({script.at(opened.node)}) is not scaled: gradients below 6e-8 become zero",
            instead=case.instead,
            severity=case.severity,
        )

    def _without_its_scaler(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a loop in float16 whose functions never name the scaler that others of the file use."""
        event = trace[index]
        opened = None if without_amp(event) else region_of_loss(script, trace, index)
        step = trace[next(later(trace, index, "opt_step"))]
        if opened is None or opened.loops != event.loops or step.loops != event.loops:
            return None
        is_float16 = all(a.dtype == "float16" and a.enabled != "no" for a in opened.regions[-1].autocasts)
        if not is_float16 or not _may_be_float16(script, opened) or not is_out_of_reach(script, opened, event, step):
            return None
        return self._report(script, event, opened)

    def _beside_scaler(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for the branch without the scaler, if its loss comes from the same float16 region."""
        event = trace[index]
        scaled = [e for e in trace if e.kind == "backward" and e.scaled == "yes" and not compatible(e, event)]
        opened = region_of_loss(script, trace, index) if scaled else None
        if opened is None or not all(a.dtype == "float16" for a in opened.regions[-1].autocasts):
            return None
        if not all(compatible(opened, e) for e in scaled):
            return None
        others = [guard for guard in event.guards if guard not in opened.guards]
        opposite = {x for e in scaled for x in e.guards}
        joined = [g for g in others if " and " in g.text and not all(possible((g,), e.guards) for e in scaled)]
        decisive = [g for g in others if g.opposite in opposite or g in joined]
        texts = [g.text for g in decisive]
        if any(text.endswith(".is_enabled()") for text in texts):
            texts += [s.enabled for e in scaled for s in scalers_at(script, e)]
        if not decisive or any(_DEVICE.search(text) or text.startswith("except@") for text in texts):
            return None
        if is_chosen_elsewhere(script, opened) or (joined and is_never_passed_none(script, event)):
            return None
        if not is_entered_without(script, opened, decisive, event, scaled):
            return None
        condition = " and ".join(f"`{g.text}` is {'true' if g.is_true else 'false'}" for g in decisive)
        return self.finding(
            script.where(event.node),
            f"when {condition}, `{event.local.subject or 'the loss'}` is not scaled, but still computed under float16 autocast "
            f"({script.at(opened.node)}): gradients below 6e-8 become zero",
            instead="disable autocast on this path too, or use the scaler on both",
            severity="warning",
        )

    def _report(self, script: Script, event: Event, opened: Event) -> Finding | None:
        """The finding for a loss from a region that is or may be float16."""
        autocasts = opened.regions[-1].autocasts
        loss = f"`{event.local.subject or 'the loss'}`"
        if all(a.dtype == "float16" for a in autocasts):
            if opened.function is not event.function:
                return self.finding(
                    script.where(autocasts[0].node),
                    f"{loss} ({script.at(event.node)}) is computed under float16 autocast and not scaled: gradients below 6e-8 become zero",
                    instead=_SCALE,
                )
            return self.finding(
                script.where(event.node),
                f"{loss} is computed under float16 autocast ({script.at(opened.node)}) and not "
                "scaled: gradients below 6e-8 become zero",
                instead=_SCALE,
            )
        region = _float16_region(opened)
        if _tests_format(region, opened, event):
            return None
        # At the region, where the dtype is chosen.
        return self.finding(
            script.where(region.node),
            f"{_condition(region)} {loss} is not scaled: gradients below 6e-8 become zero",
            instead=_SCALE,
            severity="error"
            if len(autocasts) == 1 and region.dtype_node is None and "cuda" in region.devices
            else "warning",
        )

    def _switched_off(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a scaler with enabled=False whose loss is computed under float16 autocast."""
        event = trace[index]
        scalers = scalers_at(script, event) if switched_off(script, event) else []  # none: it is always None
        before = next(earlier(trace, index, "enter_autocast"), None) if scalers else None
        opened = trace[before] if before is not None and not without_amp(event) else None
        if opened is None or opened.loops != event.loops or opened.inside("no_grad"):
            return None
        regions = opened.regions[-1].autocasts
        if not all("float16" in a.dtypes and is_on(a) for a in regions):
            return None
        is_certain, first = all(a.dtype == "float16" for a in regions), regions[0]
        if not is_certain and (UNKNOWN in first.dtypes or _tests_format(first, opened, event)):
            return None
        cause = "the scaler is disabled, so" if is_certain else f"{_condition(first)} the scaler is disabled:"
        return self.finding(
            script.where(scalers[0].node),
            f"{cause} the loss under float16 autocast ({script.at(opened.node)}) is not scaled: gradients below 6e-8 become zero",
            instead="enabled=True, or autocast with dtype=torch.bfloat16",
            severity=None if is_certain else "warning",
        )

    def _decorated(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a loss of a function that a decorator runs under float16 autocast."""
        event = trace[index]
        for called in (event, *(trace[i] for i in earlier(trace, index, "forward", "enter_function"))):
            region = called.autocast()
            if region is None or called.inside("no_grad") or not _is_decorator(region.node, called):
                continue
            if called is not event and not comes_from_call(called, event, script.outline):
                continue
            if all(a.dtype == "float16" and a.enabled == "yes" for a in region.autocasts):
                return self.finding(
                    script.where(event.node),
                    f"`{event.local.subject or 'the loss'}` is computed under float16 autocast (the decorator at line "
                    f"{region.autocasts[0].node.lineno}) and not scaled: gradients below 6e-8 become zero",
                    instead=_SCALE,
                )
        return None

    def _in_forward(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a loss of a model of this file whose forward opens a float16 region."""
        event, opened = trace[index], regions_in_model(script, trace, index)
        if opened is None:
            return None
        call, regions = opened
        option = next((a.enabled for a in regions if not (is_on(a) or is_on_by_default(script.outline, a))), "")
        if option and not _SETTING.match(option) and not script.outline.bindings.get(option):
            return None
        return self.finding(
            script.where(event.node),
            f"{f'when `{option}`, ' if option else ''}`{event.local.subject or 'the loss'}` is not scaled, but `{call.local.subject}` computes under float16 "
            f"autocast (line {regions[0].node.lineno}): gradients below 6e-8 become zero",
            instead=_SCALE,
        )


def _may_be_float16(script: Script, opened: Event) -> bool:
    """Whether a region may be enabled and in float16; HS142 and HS143 report misplaced arguments, which raise."""
    autocasts = opened.regions[-1].autocasts
    may_be = any("float16" in a.dtypes and a.enabled != "no" for a in autocasts)
    return may_be and not any(is_misplaced(script.outline, a) for a in autocasts)


def _float16_region(opened: Event) -> Autocast:
    """The region of several that is in float16: `{"bf16": autocast(...), "fp16": autocast(...)}[args.precision]`."""
    return next(a for a in opened.regions[-1].autocasts if "float16" in a.dtypes and a.enabled != "no")


def _is_chosen(script: Script, region: Autocast) -> bool:
    """Whether a condition on a number format decides if a region is created."""
    tests = (n.test for n in script.above(region.node) if isinstance(n, ast.If | ast.IfExp))
    return any(_FORMAT.search(text_of(test)) for test in tests)


def _is_left_to_launcher(script: Script, engine: Engine) -> bool:
    """Whether an Accelerator is created without a precision, and nothing in the file reads or sets one."""
    calls = script.outline.calls.get("Accelerator", ())
    hidden = any(k.arg is None for call, _ in calls for k in call.keywords)
    return engine.is_created and not hidden and "mixed_precision" not in script.source.text.lower()


def _is_decorator(node: ast.AST, event: Event) -> bool:
    return any(node is decorator for decorator in getattr(event.function.node, "decorator_list", ()))


def _condition(region: Autocast) -> str:
    """When a region computes in float16."""
    if region.dtype == "float16":
        return "where this region is chosen,"
    if region.dtype_node is not None:
        return f"when `{text_of(region.dtype_node)}` is float16,"
    return "on CUDA, where autocast defaults to float16,"


def _tests_format(region: Autocast, *events: Event) -> bool:
    """Whether a condition around the region or the events may exclude one of its dtypes."""
    flags = [Guard(region.enabled, is_true=True)] if region.dtype != "float16" else []
    flags += [guard for event in events for guard in event.guards]
    return any(_FORMAT.search(text) and not (is_true and allows_float16(text)) for text, is_true in flags)


RULES: tuple[type[Rule], ...] = (Fp16WithoutScaler,)
