"""The option that switches a region or a branch: `args.amp`, also through variables, `bool(...)` and parameters."""

from __future__ import annotations

import ast

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Guard
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.pairing.device_tests import asks_for_cuda
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["is_option", "option_of"]

# A setting from outside: `args.use_amp`, `self.cfg["use_amp"]`, `config.get("use_amp", True)`.
_OPTION = regex(
    r"(\w+\.)*\w*(args?|cfg|conf|config|opts?|options|hparams|params|flags|settings)"
    r"(\.\w+|\[['\"]\w+['\"]\]|\.get\([^()]*\))+"
)


def is_option(script: Script, guard: Guard, function: Function) -> bool:
    """Whether a condition is an option, and not an expression or a constant of the file."""
    try:
        return bool(option_of(script, ast.parse(guard.text, mode="eval").body, function))
    except SyntaxError:  # a part that a trace has shortened
        return False


def option_of(script: Script, node: ast.expr, function: Function, depth: int = 3) -> str:
    """The option that a flag is, as written, also through variables; "" for anything else, such as a constant of the file."""
    while isinstance(node, ast.Call) and key_of(node.func) == "bool" and len(node.args) == 1:
        node = node.args[0]
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        parts = [part for part in node.values if not asks_for_cuda(part)]  # without CUDA the scaler does nothing either
        return option_of(script, parts[0], function, depth) if len(parts) == 1 else ""
    key, text = key_of(node), text_of(node)
    if _OPTION.fullmatch(text) and not script.outline.bindings.get(key):
        return text
    if key in function.params:
        passed = [value for value, _ in script.outline.passed(key, function)]
        return key if not passed or any(constant(value) is ... for value in passed) else ""
    bound = script.outline.lookup(key, function) if key.isidentifier() or key.startswith("self.") else []
    if len(bound) != 1 or bound[0].value is None or bound[0].index is not None or not depth:
        return ""
    return key if option_of(script, bound[0].value, bound[0].function, depth - 1) else ""
