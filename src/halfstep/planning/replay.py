"""Replays a ledger through the model of the allocator: the peak, when it occurs, and what is allocated at that moment.

Two steps are replayed, because the first update allocates the optimizer states: the first step leaves the allocator as
it is in a running job, and the second is the one that is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from halfstep.planning.allocator import Allocator
from halfstep.planning.ledger import CATEGORIES, OPTIONAL, Event, Ledger
from halfstep.planning.ranks.moments import moments

__all__ = ["Peak", "replay"]


@dataclass(frozen=True)
class Peak:
    """The peak of a training step."""

    allocated: int  # torch.cuda.max_memory_allocated()
    reserved: int  # torch.cuda.max_memory_reserved()
    moment: str  # forward, backward or step
    module: str  # the module that was running, if one was
    breakdown: dict[str, int]  # by category; the sum is `allocated`
    modules: dict[str, int]  # activations by module, largest first
    phases: dict[str, int]  # the peak of each phase
    others: tuple[dict[str, int], ...] = ()  # breakdowns of moments that may be the peak of one GPU out of several


def replay(ledger: Ledger, workspaces: int, usable_bytes: int | None = None) -> Peak:
    """The peak of the second of two steps; what is optional is allocated if it fits into `usable_bytes`."""
    allocator = Allocator()
    allocator.allocate(workspaces // 2)
    allocator.allocate(workspaces - workspaces // 2)
    for event in ledger.persistent:
        allocator.allocate(event.num_bytes or 0)
    _run(allocator, ledger.events, {}, usable_bytes)
    for event in ledger.first_update:
        allocator.allocate(event.num_bytes or 0)
    phases: dict[str, int] = {}
    top, index = _run(allocator, ledger.events, phases, usable_bytes)
    breakdown = dict.fromkeys(CATEGORIES, 0) | {"workspaces": workspaces}
    modules: dict[str, int] = {}
    alive = {e.block: e for e in ledger.events[: index + 1] if e.num_bytes is not None}
    for event in ledger.events[: index + 1]:
        if event.num_bytes is None:
            del alive[event.block]
    for event in (*ledger.persistent, *ledger.first_update, *alive.values()):
        breakdown[event.category] += event.num_bytes or 0
        if event.category == "activations":
            modules[event.module] = modules.get(event.module, 0) + (event.num_bytes or 0)
    breakdown["rounding"] = top - sum(breakdown.values())
    persistent = Counter({"workspaces": workspaces, "rounding": max(0, breakdown["rounding"])})
    for event in (*ledger.persistent, *ledger.first_update):
        persistent[event.category] += event.num_bytes or 0
    last = ledger.events[index] if ledger.events else Event(0, 0)
    return Peak(
        allocated=top,
        reserved=allocator.reserved,
        moment=last.phase,
        module=last.module,
        breakdown={category: size for category, size in breakdown.items() if size},
        modules=dict(sorted(modules.items(), key=lambda item: -item[1])),
        phases=phases,
        others=tuple(dict(persistent + Counter(sizes)) for sizes in moments(ledger.events)),
    )


def _run(
    allocator: Allocator, events: Iterable[Event], phases: dict[str, int], usable_bytes: int | None
) -> tuple[int, int]:
    """Replay one step; the most that was allocated, and the index of the event that reached it."""
    blocks: dict[int, Any] = {}
    top, top_index = allocator.allocated, 0
    for index, event in enumerate(events):
        phases[event.phase] = max(phases.get(event.phase, 0), allocator.allocated)
        if event.num_bytes is None:
            if event.block in blocks:
                allocator.free(blocks.pop(event.block))
            continue
        limited = event.category == OPTIONAL and usable_bytes is not None
        if not event.num_bytes or (limited and allocator.allocated + event.num_bytes > (usable_bytes or 0)):
            continue
        blocks[event.block] = allocator.allocate(event.num_bytes)
        phases[event.phase] = max(phases.get(event.phase, 0), allocator.allocated)
        if allocator.allocated > top:
            top, top_index = allocator.allocated, index
    for block in blocks.values():  # what outlives the step in the trace is freed before the next one
        allocator.free(block)
    return top, top_index
