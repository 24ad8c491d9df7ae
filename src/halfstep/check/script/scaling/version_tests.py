"""Conditions on the installed version of torch: what else decides that a deprecated name is used."""

from __future__ import annotations

import ast
import re
from itertools import takewhile

from halfstep.check.regex import regex
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["is_by_device", "runs_unset"]

_DEVICE = regex(r"cuda|mps|xpu|npu|cpu|device|backend", re.IGNORECASE)
_VERSION = regex(r"version|attr\(|callable|signature|amp|new|legacy|old|torch_?[0-9]|>=|<", re.IGNORECASE)
_INSTALLED = regex(r"attr\(|version|callable|signature|\b(torch\.amp|GradScaler|autocast)\b", re.IGNORECASE)


def is_by_device(node: ast.AST) -> bool:
    """Whether a branch chooses by the device, `if device.type == "cuda":`, and not by what the installed torch has."""
    test = ast.unparse(node.test) if isinstance(node, ast.If | ast.IfExp) else ""
    return _DEVICE.search(test) is not None and _VERSION.search(test) is None


def runs_unset(script: Script, branch: ast.AST, use: ast.AST) -> bool:
    """Whether a setting that is off leads to the `else` in every version: `if args.fp16 and hasattr(torch.amp, "GradScaler"):`."""
    test = branch.test if isinstance(branch, ast.If | ast.IfExp) else None
    if not isinstance(test, ast.BoolOp) or not isinstance(test.op, ast.And):
        return False
    inside = [part for part in test.values if _INSTALLED.search(text_of(part))]
    scopes = (f for f in script.outline.functions if f.node in script.above(use))
    function = next(scopes, script.outline.module)
    above = list(takewhile(lambda node: node is not branch, script.above(use)))
    is_else = not any(part in {use, *above} for part in _body(branch))
    again = " ".join(ast.unparse(node.test) for node in above if isinstance(node, ast.If | ast.IfExp))
    settings = [part for part in test.values if part not in inside and _is_setting(script, part, function)]
    return bool(inside) and is_else and any(text_of(part) not in again for part in settings)


def _body(branch: ast.AST) -> list[ast.AST]:
    if isinstance(branch, ast.IfExp):
        return [branch.body]
    return list(branch.body) if isinstance(branch, ast.If) else []


def _is_setting(script: Script, test: ast.expr, function: Function) -> bool:
    """Whether a test is a variable, or an attribute, that does not depend on the installed version."""
    key = key_of(test)
    values = script.outline.values(key, function) if key else []
    return bool(key) and not any(_INSTALLED.search(text_of(value)) for value in values)
