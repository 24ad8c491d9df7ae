"""Variables that are an engine of DeepSpeed where a setting says so: `if engine == "deepspeed": model.backward(loss)`.

Functions of one file often share such a setting and the name of the model, while another file calls them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.config.joint import Use
from halfstep.check.script.syntax.names import key_of

__all__ = ["casts_entered", "is_engine_at", "is_engine_if_asked"]


def casts_entered(use: Use, context: ast.expr, block: ast.With) -> list[ast.Call]:
    """The calls of torch's autocast that a context is: this one, or what the function assigns to the variable."""
    options: list[ast.expr] = [context]
    if isinstance(context, ast.Name) and use.engines is not None:
        assigned = [n for n in use.nodes if isinstance(n, ast.Assign) and key_of(n.targets[0]) == context.id]
        here = [n for n in assigned if use.engines.scope(n) is use.engines.scope(block)]
        shared = [n for n in assigned if use.engines.scope(n) is None]  # a variable of the module
        options = [arm for n in here or shared for arm in _arms(n.value)]
    calls = [o for o in options if isinstance(o, ast.Call)]
    return [c for c in calls if use.names.full(c.func) in {"torch.amp.autocast", "torch.cuda.amp.autocast"}]


def _arms(value: ast.expr) -> list[ast.expr]:
    """A value, or the two of `autocast(...) if dtype else nullcontext()`."""
    return [*_arms(value.body), *_arms(value.orelse)] if isinstance(value, ast.IfExp) else [value]


def is_engine_if_asked(use: Use, cast: ast.AST, block: ast.With, name: str) -> bool:
    """Whether a model that only some runs turn into an engine is called here in those runs too: `if use_deepspeed: model.backward(loss)`."""
    if use.engines is None or name not in use.engines.visible(block):
        return False
    around = [parent for node in (cast, block) for parent in _above(use, node)]
    if any(isinstance(n, ast.If) and "deepspeed" in ast.unparse(n.test).lower() for n in around):
        return False
    return any(
        call.args and use.engines.scope(call) is use.engines.scope(block) for call in use.calls("backward", name)
    )


def _above(use: Use, node: ast.AST) -> Iterator[ast.AST]:
    parents = use.engines.parents if use.engines is not None else {}
    while (parent := parents.get(node)) is not None:
        yield parent
        node = parent


def is_engine_at(use: Use, node: ast.AST, name: str) -> bool:
    """Whether a variable is an engine where a setting has the value "deepspeed", with which the script runs `name.backward(loss)`.

    `else` of `if engine == "ddp":` is that value too, if the script compares the setting with no other.
    """
    if not name or use.engines is None:
        return False
    for call in use.calls("backward", name):
        settings = {left for left, value, is_true in _equals(use, call) if is_true and value == "deepspeed"}
        for left, value, is_true in _equals(use, node):
            others = {v for n in use.nodes if (pair := _equality(n)) is not None and pair[0] == left for v in pair[1:]}
            is_deepspeed = value == "deepspeed" if is_true else others - {value} == {"deepspeed"}
            if call.args and left in settings and is_deepspeed:
                return True
    return False


def _equals(use: Use, node: ast.AST) -> Iterator[tuple[str, str, bool]]:
    """The tests around a node that compare a setting with a string, and whether they are true there."""
    child, parents = node, use.engines.parents if use.engines is not None else {}
    while (parent := parents.get(child)) is not None:
        pair = _equality(parent.test) if isinstance(parent, ast.If) and child is not parent.test else None
        if pair is not None and isinstance(parent, ast.If):
            yield (*pair, child in parent.body)
        child = parent


def _equality(node: ast.AST) -> tuple[str, str] | None:
    """The two sides of `setting == "value"`."""
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Eq) or len(node.ops) > 1:
        return None
    right = node.comparators[0]
    value = right.value if isinstance(right, ast.Constant) else None
    return (ast.unparse(node.left), value) if isinstance(value, str) else None
