"""Which regions may compute in bfloat16, and what decides it: a flag, an arm of a choice, a parameter with documented values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from halfstep.check.regex import regex
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.formats import passed_for
from halfstep.check.script.objects.values import DTYPES, UNKNOWN, Autocast, Scaler, dtypes_of, text_of
from halfstep.check.script.scaling.device_tests import Test, parts_of, tests_of, tests_of_guards
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.scope import default_of

__all__ = ["arm_with_bf16", "dtypes_here", "is_documented", "is_low_with", "names_bf16", "only_switch"]

# Where it is false there is no CUDA, and a scaler for CUDA disables itself.
_ON_CUDA = regex(r"^([\w.]+|str\([\w.]+\)) == 'cuda'$|^torch\.cuda\.is_available\(\)$|^[\w.]+\.startswith\('cuda'\)$")
_BF16 = regex(r"bf(loat)?_?16|bfloat", re.IGNORECASE)
_FLOAT16 = regex(r"(?<!b)(float16|fp16)")


def is_low_with(script: Script, region: Autocast, scaler: Scaler) -> bool:
    """Whether the flag of a scaler is what chooses bfloat16, not float32, for a region; elsewhere than on a device it may be off."""
    outline, node = script.outline, region.dtype_node
    if node is None:
        return False
    choices = outline.values(key_of(node), region.function) if key_of(node) else [node]
    wanted = _switches(tests_of(script, scaler))
    asked = []
    for choice in choices:
        if isinstance(choice, ast.IfExp):
            is_body = names_bf16(script, choice.body)
            asked.append(_switches(parts_of(script, choice.test, region.function, is_true=is_body)))
        elif names_bf16(script, choice):
            asked.append(_switches(tests_of_guards(script, conditions_of(outline, choice), region.function)))
    rest = {text for tests in asked for text, _ in tests - wanted}
    return bool(asked) and all(tests & wanted for tests in asked) and all(map(_ON_CUDA.search, rest))


def _switches(tests: Iterable[Test]) -> set[tuple[str, bool]]:
    return {(text_of(test), is_true) for test, is_true in tests}


def only_switch(script: Script) -> str:
    """The flag that enables every region of a file, all with bfloat16 written out: whatever it is called, it means bfloat16."""
    regions = [a for a in script.autocasts if a.enabled != "no"]
    flags = {a.enabled for a in regions}
    is_literal = all(a.dtype_node is not None and names_bf16(script, a.dtype_node) for a in regions)
    return flags.pop() if len(flags) == 1 and is_literal else ""


def arm_with_bf16(script: Script, region: Autocast) -> str:
    """The dtype of a region as written; of `dtype if amp else torch.float32`, the arm that may be bfloat16."""
    node = region.dtype_node
    while isinstance(node, ast.IfExp) and not (names_bf16(script, node.body) or names_bf16(script, node.orelse)):
        is_body = "bfloat16" in dtypes_of(script.outline, node.body, region.function)
        node = node.body if is_body else node.orelse
    return text_of(node)


def dtypes_here(script: Script, region: Autocast) -> frozenset[str]:
    """The dtypes that the calls of this file give a region, which are all that the scalers of this file are used with."""
    outline, function = script.outline, region.function
    name = key_of(region.dtype_node) if region.dtype_node is not None else ""
    passed = list(passed_for(outline, name, function)) if name in function.params else []
    is_changed = any(b.function is function for b in outline.bindings.get(name, ()))
    if not passed or is_changed or default_of(function, name) is not None:
        return region.dtypes
    return frozenset().union(*(dtypes_of(outline, value, scope) for value, scope in passed))


def is_documented(region: Autocast) -> bool:
    """Whether the dtype of a region is a parameter that other files pass, for which its docstring lists bfloat16 and float16."""
    function, name = region.function, key_of(region.dtype_node) if region.dtype_node is not None else ""
    if name not in function.params or UNKNOWN not in region.dtypes:
        return False
    node = function.node
    text = ast.get_docstring(node) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
    lines = re.findall(rf"^[\s*:`]*(?:param )?{name}\b.*$", text or "", re.MULTILINE)
    return any(_BF16.search(line) and _FLOAT16.search(line) for line in lines)


def names_bf16(script: Script, value: ast.expr) -> bool:
    """Whether an expression is torch.bfloat16."""
    return DTYPES.get(script.outline.names.full(value)) == "bfloat16"
