"""The functions that run inside autocast regions because of their callers.

Asked for one function at a time, this takes time that grows with the fourth power of the methods of one name: each of a hundred
`forward`s may be called by each of the others. So the calls of a script are read once, and followed from the regions outwards.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable

from halfstep.check.script.objects.formats import SIXTEEN_BIT
from halfstep.check.script.objects.values import UNKNOWN, Autocast, autocasts_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["formats_of", "functions_in_autocast", "regions_around"]

_MAX_CALLS = 3  # between a region and a function: what is further away is rarely meant


def functions_in_autocast(outline: Outline, classes: Collection[str]) -> frozenset[Function]:
    """The functions that some caller in the file calls inside a region, where losses are computed in float32.

    `classes` are those whose `forward` runs under autocast.
    """
    named: dict[str, list[Function]] = {}
    for function in outline.functions:
        # Whether `forward` runs in a region is a fact about its class: `self.model(x)` does not name it.
        if not (function.name == "forward" and function.method):
            named.setdefault(function.name, []).append(function)
    callees: dict[
        Function, list[Function | str]
    ] = {}  # a name stands for the methods of that name, of an unknown object
    level: list[Function | str] = []
    for name in named:
        for call, caller in outline.calls.get(name, ()):
            target: Function | str | None = outline.call_target(call, caller)
            if target is None and isinstance(call.func, ast.Attribute):
                target = name
            if target is not None:
                callees.setdefault(caller, []).append(target)
                if formats_of(regions_around(outline, call, caller)):
                    level.append(target)
    forwards = [c.get("forward") for name, c in outline.classes.items() if name in classes]
    level += [f for f in forwards if f is not None]
    reached: set[Function | str] = set()
    inside: set[Function] = set()
    for _ in range(_MAX_CALLS + 1):
        new = [target for target in dict.fromkeys(level) if target not in reached]
        reached.update(new)
        functions = dict.fromkeys(function for target in new for function in _meant(target, named))
        level = [target for function in functions if function not in inside for target in callees.get(function, ())]
        inside.update(functions)
    return frozenset(inside)


def _meant(target: Function | str, named: dict[str, list[Function]]) -> Iterable[Function]:
    return [f for f in named[target] if f.method] if isinstance(target, str) else [target]


def regions_around(outline: Outline, node: ast.AST, function: Function) -> list[Autocast]:
    """The innermost autocast region around a node; several if a variable chooses one."""
    for parent in outline.above(node):
        contexts: list[ast.expr] = []
        if isinstance(parent, ast.With):
            contexts = [item.context_expr for item in parent.items]
        elif isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            contexts = parent.decorator_list
        regions = [a for context in contexts for a in autocasts_of(outline, context, function)]
        if regions:
            return regions
    return []


def formats_of(regions: Iterable[Autocast]) -> frozenset[str]:
    """The formats of a region that may compute in 16 bits; none if it is disabled or the text does not decide it."""
    regions = tuple(regions)
    dtypes: frozenset[str] = frozenset().union(*(a.dtypes for a in regions))
    enabled = all(a.enabled != "no" for a in regions)
    return dtypes if enabled and dtypes & SIXTEEN_BIT and UNKNOWN not in dtypes else frozenset()
