"""Optimizers that never step: nothing in their file runs backward or a step, and no other file gets them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from halfstep.check.regex import regex
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function, Outline, last_name_of

__all__ = ["never_steps", "trains_nothing"]

_STEPS = regex(r"step|backward|minimize", re.IGNORECASE)
_ONLY_READS = regex(r"schedul|warmup|LR$|^(print|len|id|isinstance|type|repr|str)$", re.IGNORECASE)
_PLAIN_BASES = {"", "object", "ABC", "Generic", "nn.Module", "torch.nn.Module", "Module"}


def never_steps(outline: Outline, by: ast.Call) -> bool:
    """Whether the optimizer that a call creates is only read."""
    if any(map(_STEPS.search, outline.calls)) or outline.loads.keys() & {"step", "backward"}:
        return False
    statement = outline.parents.get(by)
    site = next((s for s in outline.calls.get(last_name_of(by.func), ()) if s.call is by), None)
    if not isinstance(statement, ast.Assign) or site is None:
        return False
    keys = [key_of(target) for target in statement.targets]
    is_own = not site.function.cls or _is_plain(outline, site.function.cls)
    return is_own and "" not in keys and not _leaves(outline, set(map(last_name, keys)), site.function)


def trains_nothing(outline: Outline, optimizers: Sequence[tuple[ast.Call, Function]]) -> bool:
    """Whether no optimizer that this file uses ever steps; those of functions that only other files call are theirs."""
    if any(full.endswith("Trainer") for full in outline.names.table.values()):
        return False
    own = [(call, f) for call, f in optimizers if f is outline.module or f.name in outline.calls]
    return bool(own) and all(never_steps(outline, call) for call, _ in own)


def _leaves(outline: Outline, names: set[str], creator: Function) -> bool:
    """Whether an optimizer of these names is passed to another file, returned, or stored where others can read it."""
    for function in (outline.module, *outline.functions):
        for node in _own_nodes(function):
            name = last_name(key_of(node)) if isinstance(getattr(node, "ctx", None), ast.Load) else ""
            if name not in names or (
                # A function that assigns the name has a variable of its own.
                isinstance(node, ast.Name)
                and function is not creator
                and outline.by_function(name).get(function.node)
                and name not in function.params
            ):
                continue
            part, parent = node, outline.parents.get(node)
            if isinstance(parent, ast.keyword):
                part, parent = parent, outline.parents.get(parent)
            if isinstance(parent, ast.Call) and part is not parent.func:
                if not _stays(outline, parent, name, function):
                    return True
            elif isinstance(parent, ast.Assign):
                keys = [key_of(target) for target in parent.targets]
                if {last_name(key) for key in keys} - names or (function.cls and not _is_plain(outline, function.cls)):
                    return True
            elif not isinstance(parent, ast.Attribute | ast.Compare | ast.BoolOp | ast.If | ast.UnaryOp):
                return True
    return False


def _stays(outline: Outline, call: ast.Call, name: str, function: Function) -> bool:
    """Whether a call only reads an optimizer, returns it to its own variable, or runs code of this file under the same name."""
    statement = outline.parents.get(call)
    if isinstance(statement, ast.Assign):
        targets = [p for t in statement.targets for p in (t.elts if isinstance(t, ast.Tuple) else [t])]
        if name in {last_name(key_of(target)) for target in targets}:
            return True
    target = outline.call_target(call, function)
    if target is None:
        return bool(_ONLY_READS.search(last_name_of(call.func)))
    return name in target.params and (not target.cls or _is_plain(outline, target.cls))


def _is_plain(outline: Outline, cls: str) -> bool:
    """Whether a class has no base class that could step what it stores, and objects in this file."""
    return cls in outline.calls and {key_of(base) for base in outline.bases.get(cls, ())} <= _PLAIN_BASES


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function without those of the functions in it."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            pending += ast.iter_child_nodes(node)
