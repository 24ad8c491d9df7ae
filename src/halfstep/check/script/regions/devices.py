"""Devices that autocast rejects: a torch.device, the number of a GPU, or a condition; and names of devices that are asked for their type."""

from __future__ import annotations

import ast

from halfstep.check.script.objects.expressions import arms_of
from halfstep.check.script.objects.values import DTYPES, UNKNOWN, Autocast, constant, dtypes_of, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["is_condition", "is_device", "is_dtype", "is_number", "untyped_device"]

_QUERIES = {"torch.cuda.is_available", "torch.cuda.is_bf16_supported"}
_NUMBERS = {"torch.cuda.current_device", "torch.cuda.device_count"}


def is_condition(outline: Outline, node: ast.expr, function: Function, depth: int = 3) -> bool:
    """Whether an expression is True or False and names no device: `dtype == "float16"`, `not args.fp32`, or a variable with such a value."""
    if isinstance(node, ast.BoolOp):
        # The last part of `use_amp and dtype == "fp16"` decides; `device or torch.cuda.is_available()` may be the device.
        parts = node.values[-1:] if isinstance(node.op, ast.And) else node.values
        return all(is_condition(outline, part, function, depth) for part in parts)
    if isinstance(node, ast.Call):
        return key_of(node.func) == "bool" or outline.names.full(node.func) in _QUERIES
    key = key_of(node)
    if key and key not in function.params and depth:
        values = outline.values(key, function)
        return bool(values) and all(is_condition(outline, value, function, 0) for value in values)
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def is_device(script: Script, device: ast.expr, region: Autocast) -> bool:
    """Whether the device type of a region is a torch.device."""
    key = key_of(device)
    function = next((f for c, f in script.outline.library_calls.get(region.api, ()) if c is region.node), None)
    # An attribute that this file does not assign belongs to a base class.
    if not key or function is None or key in function.params or ("." in key and key not in script.outline.bindings):
        return isinstance(device, ast.Call) and script.outline.names.full(device.func) == "torch.device"
    values = [arm for value in script.outline.values(key, function) for arm in arms_of(value)]
    calls = [v for v in values if isinstance(v, ast.Call) and script.outline.names.full(v.func) == "torch.device"]
    return bool(values) and len(calls) == len(values)


def is_dtype(script: Script, device: ast.expr, region: Autocast) -> bool:
    """Whether the device type of a region is a dtype of torch, also through a variable: `autocast(dtype)`."""
    if script.outline.names.full(device) in DTYPES:
        return True
    named = isinstance(device, ast.Name | ast.Attribute) and "dtype" in text_of(device).lower()
    return named and UNKNOWN not in dtypes_of(script.outline, device, region.function)


def is_number(script: Script, device: ast.expr, region: Autocast) -> bool:
    """Whether the device type of a region is the number of a GPU: `autocast(local_rank)`."""
    key = key_of(device)
    if not key or key in region.function.params or ("." in key and key not in script.outline.bindings):
        return _is_number(script, device)
    values = script.outline.values(key, region.function)
    return bool(values) and all(_is_number(script, value) for value in values)


def untyped_device(script: Script, device: ast.expr, function: Function) -> tuple[str, str, ast.expr] | None:
    """Whether the device of `device.type` is a string or a number: which of the two, that expression, and the value."""
    if (name := _named_device(script, device, function)) is not None:
        return "string", text_of(device), name
    number = _numbered_device(script, device, function)
    return ("number", *number) if number is not None else None


def _named_device(script: Script, device: ast.expr, function: Function) -> ast.expr | None:
    """The name of a device, `"cuda" if torch.cuda.is_available() else "cpu"`, whose `type` the device type of a region is."""
    owner = device.value if isinstance(device, ast.Attribute) and device.attr == "type" else None
    key = key_of(owner) if owner is not None else ""
    if not key.isidentifier() or key in function.params:
        return None
    tests = [n.test for n in script.above(device) if isinstance(n, (ast.If, ast.IfExp))]
    values = script.outline.values(key, function)
    is_named = len(values) == 1 and all(isinstance(constant(arm), str) for arm in arms_of(values[0]))
    return values[0] if is_named and not any(key in text_of(test) for test in tests) else None


def _numbered_device(script: Script, device: ast.expr, function: Function) -> tuple[str, ast.expr] | None:
    """The expression `device.type` of a device type whose device some line sets to the number of a GPU, with that number.

    Also of `device if isinstance(device, str) else device.type`, and of an entry: `config["device"]` after
    `args["train"]["device"] = torch.cuda.current_device()`.
    """
    for value in script.outline.values(key_of(device), function) if key_of(device) else [device]:
        arms = [*arms_of(value)]
        tests = [n.test for n in ast.walk(value) if isinstance(n, ast.IfExp)]
        if any("int" in {n.id for n in ast.walk(test) if isinstance(n, ast.Name)} for test in tests):
            continue
        for arm in arms:
            owner = arm.value if isinstance(arm, ast.Attribute) and arm.attr == "type" else None
            sources = _sources(script, owner, function) if owner is not None else []
            number = next((source for source in sources if _is_number(script, source)), None)
            if number is not None and not any(_makes_device(script, source) for source in sources):
                return ast.unparse(arm), number
    return None


def _sources(script: Script, owner: ast.expr, function: Function) -> list[ast.expr]:
    """What a device may be: the values of its variable, or of the entries of its name in this file."""
    every = script.outline.values(key_of(owner), function) if key_of(owner) else []
    values = list({ast.unparse(value): value for value in every}.values())
    if len(values) > 1 and not all(_is_number(script, value) for value in values):
        return []
    names = {constant(v.slice) for v in (owner, *values) if isinstance(v, ast.Subscript)}
    ends = tuple(f"[{name!r}]" for name in names if isinstance(name, str))
    bound = [b for key, bindings in script.outline.bindings.items() if ends and key.endswith(ends) for b in bindings]
    return [*values, *(b.value for b in bound if b.value is not None and b.index is None)]


def _makes_device(script: Script, value: ast.expr) -> bool:
    return any(script.outline.names.full(n.func) == "torch.device" for n in ast.walk(value) if isinstance(n, ast.Call))


def _is_number(script: Script, value: ast.expr) -> bool:
    """Whether a value is the number of a GPU."""
    if isinstance(value, ast.Call):
        return script.outline.names.full(value.func) in _NUMBERS or key_of(value.func) == "int"
    return isinstance(constant(value), int) and not isinstance(constant(value), bool)
