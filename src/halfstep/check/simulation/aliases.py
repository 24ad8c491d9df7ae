"""Names under which a script calls its functions: `self.step_fn = self.amp_step`, `STEPS["amp"]`, a parameter of `fit`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

__all__ = ["called_name", "read_aliases"]

_DISPLAYS = (ast.Dict, ast.List, ast.Tuple, ast.IfExp, ast.BoolOp)
# Attributes that are numbers or modes of something else as well: `args.step`, `self.train`.
_COMMON = {"step", "update", "train", "eval", "scale", "backward", "run", "forward", "zero_grad"}


def called_name(func: ast.expr) -> str:
    """The last name of what is called: `step` of `self.step(...)`, `STEPS` of `STEPS[mode](...)` and `STEPS.get(mode)(...)`."""
    if isinstance(func, ast.Attribute):
        return func.attr
    if isinstance(func, ast.Subscript):
        return called_name(func.value)
    if isinstance(func, ast.Call) and isinstance(func.func, ast.Attribute) and func.func.attr in {"get", "pop"}:
        return called_name(func.func.value)
    return getattr(func, "id", "")


def read_aliases(nodes: Iterable[ast.AST], functions: dict[str, list[ast.AST]]) -> list[tuple[str, frozenset[str]]]:
    """Each name, and the functions of the script that it may stand for."""
    aliases: list[tuple[str, frozenset[str]]] = []
    for node in nodes:
        if isinstance(node, ast.Assign):
            named = frozenset(_functions_in(node.value, functions))
            aliases += [(called_name(target), named) for target in node.targets if named]
        elif isinstance(node, ast.Call):
            aliases += _passed(node, functions)
        elif isinstance(node, ast.FunctionDef) and node.decorator_list:  # `@register("amp")`, which fills a table
            aliases += [(name, frozenset({node.name})) for name in _registered_by(node, functions)]
    return aliases


def _functions_in(value: ast.expr, functions: dict[str, list[ast.AST]]) -> Iterator[str]:
    """The functions that a value is, or contains."""
    if isinstance(value, _DISPLAYS):
        for part in ast.iter_child_nodes(value):
            if isinstance(part, ast.expr):
                yield from _functions_in(part, functions)
    elif isinstance(value, ast.Call):  # partial(step, model)
        if called_name(value.func) == "partial" and value.args:
            yield from _functions_in(value.args[0], functions)
    elif (isinstance(value, ast.Name) and value.id in functions) or (
        isinstance(value, ast.Attribute)
        and value.attr in functions
        and (value.attr not in _COMMON or getattr(value.value, "id", "") == "self")
    ):
        yield called_name(value)


def _passed(call: ast.Call, functions: dict[str, list[ast.AST]]) -> Iterator[tuple[str, frozenset[str]]]:
    """The parameters that a call gives functions to; one that no function of the script has is the call's own name."""
    own = called_name(call.func)
    for position, value in enumerate(call.args):
        if named := frozenset(_functions_in(value, functions)):
            parameters = list(_parameters_at(functions.get(own, ()), position))
            yield from ((name, named) for name in parameters or [own])
    for keyword in call.keywords:
        if keyword.arg and (named := frozenset(_functions_in(keyword.value, functions))):
            yield keyword.arg, named


def _parameters_at(definitions: Iterable[ast.AST], position: int) -> Iterator[str]:
    for definition in definitions:
        if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [a.arg for a in (*definition.args.posonlyargs, *definition.args.args)]
            place = position + (names[:1] in (["self"], ["cls"]))
            yield from names[place : place + 1]


def _registered_by(node: ast.FunctionDef, functions: dict[str, list[ast.AST]]) -> Iterator[str]:
    """The tables that a decorator of the script stores a function in."""
    for decorator in node.decorator_list:
        func = decorator.func if isinstance(decorator, ast.Call) else decorator
        for definition in functions.get(called_name(func), ()):
            for part in ast.walk(definition):
                if isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store):
                    yield called_name(part.value)
