"""The protocol of `Engine(watch=...)`: what an object may implement to look at a run.

Every method is optional. `before_step` receives the gradients of a closed window, still multiplied by `divisor`, on the
device; `decided` receives the decision, also on the device; `after_step` runs once the update is launched, when nothing about
it is known on the host; `delivered` runs when the outcome has arrived, one step later on a GPU. None of them may wait for the
device, except to examine a skipped step.

With an attribute `replay` that is true, the Engine records what it takes to compute a step again (`engine/replay/`):
`engine.replays.take(step)` returns it, from `delivered` on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from halfstep.engine.result import StepResult
from halfstep.engine.steps import Decision
from halfstep.errors import SettingError

__all__ = ["METHODS", "EngineWatch", "check_watch", "hook_of", "watch_settings"]

METHODS = ("attach", "before_step", "decided", "after_step", "delivered", "close")


class EngineWatch(Protocol):
    """What the Engine calls on its watch, where the object has it."""

    def attach(self, engine: Any) -> None:
        """Called once, at the end of the Engine's set-up."""

    def before_step(self, gradients: Mapping[str, Tensor], divisor: Tensor) -> None:
        """Called before each update with the gradients by name, multiplied by `divisor`."""

    def decided(self, gradients: Mapping[str, Tensor], decision: Decision) -> None:
        """Called once it is decided on the device whether the update happens, before it; not with gradient release."""

    def after_step(self, result: StepResult) -> None:
        """Called after the update was launched; its outcome is not known yet."""

    def delivered(self, result: StepResult) -> None:
        """Called when the outcome of a step has arrived on the host."""

    def close(self) -> None:
        """Called by Engine.close()."""


def hook_of(watch: Any, method: str) -> Callable[..., None]:
    """A method of a watch, or one that does nothing where it has none."""
    hook = getattr(watch, method, None)
    return hook if callable(hook) else lambda *_: None


def watch_settings(watch: Any, *, shards: bool) -> dict[str, Any]:
    """Check a watch, and return what ranks must have in common: those of sharded models exchange messages, others may be on one rank."""
    check_watch(watch)
    return {"watch": getattr(watch, "sampling", type(watch).__name__)} if shards else {}


def check_watch(watch: Any) -> None:
    """Raise if an object has none of the methods, and so would never be called."""
    if watch is not None and not any(callable(getattr(watch, method, None)) for method in METHODS):
        raise SettingError(
            f"watch={type(watch).__name__} has none of the methods {', '.join(METHODS)}, so it would never be called."
        )
