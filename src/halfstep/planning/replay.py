"""Replays a ledger through the allocator's model: the peak, the moment of the peak, and what was alive then.

Two steps are replayed, as the states are made by the first one's update: the first leaves the allocator as a running job
has it, and the second is the step that is reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from halfstep.planning.allocator import Allocator
from halfstep.planning.ledger import CAUSES, OPTIONAL, Entry, Ledger

__all__ = ["Peak", "replay"]


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a training step."""

    allocated: int  # what torch.cuda.max_memory_allocated() would say
    reserved: int  # and max_memory_reserved()
    moment: str  # forward, backward or step
    module: str  # the module that was running, if one was
    breakdown: dict[str, int]  # by cause; they add up to `allocated`
    modules: dict[str, int]  # activations by module, largest first
    phases: dict[str, int]  # the peak of each phase


def replay(ledger: Ledger, workspaces: int, room: int | None = None) -> Peak:
    """The peak of the second of two steps of a ledger; what is optional is taken where it fits into `room`."""
    allocator = Allocator()
    allocator.take(workspaces // 2)
    allocator.take(workspaces - workspaces // 2)
    for entry in ledger.held:
        allocator.take(entry.num_bytes or 0)
    _run(allocator, ledger.lines, {}, room)
    for entry in ledger.made:
        allocator.take(entry.num_bytes or 0)
    phases: dict[str, int] = {}
    top, where = _run(allocator, ledger.lines, phases, room)
    breakdown = dict.fromkeys(CAUSES, 0) | {"workspaces": workspaces}
    modules: dict[str, int] = {}
    alive = {e.block: e for e in ledger.lines[: where + 1] if e.num_bytes is not None}
    for entry in ledger.lines[: where + 1]:
        if entry.num_bytes is None:
            del alive[entry.block]
    for entry in (*ledger.held, *ledger.made, *alive.values()):
        breakdown[entry.cause] += entry.num_bytes or 0
        if entry.cause == "activations":
            modules[entry.module] = modules.get(entry.module, 0) + (entry.num_bytes or 0)
    breakdown["rounding"] = top - sum(breakdown.values())
    last = ledger.lines[where] if ledger.lines else Entry(0, 0)
    return Peak(
        allocated=top,
        reserved=allocator.reserved,
        moment=last.phase,
        module=last.module,
        breakdown={cause: size for cause, size in breakdown.items() if size},
        modules=dict(sorted(modules.items(), key=lambda item: -item[1])),
        phases=phases,
    )


def _run(allocator: Allocator, lines: Iterable[Entry], phases: dict[str, int], room: int | None) -> tuple[int, int]:
    """Replay one step; the most that was allocated, and after which line."""
    blocks: dict[int, Any] = {}
    top, where = allocator.allocated, 0
    for index, entry in enumerate(lines):
        phases[entry.phase] = max(phases.get(entry.phase, 0), allocator.allocated)
        if entry.num_bytes is None:
            if entry.block in blocks:
                allocator.give(blocks.pop(entry.block))
            continue
        too_large = entry.cause == OPTIONAL and room is not None and allocator.allocated + entry.num_bytes > room
        if not entry.num_bytes or too_large:
            continue
        blocks[entry.block] = allocator.take(entry.num_bytes)
        phases[entry.phase] = max(phases.get(entry.phase, 0), allocator.allocated)
        if allocator.allocated > top:
            top, where = allocator.allocated, index
    for block in blocks.values():  # what outlives the step in the trace is dropped before the next one
        allocator.give(block)
    return top, where
