"""Optimizer objects that a script passes to DeepSpeed, as the `optimizer` block their configuration does not have.

ZeRO checks an object by its class as it checks `"type"`, so the rules about types apply to it: `optimizer_config` returns
the configuration with that block added, and the block's place is where the script creates the object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from halfstep.check.config.config import Config
from halfstep.check.config.literals import Literals
from halfstep.check.files.source import Source
from halfstep.check.script.syntax.names import Names, key_of
from halfstep.precision.node import Block, Entry, Scalar

__all__ = ["ObjectConfig", "optimizer_calls", "optimizer_config"]

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


def optimizer_calls(initialize: ast.Call, nodes: tuple[ast.AST, ...]) -> Iterator[ast.Call]:
    """The calls that create the object passed as `deepspeed.initialize(optimizer=...)`; none if one is not a call."""
    value = next((k.value for k in initialize.keywords if k.arg == "optimizer"), None)
    name = key_of(value)
    values = [n.value for n in nodes if isinstance(n, ast.Assign) and any(key_of(t) == name for t in n.targets)]
    # `engine, optimizer, _, _ = initialize(optimizer=optimizer)` binds a tuple, not the object that is passed.
    values = values if name else [value] if value is not None else []
    if all(isinstance(v, ast.Call) for v in values):
        yield from (v for v in values if isinstance(v, ast.Call))


def optimizer_config(
    config: Config, initialize: ast.Call, nodes: tuple[ast.AST, ...], names: Names, literals: Literals, source: Source
) -> ObjectConfig | None:
    """The configuration with the optimizer object as its block; None if the script passes none of a known class."""
    calls = list(optimizer_calls(initialize, nodes))
    full = names.full(calls[0].func) if len(calls) == 1 else ""
    is_torch = full.startswith("torch.optim.") and full.count(".") == 2
    kind = _TYPES.get(full, full.rpartition(".")[2] if is_torch else "")
    if not kind or config.entry("optimizer") is not None:
        return None
    span = literals.span(calls[0])
    block = Block(span, (Entry("type", span, Scalar(span, kind)),))
    root = replace(config.root, entries=(*config.root.entries, Entry("optimizer", span, block)))
    return ObjectConfig("joint", root, source, config.settings, config.origin, config.strict, config.script)
