"""Float16 by the last `else`: for a setting that names neither format, or on a machine without CUDA, where the scaler is off."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event, Guard
from halfstep.check.script.objects.choices import UNKNOWN, pairs_of, strings_of
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.values import DTYPES, Autocast, Scaler, argument, constant, text_of
from halfstep.check.script.pairing.device_tests import (
    asks_for_cuda,
    is_always_on_cuda,
    parts_of,
    tests_of,
    tests_of_guards,
)
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.constants import Constants
from halfstep.check.script.syntax.evaluate import OPEN, value_of
from halfstep.check.script.syntax.excluded import is_excluded
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["disabled_by_value", "enabled_by_value", "float16_by_default", "float16_otherwise", "float16_without_cuda"]

_HALF, _BFLOAT = {"float16", "fp16", "half"}, {"bfloat16", "bf16"}
_FULL = ("float32", "fp32")
_DEVICE = regex(r"cuda|gpu|cpu|mps|xpu|npu|device|available", re.IGNORECASE)
_FORMAT = regex(r"16|dtype|bf|half|float|precision", re.IGNORECASE)


def float16_otherwise(script: Script, scaler: Scaler, opened: Event) -> tuple[str, ast.IfExp] | None:
    """The setting of which every value but one gives float16, while the scaler is enabled for one of them, and that choice.

    `torch.bfloat16 if args.dtype == "bfloat16" else torch.float16` and `enabled=args.dtype == "float16"`: "float32" is neither.
    """
    named = {_compared(test) for test, is_true in tests_of(script, scaler) if is_true}
    settings = {key for key, value in named if key and value in _HALF}
    for region in opened.regions[-1].autocasts if settings else ():
        for choice in _choices(script, region):
            key, value = _compared(choice.test)
            is_rest = _dtype(script, choice.body) == "bfloat16" and _dtype(script, choice.orelse) == "float16"
            if key not in settings or value not in _BFLOAT or not is_rest:
                continue
            setting = choice.test.left if isinstance(choice.test, ast.Compare) else choice.test
            strings = strings_of(script.outline, setting, region.function)
            is_open = UNKNOWN in strings and not is_excluded(script.outline, setting, _FULL, (choice, region.node))
            if is_open and not _asks_for(script, region, opened, key):
                return key, choice
    return None


def disabled_by_value(script: Script, scaler: Scaler, opened: Event) -> tuple[str, str, bool] | None:
    """The setting, and the value that the file gives it, with which a scaler is disabled while the region is float16 in any case.

    `dtype = "bfloat16"`, `enabled=dtype == "float16"` and a region with torch.float16. Also whether the file has no other value.
    """
    regions = opened.regions[-1].autocasts
    if not all(a.dtype == "float16" and a.enabled != "no" for a in regions):
        return None
    guards = (*opened.guards, *(guard for a in regions for guard in conditions_of(script.outline, a.node)))
    if any(_FORMAT.search(text) for text in (*(guard.text for guard in guards), *(a.enabled for a in regions))):
        return None
    for test, is_true in tests_of(script, scaler):
        if not isinstance(test, ast.Compare) or not (key := text_of(test.left)):
            continue
        known = strings_of(script.outline, test.left, scaler.function) & {*_HALF, *_BFLOAT, *_FULL}
        outcomes = {value: _outcome(test, key, value) for value in known}
        off = sorted(s for s, outcome in outcomes.items() if outcome is (not is_true))
        asked = any(_asks_for(script, a, opened, key) for a in regions)
        if off and not asked and not is_excluded(script.outline, test.left, off, [a.node for a in regions]):
            return key, off[0], set(off) == known
    return None


def _outcome(test: ast.expr, key: str, value: str) -> object:
    """What a test gives where a variable has a value."""
    return value_of(test, lambda leaf: value if text_of(leaf) == key else OPEN)


def enabled_by_value(script: Script, scaler: Scaler) -> tuple[str, str] | None:
    """The setting, and its value, that enables a scaler for float16, while the regions of the file are bfloat16 in any case."""
    regions = [a for a in script.autocasts if a.enabled != "no"]
    if not regions or not all(a.dtype_node is not None and a.dtype == "bfloat16" for a in regions):
        return None
    texts = [text for a in regions for text, _ in conditions_of(script.outline, a.node)] + [a.enabled for a in regions]
    nodes = [a.node for a in regions]
    for test, is_true in tests_of(script, scaler):
        key, value = _compared(test)
        if not is_true or value not in _HALF or not isinstance(test, ast.Compare) or any(map(_FORMAT.search, texts)):
            continue
        known = strings_of(script.outline, test.left, scaler.function)
        is_setting = isinstance(test.left, (ast.Attribute, ast.Subscript)) and UNKNOWN in known
        literal = Constants(script.outline).literal(test.left, scaler.function)
        if isinstance(literal, ast.Constant) and literal.value != value:
            continue  # it has one value, by which the dtype of the region may be looked up
        if (known & _HALF or is_setting) and not is_excluded(script.outline, test.left, [str(value)], nodes):
            return key, str(value)
    return None


def float16_without_cuda(script: Script, scaler: Scaler, opened: Event) -> ast.expr | None:
    """The test of CUDA without which a region computes in float16, on the CPU, and the scaler is disabled."""
    if not is_always_on_cuda(script, scaler):
        return None
    for region in opened.regions[-1].autocasts:
        device, enabled = argument(region.node, 0, "device_type"), argument(region.node, 2, "enabled")
        if device is None or constant(device) is not ... or not region.devices & {"cpu", UNKNOWN}:
            return None
        conditions = [*parts_of(script, enabled, region.function)] if enabled is not None else []
        if any(on and asks_for_cuda(test) for test, on in conditions) or any("cuda" in g.text for g in opened.guards):
            return None
        for choice in _choices(script, region):
            parts = list(parts_of(script, choice.test, region.function))
            is_rest = _dtype(script, choice.orelse) == "float16" and _dtype(script, choice.body) == "bfloat16"
            if is_rest and any(on and asks_for_cuda(test) for test, on in parts):
                return choice.test
    return None


def float16_by_default(script: Script, scaler: Scaler, opened: Event) -> ast.expr | None:
    """The dtype of a region that is None for some values of a setting: on CUDA it is then float16, and the scaler is off.

    `{"fp32": None, "fp16": torch.float16}[args.dtype]` and `enabled=dtype == torch.float16`.
    """
    asking = [test for test, is_true in tests_of(script, scaler) if is_true and isinstance(test, ast.Compare)]
    scaled = {text_of(test.left) for test in asking if _is_half(script, test)}
    for region in opened.regions[-1].autocasts if scaled else ():
        key = key_of(region.dtype_node)
        sources = script.outline.sources(key, region.function) if key in scaled else []
        if len(sources) != 1 or sources[0][1].cls != region.function.cls or "cuda" not in region.devices:
            continue
        if key.isidentifier() and sources[0][1] is not region.function:
            continue  # an argument: the caller may decide on the region as well
        asked = list(_asked_for_none(script, *sources[0]))
        names = [key, *(text_of(setting) for setting, _ in asked)]
        if not asked or region.enabled == "no" or any(map(_DEVICE.search, names[1:])):
            continue
        if any(_asks_for(script, region, opened, name) or _follows(script, region, name) for name in names):
            continue
        if not any(is_excluded(script.outline, s, strings, (sources[0][0], region.node)) for s, strings in asked):
            return region.dtype_node
    return None


def _is_half(script: Script, test: ast.Compare) -> bool:
    """Whether a test is whether a dtype is float16: `dtype == torch.float16`."""
    is_equal = len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.Is))
    return is_equal and _dtype(script, test.comparators[0]) == "float16"


def _asked_for_none(script: Script, value: ast.expr, function: Function) -> Iterator[tuple[ast.expr, list[str]]]:
    """The settings that decide if a dtype is None, each with its values for that: of a table, or of `a if x else None`."""
    if isinstance(value, ast.IfExp):
        arms = (value.body, value.orelse)
        inner = [asked for arm in arms for asked in _asked_for_none(script, arm, function)]
        if inner or any(isinstance(arm, ast.Constant) and arm.value is None for arm in arms):
            yield value.test.left if isinstance(value.test, ast.Compare) else value.test, list(_FULL)
            yield from inner
        return
    table, place = None, None
    if isinstance(value, ast.Subscript):
        table, place = value.value, value.slice
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "get":
        table, place = value.func.value, value.args[0] if value.args else None
    options = script.outline.values(key_of(table), function) if table is not None and key_of(table) else [table]
    entries = pairs_of(options[0]) if place is not None and len(options) == 1 and options[0] is not None else None
    keys = [k for k, v in entries or () if k is not None and isinstance(v, ast.Constant) and v.value is None]
    if place is not None and keys:
        yield place, [k.value for k in keys if isinstance(k, ast.Constant) and isinstance(k.value, str)]


def _follows(script: Script, region: Autocast, name: str) -> bool:
    """Whether the flag of a region is computed from a variable: `enabled=bool(dtype)`."""
    enabled = argument(region.node, 2, "enabled")
    parts = [n for n in ast.walk(enabled) if isinstance(n, (ast.Name, ast.Attribute))] if enabled is not None else []
    values = [v for part in parts for v in script.outline.values(key_of(part), region.function)]
    return any(name in text_of(node) for node in (enabled, *values) if node is not None)


def _asks_for(script: Script, region: Autocast, opened: Event, setting: str) -> bool:
    """Whether a region is entered only for some values of a setting: `amp = dtype in ("float16", "bfloat16")`."""
    conditions = (*opened.guards, *conditions_of(script.outline, region.node), Guard(region.enabled, is_true=True))
    tests = tests_of_guards(script, conditions, region.function)
    return any(setting in text_of(test) for test, _ in tests)


def _choices(script: Script, region: Autocast) -> list[ast.IfExp]:
    """The `a if x else b` that a region has as its dtype, in place or in a variable."""
    node = region.dtype_node
    if node is None:
        return []
    values = script.outline.values(key_of(node), region.function) or [node]
    return [v for v in values if isinstance(v, ast.IfExp)] if len(values) == 1 else []


def _compared(test: ast.expr) -> tuple[str, object]:
    """The variable and the string of `args.dtype == "float16"`; "" for anything else."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        return text_of(test.left), constant(test.comparators[0])
    return "", None


def _dtype(script: Script, node: ast.expr) -> str:
    return DTYPES.get(script.outline.names.full(node), "")
