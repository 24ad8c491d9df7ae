"""How a comparison is run: how long, how often, on what, as one frozen value that travels to the child processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from halfstep.errors import SettingError, unknown

__all__ = ["CompareSettings", "parse_settings"]

DEFAULT_STEPS = 200
MOST_WARMUP = 10  # steps; compilation, autotuning and the first growth of optimizer states are over by then
MOST_SEED = 2**62
# A slice is what a run does before another takes its turn: long against the switch (a millisecond), short against the
# drift of a machine (seconds to minutes).
SHORTEST_SLICE, NUM_SLICES = 5, 12


@dataclass(frozen=True)
class CompareSettings:
    """Length, repeats and place of a comparison; repeat r uses the seed `seed + r` for every row."""

    steps: int = DEFAULT_STEPS
    repeats: int = 3
    batch: int | None = None  # None: the target's own, else 64
    seed: int = 0
    max_norm: float | None = 1.0
    warmup: int | None = None  # steps trained but not timed; None: a quarter of them, 10 at most
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("steps", 2), ("repeats", 1), ("seed", 0), ("batch", 1), ("warmup", 1)):
            value = getattr(self, name)
            if value is None and name in {"batch", "warmup"}:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SettingError(f"{name}={value!r} must be a whole number of at least {least}.")
        if self.seed >= MOST_SEED:
            raise SettingError(f"seed={self.seed} is more than torch's generator takes; give one below 2**62.")
        norm = self.max_norm
        if norm is not None and (isinstance(norm, bool) or not isinstance(norm, int | float) or not norm > 0):
            raise SettingError(f"max_norm={norm!r} must be a number above 0; max_norm=none does not clip.")
        if self.warmup is not None and self.warmup >= self.steps:
            raise SettingError(f"warmup={self.warmup} leaves none of the {self.steps} steps to be timed; lower it.")

    @property
    def num_warmup(self) -> int:
        """Steps at the start that are not timed."""
        return self.warmup if self.warmup is not None else max(1, min(MOST_WARMUP, self.steps // 4))

    def slices(self) -> tuple[int, ...]:
        """The timed steps, cut into turns."""
        timed = self.steps - self.num_warmup
        length = max(SHORTEST_SLICE, -(-timed // NUM_SLICES))
        whole, rest = divmod(timed, length)
        # A short tail would be a slice of its own with a poor median; it goes to the last whole one.
        return (timed,) if not whole else (*([length] * (whole - 1)), length + rest)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for files."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The settings out of a file; fields of a later Halfstep are left out."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


def parse_settings(pairs: Iterable[str]) -> dict[str, Any]:
    """The fields that `key=value` texts of the command line set, in their own types."""
    known = CompareSettings().as_dict()
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if key not in known:
            raise unknown("setting", key, known, "Only these can be set with --set.")
        if not equals or not text:
            raise SettingError(f"--set {pair!r} has no value; write --set {key}=VALUE.")
        if key in found:
            raise SettingError(f"--set {key} is given twice; keep one.")
        found[key] = text if key == "device" else _number(key, text)
    return found


def _number(key: str, text: str) -> float | int | None:
    if key == "max_norm" and text.casefold() in {"none", "off"}:
        return None
    try:
        return float(text) if key == "max_norm" else int(text)
    except ValueError:
        wanted = "a number or none" if key == "max_norm" else "a whole number"
        raise SettingError(f"--set {key}={text!r} is not {wanted}.") from None
