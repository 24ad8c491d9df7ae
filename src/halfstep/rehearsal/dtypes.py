"""Which results of a recorded step would be 16-bit, for a set of modules that are kept in fp32.

The step was computed in fp32, but its operations are known with their inputs, so the dtypes under autocast follow in one pass
over them. A module that is kept in fp32 casts its inputs up and computes with autocast off (`engine/casting.py`): everything inside is fp32, and
so is what it returns. The next operation promotes: a residual stream is fp32 from the first fp32 summand on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from halfstep.rehearsal.observer import Operation
from halfstep.rehearsal.rules import FIRST, FP32, LOWER, VIEW

__all__ = ["is_inside", "origin", "patterns_for", "sixteen_bit"]


def is_inside(module: str, in_fp32: Collection[str]) -> bool:
    """Whether a module is one of these or is inside one."""
    parts = module.split(".")
    return any(".".join(parts[:i]) in in_fp32 for i in range(1, len(parts) + 1))


def sixteen_bit(operations: Mapping[str, Operation], in_fp32: Collection[str]) -> set[str]:
    """The operations whose result is 16-bit."""
    narrow: set[str] = set()
    for name, op in operations.items():  # in the order of the step: inputs first
        if is_inside(op.module, in_fp32) or op.rule == FP32:
            continue
        if op.rule == LOWER:
            narrow.add(name)
        elif op.rule in (FIRST, VIEW):
            if op.inputs and op.inputs[0] in narrow:
                narrow.add(name)
        elif op.inputs and all(source in narrow for source in op.inputs):
            narrow.add(name)
    return narrow


def origin(operations: Mapping[str, Operation], name: str) -> str:
    """The operation that computed the elements of a result, which may be a view of it; "" for a tensor from outside."""
    while name and operations[name].rule == VIEW:
        name = operations[name].inputs[0] if operations[name].inputs else ""
    return name


def patterns_for(in_fp32: Collection[str], modules: Collection[str]) -> tuple[str, ...]:
    """Patterns of `keep_fp32` that cover these modules and no other one; blocks of a stack share a pattern."""
    in_fp32 = {name for name in in_fp32 if not is_inside(name.rpartition(".")[0], in_fp32)}  # the outermost
    wanted = {name for name in modules if is_inside(name, in_fp32)}
    patterns = []
    remaining = sorted(in_fp32)
    while remaining:
        name = remaining.pop(0)
        best, covered = name, {name}
        parts = name.split(".")
        for i, part in enumerate(parts):
            if not part.isdecimal():
                continue
            pattern = ".".join([*parts[:i], "*", *parts[i + 1 :]])
            matched = {m for m in modules if _covers(pattern, m)}
            group = {k for k in in_fp32 if _covers(pattern, k)}
            if matched <= wanted and len(group) > len(covered):
                best, covered = pattern, group
        patterns.append(best)
        remaining = [other for other in remaining if other not in covered]
    return tuple(sorted(patterns))


def _covers(pattern: str, module: str) -> bool:
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[:i]), pattern) for i in range(1, len(parts) + 1))
