"""What a flag or a scaler asks of the device: the tests that must hold where it is on, split at `and`, with variables followed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.guard import Guard
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.values import Scaler, argument, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = [
    "Test",
    "asks_for_cuda",
    "is_always_on_cuda",
    "is_without_cuda",
    "names_mps",
    "parts_of",
    "tests_of",
    "tests_of_guards",
]

_CUDA = regex(r"\bcuda\b")
_MPS = regex(r"\bmps\b")
_OTHER = regex(r"device.* == '(cpu|mps|xpu)'$")
_AVAILABLE = "torch.cuda.is_available"
_MAX_DEPTH = 3  # variables between a flag and the test that it is
Test = tuple[ast.expr, bool]  # an expression and the value it has where the flag is true


def tests_of(script: Script, scaler: Scaler) -> Iterator[Test]:
    """What must be true or false for a scaler to be created and enabled."""
    enabled = argument(scaler.node, None, "enabled")
    if enabled is not None:
        yield from parts_of(script, enabled, scaler.function)
    node: ast.AST = scaler.node
    for parent in script.above(scaler.node):
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        if isinstance(parent, (ast.If, ast.IfExp)) and node is not parent.test:
            body = parent.body if isinstance(parent.body, list) else [parent.body]
            yield from parts_of(script, parent.test, scaler.function, is_true=any(node is part for part in body))
        node = parent


def tests_of_guards(script: Script, guards: Iterable[Guard], function: Function) -> Iterator[Test]:
    """What must be true or false for an event to happen."""
    for text, is_true in guards:
        try:
            test = ast.parse(text, mode="eval").body
        except SyntaxError:  # `except@12`
            continue
        yield from parts_of(script, test, function, is_true=is_true)


def parts_of(
    script: Script, test: ast.expr, function: Function, *, is_true: bool = True, depth: int = _MAX_DEPTH
) -> Iterator[Test]:
    """What must be true or false for a condition to have a value."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from parts_of(script, test.operand, function, is_true=not is_true, depth=depth)
    elif isinstance(test, ast.BoolOp):
        if isinstance(test.op, ast.And) == is_true:
            for value in test.values:
                yield from parts_of(script, value, function, is_true=is_true, depth=depth)
        elif is_true:
            yield test, is_true  # `device.type == "cuda" or device.type == "mps"`
    else:
        values = script.outline.values(key_of(test), function) if key_of(test) and depth else []
        if len(values) == 1 and _is_test(values[0]):
            yield from parts_of(script, values[0], function, is_true=is_true, depth=depth - 1)
        else:
            yield test, is_true


def _is_test(value: ast.expr) -> bool:
    is_query = isinstance(value, ast.Call) and text_of(value.func) == _AVAILABLE
    return is_query or isinstance(value, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Name, ast.Attribute))


def asks_for_cuda(test: ast.expr) -> bool:
    """Whether a test is true on CUDA alone: `device.type == "cuda"`, `device.startswith("cuda")`."""
    text = text_of(test)
    if isinstance(test, ast.Call) and text_of(test.func) == _AVAILABLE:
        return True
    is_named = isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Eq, ast.In)) and not _MPS.search(text)
    is_prefix = isinstance(test, ast.Call) and text_of(test.func).endswith(".startswith")
    return (is_named or is_prefix) and bool(_CUDA.search(text)) and "device" in text


def is_always_on_cuda(script: Script, scaler: Scaler) -> bool:
    """Whether a scaler asks for nothing but the device: `enabled=device.type == "cuda"`."""
    tests = list(tests_of(script, scaler))
    return bool(tests) and all(is_true and asks_for_cuda(test) for test, is_true in tests)


def is_without_cuda(script: Script, value: ast.expr, function: Function) -> bool:
    """Whether a value stands where the device is not CUDA."""
    tests = tests_of_guards(script, conditions_of(script.outline, value), function)
    return any(_OTHER.search(text_of(test)) if is_true else asks_for_cuda(test) for test, is_true in tests)


def names_mps(test: ast.expr) -> bool:
    """Whether a test is true on MPS: `device.type == "mps"`, `device.type in ("cuda", "mps")`, also as a part of `and`."""
    parts = test.values if isinstance(test, ast.BoolOp) else [test]
    compared = [part for part in parts if isinstance(part, ast.Compare) and isinstance(part.ops[0], (ast.Eq, ast.In))]
    return any(isinstance(node, ast.Constant) and node.value == "mps" for part in compared for node in ast.walk(part))
