"""Whether the condition of a scaler leaves out float16: reversed, or true on CUDA alone while other devices compute in float16."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.check.finding import Severity
from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event, Guard
from halfstep.check.script.flow.order import scalers_at
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.modules import is_on
from halfstep.check.script.objects.values import UNKNOWN, Autocast, Scaler, argument, constant, text_of
from halfstep.check.script.pairing.device_tests import asks_for_cuda, parts_of, tests_of
from halfstep.check.script.pairing.flag_pairs import unscaled_option
from halfstep.check.script.pairing.joint_flags import exclude_each_other
from halfstep.check.script.pairing.on_cpu import float16_on_cpu
from halfstep.check.script.pairing.other_values import (
    disabled_by_value,
    float16_by_default,
    float16_otherwise,
    float16_without_cuda,
)
from halfstep.check.script.pairing.runs import runs_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function

__all__ = [
    "Omission",
    "is_always_float16",
    "is_chosen_elsewhere",
    "is_entered_without",
    "is_other_switch",
    "omitted_float16",
    "omitted_in_runs",
    "spares_half_weights",
]

_FLOAT16 = regex(r"(use_|is_|enable_)?(fp16|float16|half)", re.IGNORECASE)
_BFLOAT16 = regex(r"(use_|is_|enable_)?(bf16|bfloat16)", re.IGNORECASE)
_DEVICE = regex(r"cuda|gpu|cpu|mps|xpu|npu|device|available", re.IGNORECASE)
_FORMAT = regex(r"16|dtype|bf|half|float", re.IGNORECASE)
_DECIDES = regex(r"16|32|dtype|bf|half|float|precision|amp|autocast|scal|cuda|gpu|device", re.IGNORECASE)
_WEIGHTS = regex(r"(model|net|module)\w*(\.|, ['\"])(torch_)?dtype\b|parameters\(\).*\.dtype$")
_WRITTEN = {"torch.float16", "torch.half"}
_MAX_DEPTH = 3  # variables between a scaler and a test of a dtype


@dataclass(frozen=True)
class Omission:
    """A case of float16 in which a scaler is disabled."""

    node: ast.AST  # what is to be changed: the scaler, or the region
    when: str
    instead: str
    severity: Severity = "warning"


def omitted_float16(script: Script, scalers: Sequence[Scaler], opened: Event) -> Omission | None:
    """The case in which a region computes in float16 and its scaler is disabled; None if the text shows none."""
    omission = _omitted_by(script, scalers[0], opened) if len(scalers) == 1 else None
    if omission is None and (on_cpu := float16_on_cpu(script, scalers, opened)) is not None:
        scaler, test = on_cpu
        when = f"on the CPU the scaler is disabled (`{text_of(test)}`) and the region computes in float16, so"
        return Omission(scaler.node, when, "enabled=device.type == 'cuda' in torch.autocast, or bfloat16 on the CPU")
    return omission


def omitted_in_runs(script: Script, event: Event, scalers: Sequence[Scaler], opened: Event) -> Omission | None:
    """The case in which the settings of some run disable a scaler and make its region float16; its loss has no other branch."""
    is_plain = len(scalers) == 1 and not any(_DECIDES.search(text) for text, _ in (*event.guards, *opened.guards))
    runs = runs_of(script, opened.regions[-1].autocasts, scalers[0], opened) if is_plain else None
    run = runs.where("float16", is_scaled=False) if runs is not None else None
    if run is None:
        return None
    alike = (s for s in script.scalers if (s.function, s.enabled) == (scalers[0].function, scalers[0].enabled))
    if any(scaler.node.lineno < scalers[0].node.lineno for scaler in alike):
        return None  # reported for the first of those of several optimizers
    return Omission(scalers[0].node, f"{run.case} the scaler is disabled, and", "enable both by the same settings")


def spares_half_weights(script: Script, step: Event, scalers: Sequence[Scaler]) -> bool:
    """Whether a scaler steps only weights that are not float16: `enabled=next(model.parameters()).dtype != torch.float16`."""
    tests = [(guard.text, guard.is_true) for guard in step.guards]
    tests += [(scalers[0].enabled, True)] if len({scaler.enabled for scaler in scalers}) == 1 else []
    for text, is_true in tests:
        with contextlib.suppress(SyntaxError):  # `except@12`
            if _excludes_half(script, ast.parse(text, mode="eval").body, is_true, step.function):
                return True
    return False


def _excludes_half(script: Script, test: ast.expr, is_true: bool, function: Function, depth: int = 0) -> bool:
    """Whether a test with this value means that the dtype of a tensor is not float16."""
    if depth > _MAX_DEPTH:
        return False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _excludes_half(script, test.operand, not is_true, function, depth)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if is_true else ast.Or):
        return any(_excludes_half(script, part, is_true, function, depth) for part in test.values)
    if isinstance(test, ast.Name):
        values = script.outline.values(test.id, function)
        return len(values) == 1 and _excludes_half(script, values[0], is_true, function, depth + 1)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False
    left, right = test.left, test.comparators[0]
    values = script.outline.values(left.id, function) if isinstance(left, ast.Name) else [left]
    if len(values) != 1 or not (isinstance(values[0], ast.Attribute) and values[0].attr == "dtype"):
        return False
    named = right.elts if isinstance(right, (ast.Set, ast.Tuple, ast.List)) else [right]
    has_half = any(text_of(name) in _WRITTEN for name in named)
    is_equal = isinstance(test.ops[0], (ast.Eq, ast.Is, ast.In)) == is_true
    return all(text_of(name).startswith("torch.") for name in named) and has_half != is_equal


def is_entered_without(
    script: Script, opened: Event, guards: Sequence[Guard], event: Event, scaled: Sequence[Event]
) -> bool:
    """Whether a region is enabled also where the loss of another branch is not scaled, because of some guards."""
    regions = opened.regions[-1].autocasts
    # A stack may enter the region under a condition of its own.
    entered = [g for region in regions for g in conditions_of(script.outline, region.node)]
    known = [*opened.guards, *entered]
    if any(guard.opposite in guards for guard in entered):
        return False
    if any(exclude_each_other(script.outline, around, guard) for around in known for guard in guards):
        return False
    return all(_is_on_without(script, region, guard, event, scaled) for region in regions for guard in guards)


def _is_on_without(script: Script, region: Autocast, guard: Guard, event: Event, scaled: Sequence[Event]) -> bool:
    if region.enabled != "yes":
        return _is_wider(script, region.enabled, guard.text, event)
    # `AMP = True` enables the region, and also decides the guard, or the scaler that it tests.
    enabled = argument(region.node, 2 if region.api == "torch.amp.autocast" else 0, "enabled")
    flag = (ast.get_source_segment(script.source.text, enabled) or "") if enabled is not None else ""
    made = [text_of(node) for e in scaled for s in scalers_at(script, e) for node in (s.node, s.parent)]
    # `self.amp` may stand as the parameter `amp` of the constructor in a condition.
    names = {flag, flag.removeprefix("self.")} if flag else set()
    tests = [re.compile(rf"(?<![\w.]){re.escape(name)}(?![\w.])") for name in names]
    return not any(test.search(text) for test in tests for text in (guard.text, *made))


def _is_wider(script: Script, region: str, scaler: str, event: Event) -> bool:
    """Whether a region is enabled by one part of the condition `a and b` for the scaler, and not by the other."""
    # A part that is true wherever the event happens decides nothing: `scaler = GradScaler() if amp and D else None` below `if D:`.
    open_parts = [part for part in scaler.split(" and ") if Guard(part, is_true=True) not in event.guards]
    parts = [last_name(part) for part in open_parts]
    inside = [part for part in parts if re.search(rf"\b{re.escape(part)}\b", region)]
    other = [part for part in parts if part not in inside]
    # A number format may decide both, but not that of the weights: autocast lowers bfloat16 weights to float16 as well.
    is_decided = any(_FORMAT.search(part) and not _tests_weights(script, part, event) for part in other)
    is_decided = is_decided or any(_FORMAT.search(part) for part in inside) or any(map(_DEVICE.search, parts))
    return 0 < len(inside) < len(parts) and not is_decided


def _tests_weights(script: Script, flag: str, event: Event) -> bool:
    """Whether a flag compares the dtype of a model or of its parameters: `is_bf16 = model.dtype == torch.bfloat16`."""
    tests = script.outline.values(flag.removeprefix("not "), event.function)
    left = tests[0].left if len(tests) == 1 and isinstance(tests[0], ast.Compare) else None
    values = script.outline.values(left.id, event.function) if isinstance(left, ast.Name) else [left]
    return len(values) == 1 and values[0] is not None and bool(_WEIGHTS.search(text_of(values[0])))


def is_always_float16(script: Script, opened: Event, flag: str) -> bool:
    """Whether a region is float16 with and without a flag: a function that returns it may test the flag for a null context."""
    regions = opened.regions[-1].autocasts
    choices = [n for maker in _makers(script, opened) for n in ast.walk(maker) if isinstance(n, (ast.If, ast.IfExp))]
    name = re.compile(rf"\b{re.escape(flag.strip('(').partition(' ')[0].rpartition('.')[2])}\b")
    if any("nullcontext" in ast.unparse(n) and name.search(text_of(n.test)) for n in choices):
        return False
    # A trace of a call with a constant, `run(use_amp=True)`, has no guard for what that decides.
    created = (guard for a in regions for guard in conditions_of(script.outline, a.node))
    if any(name.search(guard.text) for guard in created):
        return False
    return all(_is_float16_on_cuda(a) and is_on(a) for a in regions)


def is_chosen_elsewhere(script: Script, opened: Event) -> bool:
    """Whether a flag decides where a region is created: `self.cast = autocast` in one branch, or a function that tests it."""
    node = opened.regions[-1].node
    key = key_of(node.func if isinstance(node, ast.Call) else node)
    if key and len(script.outline.values(key, opened.function)) > 1:
        return True
    makers = [maker for maker in _makers(script, opened) if opened.function.node not in ast.walk(maker)]
    tests = [n.test for maker in makers for n in ast.walk(maker) if isinstance(n, (ast.If, ast.IfExp))]
    parts = [part for test in tests for part in (test.values if isinstance(test, ast.BoolOp) else [test])]
    return not all(_DEVICE.search(text_of(part)) for part in parts)


def _makers(script: Script, opened: Event) -> list[ast.FunctionDef]:
    """The functions around the line that creates the context of a region, other than the one that enters it."""
    above = (n for a in opened.regions[-1].autocasts for n in script.above(a.node))
    return [n for n in above if isinstance(n, ast.FunctionDef) and n is not opened.function.node]


def is_other_switch(script: Script, scaler: Scaler) -> bool:
    """Whether something else than the flag of a scaler decides: a condition around it, or the device, without which autocast is off as well."""
    return any(e.guards for e in script.events("make_scaler") if e.node is scaler.node) or _asks_for_device(
        script, scaler
    )


def _asks_for_device(script: Script, scaler: Scaler) -> bool:
    """Whether the flag of a scaler only asks for the device: `use_amp = device == "cuda"`."""
    values = script.outline.values(scaler.enabled, scaler.function)
    parts = [p for v in values for p in (v.values if isinstance(v, ast.BoolOp) and isinstance(v.op, ast.And) else [v])]
    return bool(parts) and all(_DEVICE.search(text_of(part)) for part in parts)


def _is_float16_on_cuda(region: Autocast) -> bool:
    """Whether a region computes in float16 on CUDA: by its dtype, or without one, on a device that may be CUDA."""
    may_be_cuda = "cuda" in region.devices and region.dtype_node is None
    return region.dtype == "float16" or (may_be_cuda and "float16" in region.dtypes)


def _omitted_by(script: Script, scaler: Scaler, opened: Event) -> Omission | None:
    """The case that the condition of a scaler excludes."""
    tests = list(tests_of(script, scaler))
    regions = opened.regions[-1].autocasts
    if not tests or not regions or not all("float16" in a.dtypes for a in regions):
        return None
    for test, is_true in tests:
        fmt = _format_of(test, is_true=is_true)
        if fmt in {"bfloat16", "not float16"} and not _shares(test, regions, opened):
            formats = "bfloat16" if fmt == "bfloat16" else "every format but float16"
            when = f"the scaler is enabled for {formats} (`{text_of(test)}`), so"
            return Omission(scaler.node, when, "reverse the condition")
    is_for_float16 = any(_format_of(test, is_true=is_true) == "float16" for test, is_true in tests)
    devices = [test for test, is_true in tests if is_true and asks_for_cuda(test)]
    if is_for_float16 and devices and all(_is_on_other_devices(script, a) for a in regions):
        runs = runs_of(script, regions, scaler, opened)
        is_impossible = runs is not None and runs.never("float16", is_scaled=False)
        if is_impossible or any(_DEVICE.search(text) for text, _ in opened.guards):
            return None
        return Omission(
            scaler.node,
            f"on devices other than CUDA, such as MPS, the scaler is disabled (`{text_of(devices[0])}`), and with float16",
            "torch.amp.GradScaler(device.type, enabled=...) for every device, or bfloat16 on the others",
        )
    if (default := _by_default(script, scaler, opened)) is not None:
        return default
    if (rest := float16_otherwise(script, scaler, opened)) is not None:
        when = f"with any other `{rest[0]}`, such as 'float32', the dtype is float16 and the scaler ({script.at(scaler.node)}) is disabled, so"
        return Omission(rest[1], when, "reject other values, and enable the scaler for dtype == torch.float16")
    if (off := disabled_by_value(script, scaler, opened)) is not None:
        key, value, is_only = off
        when = f"with `{key}` '{value}'{', as this file sets it,' if is_only else ''} the scaler is disabled, and"
        return Omission(
            scaler.node, when, f"take the dtype of autocast from `{key}`", "error" if is_only else "warning"
        )
    if (pair := unscaled_option(script, scaler, opened)) is not None:
        return Omission(scaler.node, f"{pair[0]} the scaler is disabled, and", "decide both by one option")
    if (choice := float16_without_cuda(script, scaler, opened)) is not None:
        when = f"without CUDA the dtype is float16 (`{text_of(choice)}` is false) and the scaler is disabled, so on the CPU"
        return Omission(opened.node, when, "enabled=device.type == 'cuda' in torch.autocast, or bfloat16 on the CPU")
    return None


def _by_default(script: Script, scaler: Scaler, opened: Event) -> Omission | None:
    """The case that a region has None as its dtype where the scaler is off."""
    dtype = float16_by_default(script, scaler, opened)
    if dtype is None:
        return None
    return Omission(
        opened.node,
        f"when `{text_of(dtype)}` is None, autocast on CUDA computes in float16 and the scaler ({script.at(scaler.node)}) is off, so",
        f"enabled={text_of(dtype)} is not None in torch.autocast",
    )


def _format_of(test: ast.expr, *, is_true: bool) -> str:
    """The format that a test asks for: "float16", "bfloat16", "not float16", or "" for anything else."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        right = test.comparators[0]
        value = constant(right)
        name = value if isinstance(value, str) else text_of(right).rpartition(".")[2]
        if isinstance(test.ops[0], (ast.NotEq, ast.IsNot)):
            is_true = not is_true
        elif not isinstance(test.ops[0], (ast.Eq, ast.Is)):
            return ""
    else:
        name = key_of(test).rpartition(".")[2]
    if _BFLOAT16.fullmatch(name):
        return "bfloat16" if is_true else ""
    if _FLOAT16.fullmatch(name):
        return "float16" if is_true else "not float16"
    return ""


