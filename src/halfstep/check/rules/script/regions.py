"""HS134: a scaler without a region."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event, Guard, compatible
from halfstep.check.script.flow.order import STEPS, TraceRule, earlier, is_amp, scalers_at, switched_off
from halfstep.check.script.flow.origin import region_of_loss
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.expressions import arguments_of, conditions_of
from halfstep.check.script.objects.formats import SIXTEEN_BIT
from halfstep.check.script.objects.scaling import is_owned
from halfstep.check.script.objects.values import Autocast, Scaler, argument, constant, text_of
from halfstep.check.script.pairing.null_contexts import switch_of
from halfstep.check.script.regions.forwards import (
    calls_losses_only,
    calls_steps_only,
    idle_regions,
    is_configured,
    is_created_plain,
    is_null_context,
    loads_in_dtype,
    mentions_16_bits,
    was_forgotten,
)
from halfstep.check.script.regions.opposite import opposite_region
from halfstep.check.script.regions.switches import is_option, option_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.settled import Setting, named_values

__all__ = ["RULES"]

_FLOAT16 = regex(r"(==|\bin\b|\bis\b).*(float16|fp16|half)", re.IGNORECASE)
_DEVICE = regex(r"device|cuda|gpu|backend", re.IGNORECASE)
_MAY_CAST = regex(r"amp|cast|prec|ctx|context|16|half", re.IGNORECASE)  # a context that may be a region
_LOOP = """\
import torch
model = torch.nn.Linear(8, 2).cuda()
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
{forward}    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


