"""Settings written in place: `fp16=CFG.fp16` is read as `fp16=True` where the file shows the one value it has.

People keep settings apart from the call that uses them: a constant, a class of constants, a dataclass with defaults, a
dictionary, or the options of a call collected in a dictionary and passed as `**options`. A rule that reads the arguments
of a call would have to know all of these forms. Here each call receives what it would have if the settings were written in
it, once, before any rule runs.

Only a setting that the file cannot change is replaced: one assignment, under no condition, and nothing that writes to it by
another way. Numbers stay: their names show what they count (`accumulation_steps`).
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.syntax.constants import Constants
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["write_in_place"]

# A switch that is off: whoever writes `USE_AMP = False` may turn it on, and the code behind it is not dead.
_SWITCHES = {"enabled"}
_PARTS = regex(r"save|check_?point|ckpt|snapshot|resum|restor|state", re.IGNORECASE)
_NAMED = (ast.Name, ast.Attribute, ast.Subscript, ast.NamedExpr, ast.Call)


def write_in_place(outline: Outline) -> None:
    """Replace the settings in the arguments of every call by their literals."""
    constants = Constants(outline)
    for sites in outline.calls.values():
        for call, function in sites:
            if call.keywords and any(k.arg is None for k in call.keywords) and _is_configured(outline, call, function):
                call.keywords = [part for keyword in call.keywords for part in _spread(constants, keyword, function)]
            for keyword in call.keywords:
                literal = _setting(constants, keyword.value, function) if keyword.arg is not None else None
                is_off = isinstance(literal, ast.Constant) and not literal.value
                if literal is not None and not (is_off and keyword.arg in _SWITCHES):
                    keyword.value = _written(outline, literal, keyword.value, keyword)
            for index, value in enumerate(call.args if constants.has_dtypes else ()):
                literal = _setting(constants, value, function)
                if isinstance(literal, ast.Attribute):  # a dtype, `.to(cfg.dtype)`: other arguments differ in meaning
                    call.args[index] = _written(outline, literal, value, call)


def _setting(constants: Constants, node: ast.expr, function: Function) -> ast.expr | None:
    """The literal that a variable, an attribute, an entry or a result stands for; None for anything else."""
    literal = constants.literal(node, function) if isinstance(node, _NAMED) else None
    return literal if literal is not node else None


def _spread(constants: Constants, keyword: ast.keyword, function: Function) -> Iterator[ast.keyword]:
    """A keyword argument; for `**options`, those of a dictionary of this file."""
    outline = constants.outline
    entries = constants.table(keyword.value, function) if keyword.arg is None else None
    key = key_of(keyword.value)
    added = any(k.startswith(f"{key}[") for k in outline.bindings) if key and entries is not None else False
    if not entries or added or not all(isinstance(name, str) for name in entries):
        yield keyword
        return
    for name, (value, _) in entries.items():
        part = ast.copy_location(ast.keyword(str(name), value), value)
        outline.parents[part] = outline.parents[keyword]
        yield part


def _is_configured(outline: Outline, call: ast.Call, function: Function) -> bool:
    """Whether the `**options` of a call are settings: not the parts of a checkpoint, nor what a function of this file takes apart."""
    return not _PARTS.search(key_of(call.func).rsplit(".", 1)[-1]) and outline.call_target(call, function) is None


def _written(outline: Outline, literal: ast.expr, old: ast.expr, parent: ast.AST) -> ast.expr:
    """A copy of a literal in the place of the expression that stands for it: a fix edits this place only."""
    copied = copy.deepcopy(literal)
    for part in ast.walk(copied):
        if isinstance(part, ast.expr):
            ast.copy_location(part, old)
    outline.parents[copied] = parent
    return copied
