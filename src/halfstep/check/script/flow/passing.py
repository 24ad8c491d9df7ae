"""What happens to a scaler, or to its scale, outside the calls of a training step: stored, logged, or used on gradients."""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.values import make_scaler, text_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["is_left_behind", "returns_scaler", "scales_by_hand", "stores"]

# Functions that save, restore, print or log what they receive, and do not train with it.
_STORES = regex(
    r"save|load|restor|resum|check_?point|ckpt|snapshot|serial|state|dump|export|log(_|$|g(er|ing))|print|summar|report|describe",
    re.IGNORECASE,
)
_VERB = regex(r"_*(maybe_|try_)?(save|load|restore|resume|log|print)(_|$)", re.IGNORECASE)
_TRAINS = regex(
    r"train|fit|epoch|step|update|optimi[sz]e(?!r)|backward|batch|iter|loop|run|engine|learn|clip|unscale|prepare|wrap",
    re.IGNORECASE,
)
# Functions that receive the scale for display, or only convert it.
_SHOWS = regex(
    r"log|print|write|scalar|info|debug|warn|append|postfix|update|format|metric|record|track|report|meter|join|display|wandb|"
    r"description|^(float|int|str|round|max|min|abs|isinstance|dict|tuple|list|tensor|item|math\.\w+|torch\.(log2?|tensor))$",
    re.IGNORECASE,
)
_CONVERTS = regex(r"^(float|max|abs)$")
_ARITHMETIC = (ast.Mult, ast.Div)
_SCALED_BY = {"mul_", "div_", "mul", "div", "_foreach_mul_", "_foreach_div_", "multiply_", "divide_"}


def stores(call: ast.Call) -> bool:
    """Whether a function that is not in this file only saves, restores or logs a scaler that it receives."""
    name = key_of(call.func).rsplit(".", 1)[-1]
    return bool(_VERB.match(name)) or (bool(_STORES.search(name)) and not _TRAINS.search(name))


def is_left_behind(assigned: Event, later: Event) -> bool:
    """Whether a local variable that a function assigned is gone: the function has returned, and not returned it."""
    key, function = assigned.local.subject, assigned.function
    if later.roots[: len(assigned.roots)] == assigned.roots or "." in key or isinstance(function.node, ast.Module):
        return False
    returned = [n.value for n in ast.walk(function.node) if isinstance(n, ast.Return) and n.value is not None]
    return not any(key_of(part) == key for value in returned for part in ast.walk(value))


def returns_scaler(outline: Outline, name: str) -> bool:
    """Whether a function or method of this file with this name returns a new GradScaler, or None: `config.get_scaler()`."""
    functions = [f for f in outline.functions if f.name == name]
    returned = [(n.value, f) for f in functions for n in ast.walk(f.node) if isinstance(n, ast.Return)]
    values = [(v, f) for v, f in returned if v is not None and not (isinstance(v, ast.Constant) and v.value is None)]
    return bool(values) and all(isinstance(v, ast.Call) and make_scaler(outline, v, f) for v, f in values)


def scales_by_hand(outline: Outline, call: ast.Call, function: Function) -> bool:
    """Whether the result of `get_scale()` may multiply or divide gradients, rather than be compared or logged."""
    node: ast.AST = call
    parent = outline.parents.get(call)
    while parent is not None and not isinstance(parent, ast.stmt):
        if _computes(parent, node):
            return True
        if isinstance(parent, (ast.Compare, ast.JoinedStr)):
            return False
        if isinstance(parent, ast.Call) and node is not parent.func and not _SHOWS.search(text_of(parent.func)):
            return True
        node, parent = parent, outline.parents.get(parent)
    if isinstance(parent, (ast.If, ast.While, ast.Expr, ast.Assert)):
        return False
    if not isinstance(parent, (ast.Assign, ast.AnnAssign)):
        return True
    targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
    names = {key_of(target) for target in targets}
    if "" in names or any("." in name for name in names):
        return not all(isinstance(t, ast.Subscript) for t in targets)  # `logs["scale"] = scaler.get_scale()`
    return any(_uses(outline, part, names) for part in ast.walk(function.node) if key_of(part) in names)


def _uses(outline: Outline, name: ast.AST, names: set[str]) -> bool:
    """Whether a variable that contains the scale takes part in arithmetic, or is passed to a function that may do it."""
    parent = outline.parents.get(name)
    if isinstance(parent, ast.keyword):
        name, parent = parent, outline.parents.get(parent)
    if parent is None or isinstance(parent, (ast.Return, ast.Yield, ast.Lambda)):
        return True
    if isinstance(parent, ast.Call) and name is not parent.func:
        if _CONVERTS.search(text_of(parent.func)):
            return _computes(outline.parents.get(parent), parent)  # `norm / max(scale, 1e-12)`
        return not _SHOWS.search(text_of(parent.func))
    if isinstance(parent, ast.Assign) and parent.value is name:
        return not any(key_of(t) in names for t in parent.targets)
    return _computes(parent, name)


def _computes(parent: ast.AST | None, node: ast.AST) -> bool:
    """Whether an expression multiplies or divides by a part of it."""
    if isinstance(parent, (ast.BinOp, ast.AugAssign)):
        return isinstance(parent.op, _ARITHMETIC)
    func = parent.func if isinstance(parent, ast.Call) and node is not parent.func else None
    return isinstance(func, ast.Attribute) and func.attr in _SCALED_BY
