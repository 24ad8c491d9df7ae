"""A window: the micro-batches between two updates, and what their gradients must be divided by.

Gradients add up over a window, so the update divides by the window's weight: the number of micro-batches, or the sum
of their weights (tokens, say), over the micro-batches that really occurred. Weights enter the loss as multiples of a
reference, a power of two at or above every weight of the window so far: dividing by it is exact, and the scaled loss
never exceeds the loss scale.

    first weight above 0    reference = the last window's, if that is at or above the weight and at most 16 times as large
    a larger weight         the reference grows, and the gradients accumulated so far are multiplied by old / new
    weight 0                the loss is multiplied by 0, and the reference stays

Starting from the last window's reference makes growth rare, and the bound forgets a weight that was far above all others.
Weights that are tensors stay on the device, and so does everything computed from them. One that is NaN, inf or negative
makes the factor of its loss NaN: the step of its window is skipped, and the reference is not touched.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.kernels.table import copied_to

__all__ = ["Window"]

_SMALLEST, _LARGEST = 2.0**-126, 2.0**127  # the powers of two among fp32's normal numbers
_MOST_ABOVE = 16.0  # of a window's reference over its first weight
_CPU = torch.device("cpu")


class Window:
    """The state between two updates; weights that are tensors are moved to `device`."""

    def __init__(self, accumulate: int, device: torch.device = _CPU) -> None:
        self.accumulate, self._device = accumulate, device
        self.largest = _SMALLEST
        self.open()

    def open(self) -> None:
        """Start a new window."""
        self.num_micro_batches = 0  # ended by step()
        self.has_gradients = False
        self.has_weights = False  # whether any weight was passed
        self.reference: float | Tensor = 0.0  # 0 until there is a weight above 0
        self.weight: float | Tensor = 0.0  # in units of the reference
        self.factor: float | Tensor = 1.0  # of the losses of the current micro-batch
        self.is_empty: bool | Tensor = False  # whether all weights are 0, known once the gradients have been divided
        self.found_inf: Tensor | None = None  # set once the gradients have been unscaled
        self._weighed = False  # whether the current micro-batch is in `weight`
        self._current: float | Tensor = 1.0  # its own weight

    @property
    def largest(self) -> float | Tensor:
        """The reference of the last window, from which the next one starts."""
        return self._last_reference

    @largest.setter
    def largest(self, value: float | Tensor) -> None:
        # A checkpoint of an earlier version may contain a NaN, which would skip every later step.
        healthy = isinstance(value, Tensor) or (math.isfinite(value) and value > 0)
        self._last_reference: float | Tensor = value if healthy else _SMALLEST

    def weigh(self, weight: Any) -> float | Tensor:
        """Add a micro-batch, which sets `factor`; returns the factor for the gradients accumulated so far.

        A second loss of the same micro-batch has the same factor.
        """
        checked = _checked(weight, self._device)
        if self._weighed:
            both_known = isinstance(checked, float) and isinstance(self._current, float)
            if weight is not None and both_known and checked != self._current:
                raise SettingError(
                    f"backward(weight={weight!r}) for another loss of a micro-batch whose weight is {self._current:g}; a micro-batch has one "
                    "weight. Omit it there; to weigh the losses against each other, multiply them."
                )
            return 1.0
        old = self.reference
        self.reference, self.factor = _grown(old, self.largest, checked)
        correction = _ratio(old, self.reference)
        self.largest = _or_else(self.reference, self.largest)
        self._current, self._weighed = checked, True
        self.has_weights = self.has_weights or weight is not None
        self.weight = self.weight * correction + self.factor
        return correction

    def adopt(self, reference: float | Tensor) -> float | Tensor:
        """Continue with another reference, that of all ranks; returns the factor for the gradients accumulated so far."""
        correction = _ratio(self.reference, reference)
        self.reference, self.largest = reference, _or_else(reference, self.largest)
        self.weight, self.factor = self.weight * correction, self.factor * correction
        return correction

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


def _checked(weight: Any, device: torch.device) -> float | Tensor:
    """A weight as a number or a 0-dim fp32 tensor; 1 for None."""
    if weight is None:
        return 1.0
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise SettingError(f"weight takes one number, not a tensor of shape {tuple(weight.shape)}; sum it first.")
        if weight.dtype is torch.bool or weight.is_complex():
            raise SettingError(f"weight takes a real number, not a tensor of {weight.dtype}; sum a mask to count it.")
        return copied_to(weight.detach(), device, torch.float32).reshape(())
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise SettingError(f"weight={weight!r} must be a number or a tensor with one, such as a count of tokens.")
    try:
        number = float(weight)
    except OverflowError:
        number = math.inf
    if number != 0 and not _SMALLEST <= number <= _LARGEST:
        raise SettingError(
            f"weight={reprlib.repr(weight)} must be a finite number of 0 or more in the range of fp32 (1e-38 to 1e38), such as a count of "
            "tokens."
        )
    return number


def _grown(old: float | Tensor, last: float | Tensor, weight: float | Tensor) -> tuple[float | Tensor, float | Tensor]:
    """The reference after a weight, and the weight as a multiple of it."""
    if isinstance(old, float) and isinstance(last, float) and isinstance(weight, float):
        power = _power_of_two_above(weight)
        reference = max(old, power) if old else max(power, min(last, power * _MOST_ABOVE))
        return reference, weight / reference if reference else 0.0
    return _grown_on_device(*_tensors(old, last, weight))


def _grown_on_device(old: Tensor, last: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    valid = (weight >= 0) & (weight <= _LARGEST)
    # The power of two at or above a weight, exactly: a mantissa that is not 0 carries into fp32's exponent.
    power = ((torch.where(valid, weight, 0.0).view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    start = torch.maximum(power, torch.minimum(last, power * _MOST_ABOVE))
    reference = torch.where(old > 0, torch.maximum(old, power), start)
    return reference, torch.where(valid, weight / reference.clamp(min=_SMALLEST), torch.nan)


def _ratio(old: float | Tensor, new: float | Tensor) -> float | Tensor:
    """old / new, and 1 while `old` is 0: then what has been accumulated is 0."""
    if isinstance(old, float) and (not old or isinstance(new, float)):
        return old / new if old else 1.0
    before, after = _tensors(old, new)
    return torch.where(before > 0, before / after.clamp(min=_SMALLEST), 1.0)


def _or_else(reference: float | Tensor, last: float | Tensor) -> float | Tensor:
    """The reference, or the last one while it is 0."""
    if isinstance(reference, float):
        return reference or last
    after, before = _tensors(reference, last)
    return torch.where(after > 0, after, before)


def _tensors(*values: float | Tensor) -> list[Tensor]:
    """All as 0-dim tensors on the device of the first that is one."""
    device = next(v.device for v in values if isinstance(v, Tensor))
    # torch.full and not torch.tensor: a copy from the host would wait for the device.
    return [v if isinstance(v, Tensor) else torch.full((), v, dtype=torch.float32, device=device) for v in values]


def _power_of_two_above(weight: float) -> float:
    """The power of two at or above a weight; 0 for 0."""
    mantissa, exponent = math.frexp(weight)
    return math.ldexp(1.0, exponent - (mantissa == 0.5)) if weight else 0.0