class ScalerWithoutAutocast(TraceRule):
    """The loss is scaled, but nothing computes in 16 bits."""

    code = "HS134"
    name = "scaler-without-autocast"
    severity = "warning"
    reason = (
        "A GradScaler prepares for the small range of float16 gradients; it does not change the dtype of any computation. Without "
        "an autocast region the model runs in float32 at the usual speed and memory, and the scaler adds a pass over the "
        "gradients and skipped steps. Usually the region was forgotten; advice where an option switches it off, or replaces it by `nullcontext()`."
    )
    bad = (
        _LOOP.format(forward="    loss = loss_fn(model(x), y)\n"),
        _LOOP.format(
            forward='    loss = loss_fn(model(x), y)\n    with torch.autocast("cuda", dtype=torch.float16):\n'
        ).replace("    scaler.", "        scaler."),
    )
    good = (
        _LOOP.format(
            forward='    with torch.autocast("cuda", dtype=torch.float16):\n        loss = loss_fn(model(x), y)\n'
        ),
    )
    references = ("https://docs.pytorch.org/docs/stable/notes/amp_examples.html#typical-mixed-precision-training",)
    kinds = ("backward",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A scaled backward in a file without any region, of a model that opens none itself."""
        event = trace[index]
        if event.scaled != "yes" or not event.scaler or switched_off(script, event):
            return None
        if mentions_16_bits(script):
            return (
                self._disabled(script, trace, index)
                or self._around_loss(script, trace, index)
                or self._around_backward(script, trace, index)
                or self._never_entered(script, trace, index)
                or self._for_evaluation(script, trace, index)
                or self._by_other_test(script, trace, index)
                or self._always_enabled(script, trace, index)
                or self._in_both_branches(script, trace, index)
                or self._in_other_branch(script, trace, index)
                or self._in_null_context(script, trace, index)
            )
        scalers = script.scalers_named(event.scaler)
        forwards = [e for e in trace[:index] if e.kind == "forward" and e.loops[:1] == event.loops[:1]]
        if not scalers or any(s.enabled == "no" for s in scalers) or not forwards:
            return None
        if any(_MAY_CAST.search(text_of(r.node)) for e in forwards for r in e.regions):
            return self._in_null_context(script, trace, index)  # any other, `with settings.ctx:`, may be a region
        is_plain = all(is_created_plain(script, e.subject, e.function) for e in forwards)
        # A flag that switches the scaler, and that the model does not receive, switches no region of the model.
        is_switched = all(s.enabled != "yes" for s in scalers)
        is_told = not is_switched or any(is_configured(script, e.subject, e.function) for e in forwards)
        # A model of another file may open a region in its forward, where the threads of DataParallel need it.
        if not is_plain and (script.has("wrap_dp") or (not was_forgotten(script) and is_told)):
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.local.scaler}` scales the loss, but no autocast region is opened in this file: everything runs in float32"
            + ("" if is_plain else f", unless `{forwards[0].local.subject}` opens one itself"),
            instead="compute the model and the loss inside torch.autocast, or remove the scaler",
        )

    def _disabled(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a forward and a loss that are computed only where autocast is disabled."""
        event = trace[index]
        opened = region_of_loss(script, trace, index)
        autocasts = opened.regions[-1].autocasts if opened is not None else ()
        if opened is None or not all(map(_computes_float32, autocasts)):
            return None
        is_off = all(a.enabled == "no" for a in autocasts)
        if not is_off and (_casts(trace) or any(_is_for_float16(script, s) for s in scalers_at(script, event))):
            return None
        before = [e for e in trace if e.loops[:1] == event.loops[:1] and compatible(e, event)]
        forwards = [e for e in before if e.kind == "forward" and not e.inside("no_grad")]
        outside = [e for e in forwards if not any(r.node is opened.regions[-1].node for r in e.regions)]
        entered = [e for e in before if e.kind == "enter_autocast" and e.autocast() and not e.inside("no_grad")]
        enabled = [e for e in entered if not all(map(_computes_float32, e.regions[-1].autocasts))]
        if outside or enabled or (forwards and not all(e.loops == event.loops for e in forwards)):
            return None
        if not forwards and not _calls_model(script, opened):
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.local.scaler}` scales the loss, but autocast is {'disabled' if is_off else 'set to float32'} where it is computed "
            f"({script.at(opened.node)}): everything runs in float32",
            instead="enable the region, or remove the scaler" if is_off else "dtype=torch.float16, or remove both",
        )

    def _around_loss(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a region that contains the loss function alone, with the model called above it."""
        event = trace[index]
        opened = region_of_loss(script, trace, index)
        region = opened.autocast() if opened is not None else None
        if opened is None or region is None or opened.function is not event.function or opened.loops != event.loops:
            return None
        if not isinstance(opened.node, ast.With) or not calls_losses_only(script, opened.node):
            return None
        last = next(earlier(trace, index, *STEPS), -1)
        near = [e for e in trace[last + 1 : index] if e.kind == "forward" and e.loops == event.loops]
        forwards = [e for e in near if compatible(e, event) and not e.inside("no_grad")]
        if not forwards or any(e.inside("autocast") or e.inside("owned") for e in forwards) or _casts(trace[:index]):
            return None
        read = {n.id for n in ast.walk(opened.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        outside = next((e for e in forwards if e.function is event.function and _results(script, e) & read), None)
        if outside is None or script.where(outside.node).line > script.where(opened.node).line:
            return None
        return self.finding(
            script.where(opened.node),
            f"only the loss is computed under autocast: `{outside.local.subject}` runs before it (line "
            f"{script.where(outside.node).line}), in float32 unless it opens a region itself, and `{event.local.scaler}` scales its gradients",
            instead="call the model inside the region as well, or remove the region and the scaler",
        )

    def _around_backward(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a region that contains the backward and the step alone, with the model called above it."""
        event = trace[index]
        region = event.autocast()
        block = next((n for n in script.above(region.node) if isinstance(n, ast.With)), None) if region else None
        if block is None or not calls_steps_only(block):
            return None
        last = next(earlier(trace, index, *STEPS), -1)
        near = [e for e in trace[last + 1 : index] if e.kind == "forward" and e.function is event.function]
        forwards = [e for e in near if compatible(e, event) and not e.inside("no_grad")]
        if not forwards or any(e.inside("autocast") or e.inside("owned") for e in forwards) or _casts(trace[:index]):
            return None
        if any(_MAY_CAST.search(text_of(r.node)) for e in forwards for r in e.regions):
            return None
        return self.finding(
            script.where(block),
            f"this region contains the backward and the step, which it does not change: `{forwards[-1].local.subject}` runs before it (line "
            f"{script.where(forwards[-1].node).line}), in float32 unless it opens a region itself, and `{event.local.scaler}` scales its gradients",
            instead="call the model and compute the loss inside the region, and the backward after it",
        )

    def _never_entered(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for regions that all are under a constant which is off, in a run that still scales the loss."""
        event = trace[index]
        entered = [e for e in trace if e.kind == "enter_autocast" and not e.inside("no_grad")]
        flags = [next((g for g in e.guards if g not in event.guards and _is_off(script, g)), None) for e in entered]
        scalers = script.scalers_named(event.scaler)
        if not flags or flags[0] is None or not all(flags) or not scalers or _casts(trace[:index]):
            return None
        forwards = [e for e in trace[:index] if e.kind == "forward" and e.loops == event.loops]
        if not any(compatible(e, event) and flags[0] not in e.guards and not e.regions for e in forwards):
            return None
        condition = flags[0].text if flags[0].is_true else f"not {flags[0].text}"
        return self.finding(
            script.where(scalers[0].node),
            f"`{scalers[0].key}` scales the loss, but no region is ever entered: `{condition}` is never true "
            f"({script.at(entered[0].node)}), and everything runs in float32",
            instead=f"GradScaler(..., enabled={condition})",
        )

    def _for_evaluation(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for regions of which none is around a computation with gradients: the evaluation's, or one never entered."""
        event = trace[index]
        scalers = script.scalers_named(event.scaler)
        near = [e for e in trace[:index] if e.kind == "forward" and e.loops == event.loops]
        forwards = [e for e in near if compatible(e, event) and not e.inside("no_grad")]
        if not scalers or not forwards or _casts(trace[:index]) or is_owned(script, trace, event):
            return None
        contexts = [text_of(r.node) for e in forwards for r in e.regions]
        regions = idle_regions(script) if not any(map(_MAY_CAST.search, contexts)) else ()
        if not any("float16" in a.dtypes and a.enabled != "no" for a in regions):
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.local.scaler}` scales the loss, but `{forwards[0].local.subject}` ({script.at(forwards[0].node)}) runs outside "
            f"autocast, which line {regions[0].where.line} has for something else: the training runs in float32",
            instead="compute the model and the loss inside torch.autocast, or remove the scaler",
        )

    def _by_other_test(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a setting with a value that enables the scaler and disables the region of its loss."""
        event, scalers = trace[index], scalers_at(script, trace[index])
        opened = region_of_loss(script, trace, index) if len(scalers) == 1 else None
        if opened is None or any(map(is_amp, (*event.guards, *opened.guards))) or _casts(trace):
            return None
        autocasts = opened.regions[-1].autocasts
        own, others = argument(scalers[0].node, None, "enabled"), [switch_of(script, a) for a in autocasts]
        is_fixed = own is None or isinstance(own, ast.Constant)
        if (
            (is_fixed and scalers[0].enabled != "yes")
            or None in others
            or any(_is_passed_on(script, a) for a in autocasts)
        ):
            return None
        asked = [(own, scalers[0].function)] if own is not None and not is_fixed else []
        switches = [s for s in others if s is not None]
        for name, values in named_values(script.outline, [*asked, *switches]).items():
            if is_fixed and _DEVICE.search(name):
                continue  # a scaler for CUDA does nothing without it
            for value in sorted(values):
                setting = Setting(script.outline, name, value)
                if all(setting.of(*a) is True for a in asked) and all(setting.of(*s) is False for s in switches):
                    return self.finding(
                        script.where(scalers[0].node),
                        f"when `{name}` is {value!r}, the scaler is enabled and autocast ({script.at(opened.node)}) is not: everything runs in float32",
                        instead="enable both by the same test",
                        severity="advice" if is_fixed else None,
                    )
        return None

    def _always_enabled(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a scaler that is enabled in every run, with a region that an option switches."""
        event, scalers = trace[index], scalers_at(script, trace[index])
        opened = region_of_loss(script, trace, index) if len(scalers) == 1 and scalers[0].enabled == "yes" else None
        if opened is None or _casts(trace):
            return None
        tested = (event.node, scalers[0].node)  # a literal of the call may have decided a guard of the trace
        guards = (*event.guards, *opened.guards, *(g for node in tested for g in conditions_of(script.outline, node)))
        switches = [switch_of(script, a) for a in opened.regions[-1].autocasts]
        options = {option_of(script, *switch) for switch in switches if switch is not None}
        option = options.pop() if len(options) == 1 and None not in switches else ""
        if not option or not is_amp((option, True)) or any(map(is_amp, guards)):
            return None
        return self.finding(
            script.where(scalers[0].node),
            f"when `{option}` is false, autocast is disabled ({script.at(opened.node)}) and this scaler is not: it scales a loss that is computed in float32",
            instead=f"GradScaler(..., enabled={option})",
            severity="advice",  # the gradients are right, after a pass over them that float32 does not need
        )

    def _in_both_branches(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a model that an option runs under autocast or without it, with a loss that is scaled in both cases."""
        event, scalers = trace[index], scalers_at(script, trace[index])
        if len(scalers) != 1 or scalers[0].enabled != "yes" or _casts(trace):
            return None
        tested = (g for node in (event.node, scalers[0].node) for g in conditions_of(script.outline, node))
        near = [e for e in trace[:index] if e.kind == "forward" and e.loops == event.loops and not e.inside("no_grad")]
        inside = [e for e in near if e.autocast() and compatible(e, event)]
        outside = [e for e in near if not e.autocast() and compatible(e, event)]
        if not inside or not outside or any(map(is_amp, (*event.guards, *tested))):
            return None
        shared = set.intersection(*({Guard(g.text, not g.is_true) for g in e.guards} for e in inside))
        off = shared.intersection(*(e.guards for e in outside))
        flag = next((g for g in off if is_amp(g) and is_option(script, g, event.function)), None)
        if flag is None or any(r.kind != "no_grad" for e in outside for r in e.regions):
            return None
        return self.finding(
            script.where(event.node),
            f"when `{flag.text}` is {str(flag.is_true).lower()}, `{outside[0].local.subject}` runs without autocast ({script.at(outside[0].node)}) and "
            f"`{event.local.scaler}` is still enabled: it scales a loss that is computed in float32",
            instead=f"GradScaler(..., enabled={'not ' * flag.is_true}{flag.text})",
            severity="advice",
        )

    def _in_other_branch(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for an option that scales the loss where it takes the branch without a region."""
        event = trace[index]
        opposite = opposite_region(script, trace, index) if len(scalers_at(script, event)) == 1 else None
        if opposite is None or loads_in_dtype(script) or is_owned(script, trace, event):
            return None
        flag, opened = opposite
        return self.finding(
            script.where(event.node),
            f"when `{flag.text}` is {str(flag.is_true).lower()}, `{event.local.scaler}` scales the loss, but autocast is entered only when it is "
            f"{str(not flag.is_true).lower()} ({script.at(opened.node)}): it scales a loss that is computed in float32",
            instead="scale where float16 is computed only; float32 and bfloat16 need no scaler",
            severity="advice",
        )

    def _in_null_context(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for a model that runs in a context which is `nullcontext()` in every run: the region was taken out."""
        event = trace[index]
        near = [e for e in trace[:index] if e.kind == "forward" and e.loops == event.loops and compatible(e, event)]
        forwards = [e for e in near if not e.inside("no_grad")]
        is_null = all(
            e.regions and all(is_null_context(script, r.node, e.function) for r in e.regions) for e in forwards
        )
        if not forwards or not is_null or script.autocasts or any(e.kind == "cast" for e in trace):
            return None
        if loads_in_dtype(script) or is_owned(script, trace, event):
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.local.scaler}` scales the loss, but `{text_of(forwards[0].regions[-1].node)}` is nullcontext() in every run: "
            f"`{forwards[0].local.subject}` ({script.at(forwards[0].node)}) runs in float32, unless it opens a region itself",
            instead="make it torch.autocast(..., dtype=torch.float16), or remove the scaler",
        )


def _is_passed_on(script: Script, region: Autocast) -> bool:
    """Whether something else than a region receives its dtype, such as the model or its inputs."""
    dtype = key_of(region.dtype_node).rsplit(".", 1)[-1] if region.dtype_node is not None else ""
    calls = [c for name, sites in script.outline.calls.items() if name != "autocast" for c, _ in sites]
    return bool(dtype) and any(key_of(v).rsplit(".", 1)[-1] == dtype for c in calls for v in arguments_of(c))


def _casts(events: Sequence[Event]) -> bool:
    """Whether anything is cast to 16 bits by hand."""
    return any(e.kind == "cast" and e.scaled in SIXTEEN_BIT for e in events)


def _results(script: Script, forward: Event) -> set[str]:
    """The variables that the statement of a forward assigns."""
    statement = script.statement(forward.node)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def _is_off(script: Script, guard: Guard) -> bool:
    """Whether a condition is a constant of the file, assigned once, that makes it false."""
    bindings = script.outline.bindings.get(guard.text, ())
    value = constant(bindings[0].value) if len(bindings) == 1 and bindings[0].function is script.outline.module else ...
    is_parameter = any(guard.text in function.params for function in script.outline.functions)
    return isinstance(value, bool) and value is not guard.is_true and not is_parameter


def _is_for_float16(script: Script, scaler: Scaler) -> bool:
    """Whether a scaler is enabled only for float16, `enabled=dtype == "float16"`: a region of another dtype has it disabled."""
    values = script.outline.values(scaler.enabled, scaler.function) if scaler.enabled.isidentifier() else []
    return any(_FLOAT16.search(text) for text in (scaler.enabled, *map(text_of, values)))


def _computes_float32(autocast: Autocast) -> bool:
    """Whether a region computes in float32: it is disabled, or its dtype is float32."""
    return autocast.enabled == "no" or autocast.dtype in {"float32", "float64"}


def _calls_model(script: Script, opened: Event) -> bool:
    """Whether a block calls a variable whose parameters the file reads."""
    models = {
        key_of(c.func.value) for c, _ in script.outline.calls.get("parameters", ()) if isinstance(c.func, ast.Attribute)
    }
    return any(isinstance(n, ast.Call) and key_of(n.func) in models for n in ast.walk(opened.node))


RULES: tuple[type[Rule], ...] = (ScalerWithoutAutocast,)
