"""Autopsy: why a step was skipped, as one value.

Five causes are told apart, each with its own sentence and advice (`causes.py`):

    data             a tensor that entered the step contained inf or NaN
    weights          a parameter or buffer does
    forward          an operation of the forward pass gave inf or NaN from finite inputs
    backward         one of the backward pass did, at this loss scale or at any
    not reproduced   the step was computed again and everything was finite

and "not replayed" where it could not be computed again; then `sentence` has the reason.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

from halfstep.watching.probes import Range

__all__ = ["Autopsy", "Cause"]

Cause = Literal["data", "weights", "forward", "backward", "not reproduced", "not replayed"]


@dataclass(frozen=True)
class Autopsy:
    """The cause of a skipped step, and where it happened."""

    step: int
    cause: Cause
    module: str | None = None  # the model's name for it; "" is the model itself, None outside of it (the loss)
    op: str = ""
    dtype: str = ""  # of the value
    value: str = ""  # nan, inf or -inf
    inputs: tuple[Range, ...] = ()  # of the operation
    parameter: str = ""  # the parameter or buffer concerned
    window_index: int = 0  # of the micro-batch in its window, from 0
    scale: float = 1.0  # of the loss
    fitting_scale: float | None = None  # the largest power of two at which the backward pass stays finite, estimated
    at_scale_1: bool | None = None  # whether the gradients are finite without loss scaling; None if not tried
    sentence: str = ""
    advice: str = ""
    notes: tuple[str, ...] = ()
    defects: tuple[str, ...] = ()  # known ones of the installed libraries, for this operation
    seconds: float = 0.0  # how long it took
    rank: int | None = None  # that examined the step; None with one process

    @property
    def replayed(self) -> bool:
        """Whether the step was computed again."""
        return self.cause != "not replayed"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for the run file."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return values | {
            "inputs": [dataclasses.asdict(each) | {"shape": list(each.shape)} for each in self.inputs],
            "notes": list(self.notes),
            "defects": list(self.defects),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The autopsy that `as_dict` wrote."""
        inputs = tuple(Range(**{**each, "shape": tuple(each["shape"])}) for each in values["inputs"])
        texts = {name: tuple(values[name]) for name in ("notes", "defects")}
        return cls(**{**values, **texts, "inputs": inputs})

    def __str__(self) -> str:
        place = "" if self.rank is None else f", rank {self.rank}"
        lines = [f"Step {self.step} was skipped ({self.cause}{place}): {self.sentence}"]
        lines += [f"  input: {each}" for each in self.inputs]
        lines += [f"  {self.advice}"] if self.advice else []
        lines += [f"  note: {each}" for each in self.notes]
        lines += [f"  known defect: {each}" for each in self.defects]
        return "\n".join(lines)
