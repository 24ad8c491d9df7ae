"""Precision flags that a class stores in an attribute, while its training takes the same flag as a parameter."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from halfstep.check.script.objects.outputs import in_no_grad
from halfstep.check.script.objects.values import Autocast, Scaler, constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.outline import Function

__all__ = ["shadowed_flags"]


def shadowed_flags(
    script: Script, flags: re.Pattern[str], read: Collection[str]
) -> Iterator[tuple[ast.arg, Function, Function]]:
    """Parameters that a method only stores, with the method and the one whose own parameter switches mixed precision instead.

    The attribute has other values only as a default, nothing in the file reads it, and the class extends nothing but a module of torch,
    which has no such attribute.
    """
    regions = [a for a in script.autocasts if not in_no_grad(script, a.node)]
    switches: list[Autocast | Scaler] = [*regions, *script.scalers]
    outline = script.outline
    for key, bindings in outline.bindings.items() if switches else ():
        name = key.removeprefix("self.")
        stored = [b for b in bindings if constant(b.value) is ...] if name != key and flags.fullmatch(name) else []
        if len(stored) != 1 or name in read:
            continue
        function = stored[0].function
        bases = [b for b in outline.bases.get(function.cls, ()) if outline.names.full(b) != "torch.nn.Module"]
        if any(getattr(base, "id", "") != "object" for base in bases):
            continue
        own = [s for s in switches if s.function.cls == function.cls]
        taken = [s.function for s in own if s.enabled == name and name in s.function.params]
        parameter = _only_stored(function, stored[0].value, name)
        if parameter is not None and taken and len(taken) == len(own) and function not in taken:
            yield parameter, function, taken[0]


def _only_stored(function: Function, value: ast.expr | None, name: str) -> ast.arg | None:
    """The parameter that a value is, if the function has no other use of it."""
    node = function.node
    if isinstance(node, ast.Module) or not isinstance(value, ast.Name) or value.id != name:
        return None
    uses = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]
    arguments = (*node.args.args, *node.args.kwonlyargs)
    return next((a for a in arguments if a.arg == name), None) if len(uses) == 1 else None
