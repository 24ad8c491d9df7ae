"""Functions, and the assignments and calls in them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Binding", "CallSite", "Choice", "Function", "StatementCall", "default_of", "is_configured"]

Def = ast.FunctionDef | ast.AsyncFunctionDef
# Decorators that pass what a configuration or the command line sets: of gin, Sacred, click, Typer and argbind.
_CONFIGURES = frozenset({"configurable", "capture", "automain", "main", "command", "option", "argument", "bind"})


@dataclass(frozen=True, eq=False)
class Function:
    """A function, method or the module itself."""

    node: Def | ast.Module
    name: str
    cls: str = ""
    parent: Function | None = None
    params: tuple[str, ...] = ()
    method: bool = False  # directly in a class; functions nested in a method have its `cls` but are not methods

    @property
    def body(self) -> list[ast.stmt]:
        """Its statements."""
        return self.node.body


@dataclass(eq=False, slots=True)  # not frozen, which makes creation four times as slow: one per assignment of a script
class Binding:
    """One assignment to a variable."""

    key: str
    value: ast.expr | None  # None: a loop or with target, or an import
    function: Function
    node: ast.AST
    index: int | None = None  # position, if a tuple is unpacked


# Named tuples rather than dataclasses: one per call of a script, and rules unpack them.
class CallSite(NamedTuple):
    """A call and the function that contains it."""

    call: ast.Call
    function: Function


class Choice(NamedTuple):
    """A branch of `a if test else b`: the test, and its outcome."""

    test: ast.expr
    is_true: bool


class StatementCall(NamedTuple):
    """A call of a statement, under the branches of conditional expressions around it."""

    call: ast.Call
    choices: tuple[Choice, ...]


def default_of(function: Function, name: str) -> ast.expr | None:
    """The default of a parameter."""
    if isinstance(function.node, ast.Module):
        return None
    a = function.node.args
    plain = [*a.posonlyargs, *a.args]
    defaults = dict(zip((p.arg for p in plain[len(plain) - len(a.defaults) :]), a.defaults, strict=True))
    defaults |= {p.arg: d for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None}
    return defaults.get(name)


def is_configured(function: Function) -> bool:
    """Whether a decorator may set the parameters that a call leaves out: `@gin.configurable`, `@click.option(...)`."""
    decorators = getattr(function.node, "decorator_list", ())
    funcs = [d.func if isinstance(d, ast.Call) else d for d in decorators]
    return any((f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "")) in _CONFIGURES for f in funcs)
