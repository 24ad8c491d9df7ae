"""Questions whether the GPU has bfloat16, in the forms that scripts choose a precision with; each answer is a run to check.

torch.cuda.is_bf16_supported()                  torch.cuda.get_device_capability()[0] >= 8
is_torch_bf16_gpu_available()                   major, _ = torch.cuda.get_device_capability(); major < 8
"""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex
from halfstep.check.script.syntax.children import nodes_in
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Outline

__all__ = ["HAS_BF16", "asks", "is_asked", "words_in"]

HAS_BF16 = "torch.cuda.is_bf16_supported()"  # in place of the name of a setting
_QUERIES = frozenset({"is_bf16_supported", "is_bfloat16_supported", "is_torch_bf16_gpu_available"})
_CAPABILITY = "get_device_capability"
_MAJOR = regex(r"(^|_)(major|capability|cap|cc|compute_cap\w*|sm)(_|$)", re.IGNORECASE)
_FIRST = 8  # the major version of Ampere


def is_asked(outline: Outline) -> bool:
    """Whether a file asks for bfloat16."""
    return not (_QUERIES | {_CAPABILITY}).isdisjoint(outline.calls)


def asks(node: ast.expr) -> bool | None:
    """Whether an expression is true on GPUs with bfloat16 and on no others; False for the reverse, None for any other expression."""
    if isinstance(node, ast.Call):
        return True if last_name(key_of(node.func)) in _QUERIES else None
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not _is_capability(node.left):
        return None
    limit = (
        node.comparators[0].elts[0]
        if isinstance(node.comparators[0], ast.Tuple) and node.comparators[0].elts
        else node.comparators[0]
    )
    value = limit.value if isinstance(limit, ast.Constant) else None
    is_first = value == _FIRST
    is_before = value == _FIRST - 1
    match node.ops[0]:
        case ast.GtE() if is_first:
            return True
        case ast.Gt() if is_before:
            return True
        case ast.Lt() if is_first:
            return False
        case ast.LtE() if is_before:
            return False
    return None


def _is_capability(node: ast.expr) -> bool:
    """Whether an expression is the compute capability, or its major version."""
    if isinstance(node, ast.Subscript):
        return _is_capability(node.value)
    if isinstance(node, ast.Call):
        return last_name(key_of(node.func)) == _CAPABILITY
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
        return node.attr == "major"  # of `torch.cuda.get_device_properties(0)`
    return bool(_MAJOR.search(last_name(key_of(node))))


def words_in(tree: ast.Module) -> frozenset[str]:
    """The names in all such questions of a script."""
    questions = [n for n in nodes_in(tree) if isinstance(n, (ast.Call, ast.Compare)) and asks(n) is not None]
    names = (last_name(key_of(n)) for question in questions for n in ast.walk(question) if isinstance(n, ast.expr))
    return frozenset(names) - {""}
