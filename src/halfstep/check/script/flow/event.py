"""The events of a training loop, each with the conditions, loops and regions around it.

A trace is a list of events in the order the script executes them, with calls of functions in the same file followed. Two
events can happen in the same run if their guards do not contradict each other; the two branches of one `if`, or of two
tests of the same flag, do. So `if use_amp: scaler.scale(loss).backward()` and, later, `if not use_amp: optimizer.step()`
are known to exclude each other without running anything.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from halfstep.check.regex import regex
from halfstep.check.script.flow.guard import Guard, possible
from halfstep.check.script.objects.values import Autocast
from halfstep.check.script.syntax.outline import Function

__all__ = ["Event", "Guard", "Loop", "Region", "compatible", "is_accumulation", "is_fallback", "may_meet"]


# A named tuple rather than a dataclass: loops are hashed and compared for every pair of events.
class Loop(NamedTuple):
    """A loop: the copy of the function it is in (one per call that was followed), and its position."""

    copy: int
    line: int
    column: int


_SETTING = regex(r"(<|<=|>|>=) -?\d+\)*$|== 1$")
_SHAPE = regex(r"\.(size\(|shape\b)")
_ACCUMULATION = regex(
    r"%|accum|grad\w*_acc\b|acc_(step|iter|batch|grad)|micro|sync_grad|last_opt|update_freq|need_update|update_grad|step_now|optimi[sz]e_now|"
    r"(do|should|is|make|take|perform)_(optimi[sz]er_)?step|\b(every_n_\w+|(is_)?divisible(_by)?)\("
)


@dataclass(frozen=True, eq=False)
class Region:
    """A `with` block or decorator around events."""

    kind: str  # autocast, no_grad, scaled_loss (Apex), owned (by a framework), other
    node: ast.AST
    autocasts: tuple[Autocast, ...] = ()
    guards: tuple[Guard, ...] = ()
    num_loops: int = 0  # loops around it
    switch: str = ""  # of `set_grad_enabled(flag)`: the variable that decides whether gradients are computed


@dataclass(frozen=True, eq=False)
class Event:
    """One action that matters for precision, at one position in a trace."""

    kind: str
    node: ast.AST
    function: Function
    scaler: str = ""
    optimizer: str = ""
    subject: str = ""  # the loss, model or other variable it is about
    scaled: str = "no"  # of backward: yes, no or maybe; of cast: the format
    guards: tuple[Guard, ...] = ()
    loops: tuple[Loop, ...] = ()
    regions: tuple[Region, ...] = ()
    roots: tuple[ast.AST, ...] = ()  # the calls that led here from the trace's root
    written: Event | None = None  # the event with the names of its own function; None where they are the same

    @property
    def local(self) -> Event:
        """The event with the names that stand on its line, not those of the caller."""
        return self.written or self

    def inside(self, kind: str) -> Region | None:
        """The innermost region of a kind around this event."""
        return next((r for r in reversed(self.regions) if r.kind == kind), None)

    def autocast(self) -> Region | None:
        """The active autocast region: the innermost, unless it is disabled or set to float32, which lowers nothing."""
        region = self.inside("autocast")
        if region is None or any(a.enabled == "no" for a in region.autocasts):
            return None
        if region.autocasts and all(a.dtype == "float32" for a in region.autocasts):
            return None
        return region

    @property
    def accumulating(self) -> tuple[Guard, ...]:
        """The guards that are true only at the end of an accumulation window."""
        return tuple(g for g in self.guards if is_accumulation(g))


@lru_cache(maxsize=4096)
def is_accumulation(guard: Guard) -> bool:
    """Whether a condition looks like the end of an accumulation window, such as `(i + 1) % n == 0`."""
    # `args.accum < 1` tests a setting, and `x.size(0) == micro_batch_size` a batch, not how far the window is.
    is_other = _SETTING.search(guard.text) or _SHAPE.search(guard.text)
    return bool(_ACCUMULATION.search(guard.text)) and ("%" in guard.text or not is_other)


def compatible(a: Event, b: Event) -> bool:
    """Whether two events can happen in one pass: no condition on one contradicts a condition on the other."""
    return not a.guards or not b.guards or possible(a.guards, b.guards)


def may_meet(a: Event, b: Event) -> bool:
    """Whether two events may be about one object: two test cases have none in common."""
    cases = {(e.roots[0] if e.roots else e.function.node) for e in (a, b) if e.function.name.startswith("test_")}
    return not cases or (len(cases) == 1 and a.function is b.function)


def is_fallback(guard: Guard, event: Event) -> bool:
    """Whether a condition is the handler around the whole training loop of an event: `except ImportError: train_by_hand(...)`.

    Such a loop runs from its start to its end. A handler inside a loop runs after an exception in the middle of an iteration.
    """
    if not event.loops or not guard.text.startswith("except@"):
        return False
    node, line = event.function.node, int(guard.text.removeprefix("except@"))
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", None) or sys.maxsize
    own = [loop.line for loop in event.loops if first <= loop.line <= last]
    return bool(own) and (not first <= line <= last or line < min(own))
