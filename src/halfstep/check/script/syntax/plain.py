"""Some forms of statements as the plain ones that rules know, in the same places of the text.

    scaler: GradScaler = GradScaler()          scaler = GradScaler()
    (a if test else b).backward()              if test: a.backward()       else: b.backward(); also where a variable contains it
    stack.enter_context(autocast("cuda"))      with autocast("cuda"):      around the rest of the block of `with ExitStack() as stack`

Fields of classes keep their annotations: a dataclass has a field only where there is one.
"""

from __future__ import annotations

import ast
import copy

from halfstep.check.script.syntax.children import SIMPLE, parts_of
from halfstep.check.script.syntax.names import key_of

__all__ = ["make_plain"]


def make_plain(tree: ast.Module) -> None:
    """Replace annotated assignments outside the bodies of classes, chosen losses, and contexts that an ExitStack enters."""
    stack: list[ast.AST] = [tree]  # an explicit stack, because generated code nests deeper than Python recurses
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.With, ast.AsyncWith)):
            _nest(node)
        for block in parts_of(node):
            for index, part in enumerate(block):
                if type(part) not in SIMPLE:
                    stack.append(part)
                elif isinstance(part, ast.Expr):
                    block[index] = _choose(part, block[index - 1] if index else None)
                elif isinstance(part, ast.AnnAssign) and part.value is not None and not isinstance(node, ast.ClassDef):
                    block[index] = ast.copy_location(ast.Assign([part.target], part.value), part)


def _choose(statement: ast.Expr, before: ast.AST | None) -> ast.stmt:
    """The backward of a loss that is scaled or not, as an `if` with one backward in each branch."""
    call = statement.value
    func = call.func if isinstance(call, ast.Call) else None
    if not isinstance(call, ast.Call) or not isinstance(func, ast.Attribute) or func.attr != "backward":
        return statement
    loss: ast.expr = func.value
    if isinstance(before, ast.Assign) and key_of(loss) and key_of(loss) == key_of(before.targets[0]):
        loss = copy.deepcopy(before.value)
    if not isinstance(loss, ast.IfExp) or _is_scaled(loss.body) == _is_scaled(loss.orelse):
        return statement
    branches: list[list[ast.stmt]] = []
    for chosen in (loss.body, loss.orelse):
        own = copy.deepcopy(statement)
        assert isinstance(own.value, ast.Call)
        assert isinstance(own.value.func, ast.Attribute)
        own.value.func.value = chosen
        branches.append([own])
    return ast.copy_location(ast.If(loss.test, *branches), statement)


def _is_scaled(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "scale"


def _nest(node: ast.With | ast.AsyncWith) -> None:
    """Put what follows `stack.enter_context(context)` in the block of a stack into `with context:`, the last one first."""
    names = {key_of(item.optional_vars) for item in node.items if item.optional_vars is not None}
    for index in range(len(node.body) - 2, -1, -1):
        part = node.body[index]
        call = part.value if isinstance(part, ast.Expr) else None
        func = call.func if isinstance(call, ast.Call) else None
        is_entered = isinstance(func, ast.Attribute) and func.attr == "enter_context" and key_of(func.value) in names
        if is_entered and isinstance(call, ast.Call) and len(call.args) == 1:
            inner = ast.With([ast.withitem(call.args[0])], node.body[index + 1 :])
            node.body[index:] = [ast.copy_location(inner, part)]
