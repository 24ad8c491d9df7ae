"""A run file as plain data: where the run stands, what it reported, and what it really stores and computes in."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from halfstep.report.numerics.view import view_of

if TYPE_CHECKING:
    from halfstep.checkpoint.runlog import Run

__all__ = ["run_data"]

_MOST_EVENTS = 50  # the last of them; all are counted


def run_data(run: Run) -> dict[str, Any]:
    """The summary of a run that `halfstep watch --json` prints; numbers that are not finite are strings, as in the file."""
    view = view_of(run)
    last = {event["event"]: event for event in run.events}
    truth = last.get("truth", run.header).get("truth")
    data = {
        "run": view.run,
        "policy": view.policy,
        "command": view.command,
        "state": view.state(time.time()),
        "ended": view.ended,
        "total_steps": view.total_steps,
        "skips": view.skips,
        "resumes": len(run.resumes),
        "last_step": None if not run.records else {k: v for k, v in run.records[-1].items() if k != "kind"},
        "validation": _fields(last.get("validation")),
        "outcome": _fields(last.get("ended")) if view.ended else None,
        "event_counts": dict(Counter(event.kind for event in view.events)),
        "events": [
            {"step": e.step, "kind": e.kind, "text": e.text, "advice": e.advice} for e in view.events[-_MOST_EVENTS:]
        ],
        "truth": truth,
    }
    return {name: _finite(value) for name, value in data.items()}


def _fields(event: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if event is None else {k: v for k, v in event.items() if k not in {"kind", "event"}}


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
