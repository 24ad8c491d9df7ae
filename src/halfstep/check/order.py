"""Questions that rules ask of a trace: what came before, are gradients scaled here, is this the path without AMP.

A rule over traces says which kinds of event it judges and judges them one at a time; `TraceRule` does the rest, and
reports a place once however many traces pass through it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import ClassVar

from halfstep.check.event import Event, compatible
from halfstep.check.finding import Finding
from halfstep.check.rule import ScriptRule
from halfstep.check.script import Script
from halfstep.check.trace import Trace

__all__ = ["STEPS", "TraceRule", "between", "earlier", "exclusive", "implied", "later", "scaled_before", "without_amp"]

STEPS = ("scaler_step", "opt_step", "owned_step")
_AMP = re.compile(r"amp\b|_amp|amp_|fp16|half|mixed|scaler|precision|float16|16bit", re.IGNORECASE)
_FULL = re.compile(r"fp32|float32|['\"]no['\"]|== 32", re.IGNORECASE)


class TraceRule(ScriptRule):
    """A rule that judges events of some kinds, each with the trace it stands in."""

    kinds: ClassVar[tuple[str, ...]]

    def check(self, script: Script) -> Iterator[Finding]:
        """The findings in `script`, one per place."""
        seen: set[ast.AST] = set()
        for trace in script.traces:
            for index, event in enumerate(trace):
                if event.kind in self.kinds and event.node not in seen:
                    finding = self.judge(script, trace, index)
                    if finding is not None:
                        seen.add(event.node)
                        yield finding

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding at `trace[index]`, if there is one."""
        raise NotImplementedError


def earlier(trace: Trace, index: int, *kinds: str) -> Iterator[int]:
    """Indices of earlier events of these kinds that can happen together with `trace[index]`, nearest first."""
    for i in range(index - 1, -1, -1):
        if trace[i].kind in kinds and compatible(trace[i], trace[index]):
            yield i


def later(trace: Trace, index: int, *kinds: str) -> Iterator[int]:
    """Indices of later events of these kinds that can happen together with `trace[index]`, nearest first."""
    for i in range(index + 1, len(trace)):
        if trace[i].kind in kinds and compatible(trace[i], trace[index]):
            yield i


def between(trace: Trace, first: int, last: int, *kinds: str) -> list[Event]:
    """The events of these kinds between two others that can happen together with both."""
    a, b = trace[first], trace[last]
    return [e for e in trace[first + 1 : last] if e.kind in kinds and compatible(e, a) and compatible(e, b)]


def implied(a: Event, b: Event) -> bool:
    """Whether `a` surely happens when `b` does: every condition on `a` is also one on `b`."""
    return set(a.guards) <= set(b.guards)


def exclusive(trace: Trace, event: Event, *kinds: str) -> bool:
    """Whether an event of these kinds stands in the other branch of a condition around `event`."""
    return any(e.kind in kinds and not compatible(e, event) for e in trace)


def without_amp(event: Event) -> bool:
    """Whether the conditions around an event say that mixed precision is off there, or that something has failed."""
    return any(
        text.startswith("except@")
        or (not holds and _AMP.search(text) and not _FULL.search(text))
        or (holds and _FULL.search(text))
        for text, holds in event.guards
    )


def scaled_before(trace: Trace, index: int) -> int | None:
    """The index of the scaled backward whose gradients `trace[index]` meets; None when they may not be scaled."""
    for i in earlier(trace, index, "backward"):
        back = trace[i]
        if back.scaled != "yes":
            continue
        # A later backward without the scale, or a cleared gradient, leaves it open what is in .grad.
        if between(trace, i, index, "zero_grad", "owned_backward", "get_scale", "handed"):
            return None
        if any(e.scaled != "yes" for e in between(trace, i, index, "backward")):
            return None
        return i
    return None
