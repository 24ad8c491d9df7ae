"""Where the answer of `torch.cuda.is_bf16_supported()` cannot slow a training down: behind other tests, and in descriptions."""

from __future__ import annotations

import ast

from halfstep.check.regex import regex
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["behind_ampere_test", "is_described"]

_CAPABILITY = regex(r"capability|^\(?(major|cc|sm|compute_cap)\b")
_AMPERE = 8  # the first major number whose GPUs compute in bfloat16; 7.x is Volta and Turing
_TABLE = regex(r"(^|_)(info|report|summary|metadata|environment|diagnostics|fingerprint|manifest)$")


def behind_ampere_test(outline: Outline, node: ast.AST, function: Function) -> bool:
    """Whether a node is only evaluated on a GPU of compute capability 8.0 or higher.

    It stands in a branch of such a test, after it in `a and b`, or below a branch for older GPUs that leaves the block.
    """
    inside, parent = node, outline.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        if isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.And):
            before = parent.values[: parent.values.index(inside)] if inside in parent.values else []
            if any(_needs(outline, value, function, is_true=True) for value in before):
                return True
        if isinstance(parent, (ast.If, ast.IfExp)) and inside is not parent.test:
            body = parent.body if isinstance(parent.body, list) else [parent.body]
            if _needs(outline, parent.test, function, is_true=inside in body):
                return True
        if any(_leaves_older(outline, statement, function) for statement in _before(parent, inside)):
            return True
        inside, parent = parent, outline.parents.get(parent)
    return any(_leaves_older(outline, statement, function) for statement in _before(parent, inside))


def _before(parent: ast.AST | None, node: ast.AST) -> list[ast.stmt]:
    """The statements that run before a statement of a block."""
    blocks = [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]
    block = next((b for b in blocks if isinstance(b, list) and node in b), [])
    return block[: block.index(node)] if block else []


def _leaves_older(outline: Outline, statement: ast.stmt, function: Function) -> bool:
    """Whether a statement leaves the block on older GPUs: `if major < 8: return torch.float16`."""
    if not isinstance(statement, ast.If) or not isinstance(statement.body[-1], (ast.Return, ast.Raise)):
        return False
    return not statement.orelse and _needs(outline, statement.test, function, is_true=False)


def _needs(outline: Outline, test: ast.expr, function: Function, *, is_true: bool) -> bool:
    """Whether a test has this value only on a GPU of compute capability 8.0 or higher."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _needs(outline, test.operand, function, is_true=not is_true)
    if isinstance(test, ast.BoolOp):
        parts = (_needs(outline, value, function, is_true=is_true) for value in test.values)
        return any(parts) if isinstance(test.op, ast.And) == is_true else all(parts)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        wanted = {True: (ast.GtE, ast.Gt), False: (ast.Lt, ast.LtE)}[is_true]
        limit = _limit(test.comparators[0])
        is_strict = isinstance(test.ops[0], (ast.Gt, ast.LtE))  # `> 7` and `not <= 7`, of a major number
        is_high = limit >= _AMPERE or (
            is_strict and limit == _AMPERE - 1 and isinstance(_constant(test.comparators[0]), int)
        )
        return isinstance(test.ops[0], wanted) and is_high and _is_capability(outline, test.left, function)
    values = outline.values(_text_of(test), function) if isinstance(test, (ast.Name, ast.Attribute)) else []
    return (
        len(values) == 1
        and not isinstance(values[0], type(test))
        and _needs(outline, values[0], function, is_true=is_true)
    )


def _limit(node: ast.expr) -> float:
    """The major number that a capability is compared with: of 8, 8.0, (8, 0) or 80."""
    first = node.elts[0] if isinstance(node, ast.Tuple) and node.elts else node
    value = _constant(first)
    if not isinstance(value, (int, float)):
        return 0
    return value / 10 if value >= 10 * (_AMPERE - 1) else value


def _is_capability(outline: Outline, node: ast.expr, function: Function) -> bool:
    """Whether an expression is the compute capability of a GPU, or its major number."""
    base = node.value if isinstance(node, ast.Subscript) else node
    if _CAPABILITY.search(_text_of(base)):
        return True
    return any("capability" in _text_of(value) for value in outline.values(_text_of(base), function))


def is_described(outline: Outline, node: ast.expr, function: Function) -> bool:
    """Whether an expression is an entry of a table such as `info`, under a key that occurs nowhere else in the file."""
    parent = outline.parents.get(node)
    if isinstance(parent, ast.Call) and key_of(parent.func) == "bool":
        node, parent = parent, outline.parents.get(parent)
    if isinstance(parent, ast.Dict) and node in parent.values:
        key = _constant(parent.keys[parent.values.index(node)])
        owners = _owners(outline, parent, function)
    elif isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Subscript):
        key = _constant(parent.targets[0].slice)
        owners = [key_of(parent.targets[0].value)]
    else:
        return False
    if not isinstance(key, str) or not any(_TABLE.search(last_name(owner)) for owner in owners):
        return False
    return sum(isinstance(n, ast.Constant) and n.value == key for n in ast.walk(outline.module.node)) == 1


def _owners(outline: Outline, table: ast.Dict, function: Function) -> list[str]:
    """The names that a dictionary has: of a variable, of what it updates, of an argument, or of a function that returns it."""
    parent = outline.parents.get(table)
    if isinstance(parent, ast.Dict):
        outer = (_constant(key) for key, value in zip(parent.keys, parent.values, strict=True) if value is table)
        return [*(name for name in outer if isinstance(name, str)), *_owners(outline, parent, function)]
    if isinstance(parent, ast.Return):
        return [function.name]
    if isinstance(parent, ast.Assign):
        return [key_of(target) for target in parent.targets]
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and parent.func.attr == "update":
        return [key_of(parent.func.value)]
    return []


def _constant(node: ast.AST | None) -> object:
    """The value of a literal; `...` for anything else."""
    return node.value if isinstance(node, ast.Constant) else ...


def _text_of(node: ast.expr) -> str:
    return key_of(node) or ast.unparse(node)