def _shares(test: ast.expr, regions: tuple[Autocast, ...], opened: Event) -> bool:
    """Whether the region depends on the same test, so that both are off without it, or on another test of formats."""
    texts = [*(a.enabled for a in regions), *(guard.text for guard in opened.guards)]
    return any(text_of(test) in text or re.search(r"16|dtype", text) for text in texts)


def _is_on_other_devices(script: Script, region: Autocast) -> bool:
    """Whether a region is for whatever device there is, and computes in float16 on each."""
    device = argument(region.node, 0, "device_type")
    if region.dtype_node is None or device is None or region.enabled == "no" or _DEVICE.search(region.enabled):
        return False
    if not ("mps" in region.devices or UNKNOWN in region.devices):
        return False
    enabled = argument(region.node, 2, "enabled")
    if enabled is not None and any(
        on and asks_for_cuda(test) for test, on in parts_of(script, enabled, region.function)
    ):
        return False  # `amp = args.amp and torch.cuda.is_available()`: without CUDA the region is off as well
    return not _is_chosen_by_device(script, region.dtype_node)


def _is_chosen_by_device(script: Script, dtype: ast.expr) -> bool:
    """Whether float16 is written only where the device is CUDA."""
    for node in ast.walk(script.tree):
        if not isinstance(node, (ast.Attribute, ast.Constant)) or text_of(node).strip("'\"") not in _WRITTEN:
            continue
        tests = [text_of(n.test) for n in script.above(node) if isinstance(n, (ast.If, ast.IfExp))]
        if any(re.search(r"cuda|is_available|mps", test) for test in tests):
            return True
    return key_of(dtype) == ""
