"""Names that a file reads, parameters that a function does not, and whether another class may."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["inherits", "last_of", "loads", "mentions", "read_names", "unread_parameters"]


def last_of(node: ast.expr) -> str:
    """The last name of a decorator, with or without arguments."""
    func = node.func if isinstance(node, ast.Call) else node
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def mentions(node: ast.AST, name: str) -> bool:
    """Whether a variable occurs in a statement."""
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node))


def loads(node: ast.AST, name: str) -> bool:
    """Whether a statement reads a variable."""
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in ast.walk(node))


def read_names(nodes: Collection[ast.AST]) -> set[str]:
    """The attributes that are read, and every string: `getattr(args, "amp")`."""
    names = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    return names | {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def inherits(outline: Outline, cls: str) -> bool:
    """Whether a class has a base class, which may read its attributes and ask for its parameters."""
    return any(getattr(base, "id", "") != "object" for base in outline.bases.get(cls, ()))


def unread_parameters(function: Function, text: str, names: re.Pattern[str]) -> Iterator[ast.arg]:
    """The parameters with one of some names that do not occur in the text of a function's body, which is more than `pass`."""
    node = function.node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    body = function.body[ast.get_docstring(node, clean=False) is not None :]
    wanted = [a for a in (*node.args.args, *node.args.kwonlyargs) if names.fullmatch(a.arg)]
    if not wanted or len(body) < 2:
        return
    # By the text: the tree has the value of a variable in the place of its name.
    lines = text.splitlines()[body[0].lineno - 1 : body[-1].end_lineno]
    written = "\n".join(line.partition("#")[0] for line in lines)
    yield from (a for a in wanted if not re.search(rf"(?<!\.)\b{a.arg}\b", written))
