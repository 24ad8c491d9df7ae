"""Global variables that the command line or a file may replace: the settings of nanoGPT and of the scripts after it.

dtype = "bfloat16"                                     exec(open("configurator.py").read())
for arg in sys.argv[1:]: globals()[key] = value        globals().update(yaml.safe_load(file))
"""

from __future__ import annotations

import ast

from halfstep.check.script.syntax.outline import Outline

__all__ = ["ANYWHERE", "replaceable"]

ANYWHERE = 0  # in place of the line of a function that has a parameter


def replaceable(outline: Outline) -> frozenset[tuple[int, str]]:
    """The global variables of a file with such a configurator, other than those with the name of a local variable or a parameter."""
    if not _has_configurator(outline):
        return frozenset()
    params = {param for function in outline.functions for param in function.params}
    names = {
        name
        for name, bindings in outline.bindings.items()
        if name.isidentifier() and name not in params and all(b.function is outline.module for b in bindings)
    }
    return frozenset((ANYWHERE, name) for name in names)


def _has_configurator(outline: Outline) -> bool:
    executes = [c for c, f in outline.calls.get("exec", ()) if isinstance(c.func, ast.Name) and f is outline.module]
    return bool(executes) or any(_writes(outline, call) for call, _ in outline.calls.get("globals", ()))


def _writes(outline: Outline, call: ast.Call) -> bool:
    """Whether `globals()` is changed: `globals()[key] = value`, `globals().update(...)`."""
    parent = outline.parents.get(call)
    is_entry = isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store)
    return is_entry or (isinstance(parent, ast.Attribute) and parent.attr == "update")
