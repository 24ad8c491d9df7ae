"""Optimizer objects that a script passes to DeepSpeed, as the `optimizer` block their configuration does not have.

ZeRO checks an object by its class as it checks `"type"`, so the rules about types apply to it: `optimizer_configs` returns
the configuration with that block added, and the block's place is where the script creates the object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from halfstep.check.config.arms import DefaultConfig
from halfstep.check.config.config import Config
from halfstep.check.config.literals import Literals
from halfstep.check.files.source import Source
from halfstep.check.script.syntax.names import Names, key_of
from halfstep.precision.node import Block, Entry, Scalar

__all__ = ["ObjectConfig", "optimizer_calls", "optimizer_configs"]

MAX_DEPTH = 3  # variables and functions between `initialize` and the class
MAX_CLASSES = 4
# Classes by the type that DeepSpeed would build them for.
_TYPES = {
    "deepspeed.ops.lamb.FusedLamb": "Lamb",
    "deepspeed.runtime.fp16.onebit.adam.OnebitAdam": "OneBitAdam",
    "deepspeed.runtime.fp16.onebit.OnebitAdam": "OneBitAdam",
    "deepspeed.runtime.fp16.onebit.zoadam.ZeroOneAdam": "ZeroOneAdam",
    "deepspeed.runtime.fp16.onebit.ZeroOneAdam": "ZeroOneAdam",
    "deepspeed.runtime.fp16.onebit.lamb.OnebitLamb": "OneBitLamb",
    "deepspeed.runtime.fp16.onebit.OnebitLamb": "OneBitLamb",
    "transformers.Adafactor": "Adafactor",
    "transformers.optimization.Adafactor": "Adafactor",
}


@dataclass(frozen=True, eq=False)
class ObjectConfig(Config):
    """A DeepSpeed configuration (of kind "joint") with the optimizer object of the script as its `optimizer` block."""


def optimizer_calls(initialize: ast.Call, nodes: tuple[ast.AST, ...]) -> list[ast.Call]:
    """The calls that create the object passed as `deepspeed.initialize(optimizer=...)`, one for each way; none if one is not a call."""
    value = next((k.value for k in initialize.keywords if k.arg == "optimizer"), None)
    if value is None and len(initialize.args) > 2 and not any(isinstance(a, ast.Starred) for a in initialize.args):
        value = initialize.args[2]
    made = list(_created(value, nodes, MAX_DEPTH)) if value is not None else []
    return [call for call in made if call is not None] if None not in made else []


def _created(value: ast.expr, nodes: tuple[ast.AST, ...], depth: int) -> Iterator[ast.Call | None]:
    """The calls of classes by which an expression creates an optimizer, through variables and functions of the script; None for others."""
    if isinstance(value, ast.IfExp):
        yield from (call for arm in (value.body, value.orelse) for call in _created(arm, nodes, depth))
    elif isinstance(value, ast.Call):
        name = value.func.id if isinstance(value.func, ast.Name) else ""
        builders = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == name]
        returned = [n.value for n in ast.walk(builders[0]) if isinstance(n, ast.Return)] if len(builders) == 1 else []
        classes = _assigned(value.func, nodes) if name and not builders else []
        arms = [arm for c in classes for arm in ((c.body, c.orelse) if isinstance(c, ast.IfExp) else (c,))]
        if arms:  # `cls = SGD if args.sgd else AdamW`
            yield from (ast.copy_location(ast.Call(arm, value.args, value.keywords), value) for arm in arms)
        elif returned and depth:
            for part in returned:
                yield from _created(part, nodes, depth - 1) if part is not None else (None,)
        else:
            yield value
    elif key_of(value) and depth:
        options = _assigned(value, nodes)
        for option in options:
            yield from _created(option, nodes, depth - 1)
        yield from () if options else (None,)
    else:
        yield None


def _assigned(variable: ast.expr, nodes: tuple[ast.AST, ...]) -> list[ast.expr]:
    """What the script assigns to a variable: in the function around its use, if it does there.

    `engine, optimizer, _, _ = initialize(optimizer=optimizer)` binds a tuple, not the object that is passed.
    """
    key = key_of(variable)
    assigns = [n for n in nodes if isinstance(n, ast.Assign) and any(key_of(t) == key for t in n.targets)]
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef)] if len(assigns) > 1 else []
    around = [f for f in functions if f.lineno <= variable.lineno <= (f.end_lineno or 0)]
    last = around[-1] if around else None
    inside = [a for a in assigns if last is not None and last.lineno <= a.lineno <= (last.end_lineno or 0)]
    return [a.value for a in inside or assigns]


def optimizer_configs(
    config: Config, initialize: ast.Call, nodes: tuple[ast.AST, ...], names: Names, literals: Literals, source: Source
) -> Iterator[ObjectConfig]:
    """The configuration with the optimizer object as its block, for each class that the script may pass.

    Where options choose the class and the values of the configuration, what meets in one run is not known.
    """
    calls = optimizer_calls(initialize, nodes) if config.entry("optimizer") is None else []
    is_chosen = len(calls) > 1 and isinstance(config, DefaultConfig)
    for call in () if is_chosen else calls[:MAX_CLASSES]:
        full = names.full(call.func)
        is_torch = full.startswith("torch.optim.") and full.count(".") == 2
        kind = _TYPES.get(full, full.rpartition(".")[2] if is_torch else "")
        if kind:
            span = literals.span(call)
            block = Block(span, (Entry("type", span, Scalar(span, kind)),))
            root = replace(config.root, entries=(*config.root.entries, Entry("optimizer", span, block)))
            yield ObjectConfig("joint", root, source, config.settings, config.origin, config.strict, config.script)
