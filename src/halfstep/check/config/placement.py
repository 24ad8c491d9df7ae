"""What a script does with a dictionary: which call gets it as a DeepSpeed configuration, and by which names it goes.

A configuration is rarely written inside the call that reads it. It is in a variable, or a function returns it
(`config=get_ds_config(args)`), or another file imports that function and only the names show what it is for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from halfstep.check.config.literals import Literals
from halfstep.check.regex import regex
from halfstep.check.script.syntax.names import Names, chain

__all__ = ["is_for_deepspeed", "uses_of_dictionaries"]

_VARIABLE = regex(r"ds|deepspeed", re.IGNORECASE)
_WORD = regex(r"(?:^|_|\b)ds(?:_|\b|$)|deepspeed", re.IGNORECASE)
_MAX_DEPTH = 4
_COPIES = frozenset({"deepcopy", "copy", "dict"})
# call -> its arguments that accept a DeepSpeed configuration; the first may be passed by position where it is the first
_TAKES_DEEPSPEED = {
    "deepspeed.initialize": ("config", "config_params"),
    "TrainingArguments": ("deepspeed",),
    "DeepSpeedStrategy": ("config",),
    "DeepSpeedPlugin": ("hf_ds_config", "config_file"),
    "HfDeepSpeedConfig": ("config_file_or_dict",),
    "HfTrainerDeepSpeedConfig": ("config_file_or_dict",),
}
_FIRST = frozenset({"HfDeepSpeedConfig", "HfTrainerDeepSpeedConfig", "DeepSpeedPlugin"})


def uses_of_dictionaries(
    calls: Sequence[ast.Call],
    nodes: Sequence[ast.AST],
    names: Names,
    literals: Literals,
    is_trainer_class: Callable[[ast.AST], bool],
) -> tuple[dict[str, str], dict[int, str]]:
    """Which variables (by name) and dictionaries (by id) are passed to DeepSpeed, and the call that does it."""
    variables: dict[str, str] = {}
    direct: dict[int, str] = {}
    definitions: _Definitions | None = None
    for call in calls:
        full = names.full(call.func)
        short = "TrainingArguments" if is_trainer_class(call.func) else full.rpartition(".")[2]
        arguments = _TAKES_DEEPSPEED.get(full, _TAKES_DEEPSPEED.get(short, ()))
        values = [k.value for k in call.keywords if k.arg in arguments]
        values += call.args[:1] if short in _FIRST else []
        for value in values:
            definitions = definitions or _read_definitions(nodes, literals)
            variables[".".join(chain(value))] = full or short
            direct |= {id(node): full or short for node in _sources(value, definitions, _MAX_DEPTH)}
    variables.pop("", None)
    return variables, direct


@dataclass(frozen=True, slots=True)
class _Definitions:
    """What the names of a script are bound to, collected once for all calls."""

    literals: Literals
    functions: dict[str, list[ast.FunctionDef]]
    values: dict[str, list[ast.expr]]


def _read_definitions(nodes: Sequence[ast.AST], literals: Literals) -> _Definitions:
    definitions = _Definitions(literals, {}, {})
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            definitions.functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign):
            for name in {".".join(chain(target)) for target in node.targets}:
                definitions.values.setdefault(name, []).append(node.value)
    return definitions


def _sources(value: ast.expr, definitions: _Definitions, depth: int) -> Iterator[ast.expr]:
    """The dictionaries that an argument may be: copies, and what a function of the script returns."""
    yield value
    if depth == 0:
        return
    if isinstance(value, ast.Call):
        last = "".join(chain(value.func)[-1:])
        if last in _COPIES:
            copied = value.args[:1] or ([value.func.value] if isinstance(value.func, ast.Attribute) else [])
            for source in copied:
                yield from _sources(source, definitions, depth - 1)
        functions = definitions.functions.get(last, [])
        for function in functions if len(functions) == 1 else ():
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and node.value is not None:
                    yield from _returned(node.value, function, definitions.literals)
    elif isinstance(value, (ast.IfExp, ast.BoolOp)):
        for arm in (value.body, value.orelse) if isinstance(value, ast.IfExp) else value.values:
            yield from _sources(arm, definitions, depth - 1)
    elif name := ".".join(chain(value)):
        for bound in definitions.values.get(name, ()):
            if definitions.literals.is_block(bound):
                yield bound
            elif isinstance(bound, (ast.Call, ast.Name, ast.Attribute)):
                yield from _sources(bound, definitions, depth - 1)


def _returned(value: ast.expr, function: ast.FunctionDef, literals: Literals) -> Iterator[ast.expr]:
    """The dictionary that a function returns, itself or by a local variable."""
    yield value
    blocks = literals.all_blocks.get(".".join(chain(value)), ())
    yield from (block for block in blocks if function.lineno <= block.lineno <= (function.end_lineno or 0))


def is_for_deepspeed(node: ast.AST, variable: str, nodes: Sequence[ast.AST], path: str) -> bool:
    """Whether the names around a dictionary show that DeepSpeed reads it as it is."""
    return _VARIABLE.search(variable) is not None or any(_WORD.search(name) for name in _names(node, nodes, path))


def _names(node: ast.AST, nodes: Sequence[ast.AST], path: str) -> Iterator[str]:
    """The names of the file, of the function around a dictionary, and of the argument or key that it is passed for."""
    line = getattr(node, "lineno", 1)
    scopes = [n for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    around = [n for n in scopes if n.lineno <= line <= (n.end_lineno or 0)]
    if around:
        yield around[-1].name  # outer ones come first
    yield from (n.name for n in around if isinstance(n, ast.ClassDef) and n.name.endswith("Config"))
    yield PurePath(path).stem
    for parent in nodes:
        if isinstance(parent, ast.keyword) and parent.value is node:
            yield parent.arg or ""
        elif isinstance(parent, ast.Dict):
            pairs = zip(parent.keys, parent.values, strict=True)
            yield from (str(key.value) for key, value in pairs if value is node and isinstance(key, ast.Constant))
