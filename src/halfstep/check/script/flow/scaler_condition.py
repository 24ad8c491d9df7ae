"""Whether the condition of a scaler leaves out float16: reversed, or true on CUDA alone while other devices compute in float16."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.values import UNKNOWN, Autocast, Scaler, argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["Omission", "omitted_float16"]

_FLOAT16 = re.compile(r"(use_|is_|enable_)?(fp16|float16|half)", re.IGNORECASE)
_BFLOAT16 = re.compile(r"(use_|is_|enable_)?(bf16|bfloat16)", re.IGNORECASE)
_CUDA = re.compile(r"\bcuda\b")
_DEVICE = re.compile(r"cuda|gpu|cpu|mps|xpu|npu|device|available", re.IGNORECASE)
_WRITTEN = {"torch.float16", "torch.half"}
_MAX_DEPTH = 3  # variables between a scaler and the test that enables it
Test = tuple[ast.expr, bool]  # an expression and the value it has where the scaler is enabled


@dataclass(frozen=True)
class Omission:
    """A case of float16 in which a scaler is disabled."""

    when: str
    instead: str


def omitted_float16(script: Script, scaler: Scaler, opened: Event) -> Omission | None:
    """The case in which a region computes in float16 and its scaler is disabled; None if the text shows none."""
    tests = list(_tests(script, scaler))
    regions = opened.regions[-1].autocasts
    if not tests or not regions or not all("float16" in a.dtypes for a in regions):
        return None
    for test, is_true in tests:
        fmt = _format_of(test, is_true=is_true)
        if fmt in {"bfloat16", "not float16"} and not _shares(test, regions, opened):
            formats = "bfloat16" if fmt == "bfloat16" else "every format but float16"
            return Omission(f"the scaler is enabled for {formats} (`{text_of(test)}`), so", "reverse the condition")
    is_for_float16 = any(_format_of(test, is_true=is_true) == "float16" for test, is_true in tests)
    devices = [test for test, is_true in tests if is_true and _is_cuda(test)]
    if is_for_float16 and devices and all(_is_on_other_devices(script, a) for a in regions):
        if any(_DEVICE.search(text) for text, _ in opened.guards):
            return None
        return Omission(
            f"on devices other than CUDA, such as MPS, the scaler is disabled (`{text_of(devices[0])}`), and with float16",
            "torch.amp.GradScaler(device.type, enabled=...) for every device, or bfloat16 on the others",
        )
    return None


def _tests(script: Script, scaler: Scaler) -> Iterator[Test]:
    """What must be true or false for a scaler to be created and enabled, split at `and`."""
    enabled = argument(scaler.node, None, "enabled")
    if enabled is not None:
        yield from _parts(script, enabled, scaler.function, is_true=True, depth=_MAX_DEPTH)
    node: ast.AST = scaler.node
    for parent in script.above(scaler.node):
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        if isinstance(parent, (ast.If, ast.IfExp)) and node is not parent.test:
            body = parent.body if isinstance(parent.body, list) else [parent.body]
            is_true = any(node is part for part in body)
            yield from _parts(script, parent.test, scaler.function, is_true=is_true, depth=_MAX_DEPTH)
        node = parent


def _parts(script: Script, test: ast.expr, function: Function, *, is_true: bool, depth: int) -> Iterator[Test]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(script, test.operand, function, is_true=not is_true, depth=depth)
    elif isinstance(test, ast.BoolOp):
        if isinstance(test.op, ast.And) == is_true:
            for value in test.values:
                yield from _parts(script, value, function, is_true=is_true, depth=depth)
    else:
        values = script.outline.values(key_of(test), function) if key_of(test) and depth else []
        if len(values) == 1 and isinstance(values[0], (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Name, ast.Attribute)):
            yield from _parts(script, values[0], function, is_true=is_true, depth=depth - 1)
        else:
            yield test, is_true


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


def _is_cuda(test: ast.expr) -> bool:
    """Whether a test asks for the device: `device.type == "cuda"`, `device.startswith("cuda")`."""
    text = text_of(test)
    is_named = isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Eq, ast.In))
    is_prefix = isinstance(test, ast.Call) and text_of(test.func).endswith(".startswith")
    return (is_named or is_prefix) and bool(_CUDA.search(text)) and "device" in text


def _is_on_other_devices(script: Script, region: Autocast) -> bool:
    """Whether a region is for whatever device there is, and computes in float16 on each."""
    device = argument(region.node, 0, "device_type")
    if region.dtype_node is None or device is None or region.enabled == "no" or _DEVICE.search(region.enabled):
        return False
    if not ("mps" in region.devices or UNKNOWN in region.devices):
        return False
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
