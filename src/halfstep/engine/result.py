"""What one call of `engine.step()` returns; values from the device are read when they are accessed."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["StepResult"]


class StepResult:
    """The outcome of a step: `step`, `boundary`, `lr` at once; `skipped`, `grad_norm`, `scale` when read.

    On a GPU the last three are copied to the host in the background. Reading one waits until it has arrived; one
    step later it has, and reading is free. Between boundaries (while accumulating) nothing was decided: `skipped`
    is False, `grad_norm` and `scale` are None.
    """

    __slots__ = ("_values", "_wait", "boundary", "lr", "step")

    def __init__(self, step: int, boundary: bool, lr: float, wait: Callable[[], None] | None = None) -> None:
        self.step = step  # optimizer steps attempted so far, this one included
        self.boundary = boundary  # whether this call closed a window
        self.lr = lr  # the learning rate of the first group, as used
        self._wait = wait
        self._values: tuple[float, float, float] | None = None

    def fill(self, found_inf: float, norm: float, scale: float) -> None:
        """Deliver the values; called once, by the engine."""
        self._values, self._wait = (found_inf, norm, scale), None

    def _read(self) -> tuple[float, float, float] | None:
        if self._values is None and self._wait is not None:
            self._wait()
        return self._values

    @property
    def skipped(self) -> bool:
        """Whether a non-finite gradient made this step a no-op."""
        values = self._read()
        return values is not None and values[0] != 0

    @property
    def grad_norm(self) -> float | None:
        """The norm of the true gradients, before clipping; inf or NaN when the step was skipped."""
        values = self._read()
        return None if values is None else values[1]

    @property
    def scale(self) -> float | None:
        """The loss scale this step's gradients were multiplied with."""
        values = self._read()
        return None if values is None else values[2]

    def __repr__(self) -> str:
        if not self.boundary:
            return f"StepResult(step={self.step}, boundary=False, lr={self.lr:g})"
        if self._read() is None:
            return f"StepResult(step={self.step}, boundary=True, lr={self.lr:g}, not delivered)"
        norm = self.grad_norm
        shown = "None" if norm is None else f"{norm:.4g}" if math.isfinite(norm) else str(norm)
        return (
            f"StepResult(step={self.step}, boundary=True, skipped={self.skipped}, grad_norm={shown}, "
            f"scale={self.scale:g}, lr={self.lr:g})"
        )
