"""A window: the micro-batches between two updates, and what their gradients must be divided by.

Gradients add up over a window, so the update divides by the window's weight: the number of micro-batches, or the sum
of their weights (tokens, say), over the micro-batches that really occurred. Weights enter the loss as multiples
of a reference, a power of two at or above the largest weight that has opened a window so far: dividing by it is exact,
and the scaled loss stays at or below the loss scale instead of being thousands of times larger.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import SettingError

__all__ = ["Window"]


class Window:
    """The state between two updates."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.largest: float | Tensor = 2.0**-126  # weight that opened a window so far, as a power of two
        self.open()

    def open(self) -> None:
        """Start a new window."""
        self.num_micro_batches = 0  # ended by step()
        self.has_gradients = False
        self.weight: float | Tensor = 0.0  # in units of the reference
        self.found_inf: Tensor | None = None  # set once the gradients have been unscaled
        self._reference: float | Tensor | None = None
        self._weighed = False  # whether the current micro-batch is in `weight`
        self._current: float | Tensor = 1.0  # its own weight
        self._factor: float | Tensor = 1.0  # of its losses

    def weigh(self, weight: Any) -> float | Tensor:
        """Add a micro-batch and return the factor for its loss; a second loss of the same one has the same factor."""
        checked = _checked(weight)
        if self._weighed:
            both_known = isinstance(checked, float) and isinstance(self._current, float)
            if weight is not None and both_known and checked != self._current:
                raise SettingError(
                    f"backward(weight={weight!r}) for another loss of a micro-batch whose weight is {self._current:g}; a micro-batch has one "
                    "weight. Omit it there; to weigh the losses against each other, multiply them."
                )
            return self._factor
        if self._reference is None:
            self._reference = self.largest = _power_of_two_above(checked, self.largest)
        self._current, self._factor = checked, checked / self._reference
        self.weight, self._weighed = self.weight + self._factor, True
        return self._factor

    def is_last(self) -> bool:
        """Whether the micro-batch in progress fills the window."""
        return self.num_micro_batches + 1 >= self.accumulate

    def end_micro_batch(self) -> bool:
        """Close the micro-batch in progress, if there is one; whether there was."""
        ended, self._weighed = self._weighed, False
        self.num_micro_batches += ended
        return ended

    def is_full(self) -> bool:
        """Whether the update is due."""
        return self.num_micro_batches >= self.accumulate


def _checked(weight: Any) -> float | Tensor:
    """A weight as a number or a 0-dim fp32 tensor; 1 for None."""
    if weight is None:
        return 1.0
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise SettingError(f"weight takes one number, not a tensor of shape {tuple(weight.shape)}; sum it first.")
        return weight.detach().to(torch.float32).reshape(())
    if not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise SettingError(f"weight={weight!r} must be a finite number of 0 or more, such as a count of tokens.")
    return float(weight)


def _power_of_two_above(weight: float | Tensor, largest: float | Tensor) -> float | Tensor:
    """The power of two at or above both."""
    if isinstance(weight, Tensor) or isinstance(largest, Tensor):
        device = weight.device if isinstance(weight, Tensor) else largest.device  # type: ignore[union-attr]
        # torch.full and not torch.tensor: a copy from the host would wait for the device.
        both = [v if isinstance(v, Tensor) else torch.full((), v, device=device) for v in (weight, largest)]
        return torch.exp2(torch.stack(both).amax().clamp(min=2.0**-126).log2().ceil())
    return 2.0 ** math.ceil(math.log2(max(weight, largest)))
