"""Which code of a function only evaluates: branches whose function trains in another branch, if it trains at all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function

__all__ = ["only_evaluates"]

_TRAINS = regex(
    r"(?<!pre)train(?!ed|ing_data)|(^|[._])(fit|learn|sft|dpo|grpo|backward)($|[._(])|fine_?tun|get_peft|kbit",
    re.IGNORECASE,
)
_EVALUATES = regex(r"generat|evaluat|infer|predict|chat|(^|[._])(eval|test|merge_and_unload|decode)", re.IGNORECASE)


def only_evaluates(script: Script, node: ast.AST, function: Function) -> bool:
    """Whether the function of a node evaluates where it runs the node, and neither trains there nor returns a model."""
    if isinstance(function.node, ast.Module):
        return False
    above = {node, *script.above(node)}
    names: list[str] = []
    for part in _with(function.node, above):
        if isinstance(part, ast.Return | ast.Yield) and part.value is not None:
            return False
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and key_of(part).startswith("self."):
            return False  # `self.model = ...`, which another method may train
        if isinstance(part, ast.Call):
            names.append(key_of(part.func) or last_name(ast.unparse(part.func)))
    trains = any(map(_TRAINS.search, names)) or any(_trains(script, last_name(name)) for name in names)
    return not trains and any(map(_EVALUATES.search, names))


def _with(function: ast.AST, above: set[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a function that may run in one pass with some of them: not the other arms of the conditions around these."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, ast.If) and part in above:
            arms = [arm for arm in (part.body, part.orelse) if not above.isdisjoint(arm)]
            waiting += [part.test, *(arms[0] if arms else [])]
        else:
            waiting += ast.iter_child_nodes(part)


def _trains(script: Script, name: str) -> bool:
    """Whether a function of the file calls something that is named for training."""
    functions = [f for f in script.outline.functions if f.name == name]
    calls = (n for f in functions for n in ast.walk(f.node) if isinstance(n, ast.Call))
    return any(_TRAINS.search(key_of(call.func)) for call in calls)
