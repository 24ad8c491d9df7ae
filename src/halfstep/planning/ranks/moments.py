"""The moments of a step at which a GPU out of several could need the most memory.

The peak of one GPU with a large model is where all gradients are allocated and the activations are gone. On many GPUs the
gradients are sharded, and the peak moves to the start of the backward pass. With g bytes of gradients and o bytes of everything
else that a step allocates, a strategy needs o + a g, and only its factor a is different: for any a >= 0 the largest sum is at a
corner of the upper right convex hull of all pairs (g, o).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from halfstep.planning.ledger import OPTIONAL, Event

__all__ = ["moments"]

_Point = tuple[int, int, int]  # bytes of gradients, of everything else, and the index of the event


def moments(events: Sequence[Event]) -> tuple[dict[str, int], ...]:
    """What these events have allocated, by category, at each of these moments; what is optional is left out."""
    corners = {index for _, _, index in _hull(_points(events))}
    sizes: Counter[str] = Counter()
    alive: dict[int, Event] = {}
    allocated = []
    for index, event in enumerate(events):
        _follow(event, alive, sizes)
        if index in corners:
            allocated.append({category: size for category, size in sizes.items() if size})
    return tuple(allocated)


def _points(events: Sequence[Event]) -> list[_Point]:
    sizes: Counter[str] = Counter()
    alive: dict[int, Event] = {}
    points, total = [], 0
    for index, event in enumerate(events):
        total += _follow(event, alive, sizes)
        points.append((sizes["gradients"], total - sizes["gradients"], index))
    return points


def _follow(event: Event, alive: dict[int, Event], sizes: Counter[str]) -> int:
    """Add an event to the sizes; returns the bytes that it allocates, below 0 if it frees."""
    if event.num_bytes is not None:
        if event.category == OPTIONAL:
            return 0
        alive[event.block], change = event, event.num_bytes
        sizes[event.category] += change
        return change
    started = alive.pop(event.block, None)
    if started is None:
        return 0
    change = started.num_bytes or 0
    sizes[started.category] -= change
    return -change


def _hull(points: list[_Point]) -> list[_Point]:
    """The corners from the most of everything else to the most gradients."""
    hull: list[_Point] = []
    for point in sorted(points, key=lambda p: (p[0], p[1])):
        while hull and (hull[-1][1] <= point[1] or (len(hull) > 1 and _is_inside(hull[-2], hull[-1], point))):
            hull.pop()
        hull.append(point)
    return hull


def _is_inside(left: _Point, middle: _Point, right: _Point) -> bool:
    """Whether the middle point is on or below the line from the left to the right one."""
    run, rise = right[0] - left[0], right[1] - left[1]
    return (middle[1] - left[1]) * run <= rise * (middle[0] - left[0])
