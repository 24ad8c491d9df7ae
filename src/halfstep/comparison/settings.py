"""The settings of a comparison: length, repeats, batch and device, as one frozen value that the child processes share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from halfstep.errors import SettingError, unknown
from halfstep.hardware.probe import find_gpu

__all__ = ["CompareSettings", "parse_settings"]

DEFAULT_STEPS = 200
BACKENDS = ("auto", "single", "ddp", "fsdp")
_TEXTS = ("device", "backend", "gpu")
# Whose peak a comparison on a CPU predicts, unless `gpu` names another: the GPU of the lesson, with its smaller memory.
DEFAULT_GPU = "A100 40GB"
MAX_WARMUP = 10  # steps; compilation, autotuning and the allocation of optimizer states are done by then
SEED_LIMIT = 2**62
# A slice is the number of steps before another run takes its turn: long compared with the switch (a millisecond), short
# compared with the drift of a machine (seconds to minutes).
SHORTEST_SLICE, NUM_SLICES = 5, 12


@dataclass(frozen=True)
class CompareSettings:
    """Length, repeats and device of a comparison; repeat r uses the seed `seed + r` in every row."""

    steps: int = DEFAULT_STEPS
    repeats: int = 3
    batch: int | None = None  # None: the target's own, else 64
    seed: int = 0
    max_norm: float | None = 1.0
    warmup: int | None = None  # steps trained but not timed; None: a quarter of them, at most 10
    device: str = "auto"
    backend: str = "auto"  # single, ddp or fsdp; auto: ddp on several ranks
    ranks: int = 1  # processes of each run; the batch is that of all ranks together
    timeout: int = 600  # seconds that a rank waits for another one
    gpu: str | None = None  # whose peak memory a comparison on a CPU predicts; None: DEFAULT_GPU

    def __post_init__(self) -> None:
        least_values = {"steps": 2, "repeats": 1, "seed": 0, "batch": 1, "warmup": 1, "ranks": 1, "timeout": 1}
        for name, least in least_values.items():
            value = getattr(self, name)
            if value is None and name in {"batch", "warmup"}:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SettingError(f"{name}={value!r} must be an integer of at least {least}.")
        if self.seed >= SEED_LIMIT:
            raise SettingError(f"seed={self.seed} is too large for torch's generator; use a seed below 2**62.")
        norm = self.max_norm
        if norm is not None and (isinstance(norm, bool) or not isinstance(norm, int | float) or not norm > 0):
            raise SettingError(f"max_norm={norm!r} must be a number above 0; max_norm=none disables clipping.")
        if self.warmup is not None and self.warmup >= self.steps:
            raise SettingError(f"warmup={self.warmup} leaves none of the {self.steps} steps for timing; lower it.")
        if self.gpu is not None and find_gpu(self.gpu).memory_bytes is None:
            raise SettingError(f"gpu={self.gpu!r} comes in several sizes; name one, such as gpu='{DEFAULT_GPU}'.")
        if self.backend not in BACKENDS:
            raise unknown("backend", self.backend, BACKENDS)
        if self.backend == "single" and self.ranks > 1:
            raise SettingError(
                f"backend=single with ranks={self.ranks}: each rank would train a model of its own. Use --backend ddp or fsdp."
            )

    @property
    def strategy(self) -> str:
        """The backend that "auto" stands for."""
        return self.backend if self.backend != "auto" else "single" if self.ranks == 1 else "ddp"

    @property
    def num_warmup(self) -> int:
        """The number of steps at the start that are not timed."""
        return self.warmup if self.warmup is not None else max(1, min(MAX_WARMUP, self.steps // 4))

    def slices(self) -> tuple[int, ...]:
        """The number of timed steps in each turn."""
        timed = self.steps - self.num_warmup
        length = max(SHORTEST_SLICE, -(-timed // NUM_SLICES))
        full, rest = divmod(timed, length)
        # A short tail would be a slice with a poor median; it is added to the last full one.
        return (timed,) if not full else (*([length] * (full - 1)), length + rest)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for files."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The settings that `as_dict` wrote; fields of a later version are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


def parse_settings(pairs: Iterable[str]) -> dict[str, Any]:
    """The fields set by `key=value` arguments, converted to their types."""
    known = CompareSettings().as_dict()
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if key not in known:
            raise unknown("setting", key, known, "Only these can be set with --set.")
        if not equals or not text:
            raise SettingError(f"--set {pair!r} has no value; write --set {key}=VALUE.")
        if key in settings:
            raise SettingError(f"--set {key} is given twice; remove one.")
        settings[key] = text if key in _TEXTS else _number(key, text)
    return settings


def _number(key: str, text: str) -> float | int | None:
    if key == "max_norm" and text.casefold() in {"none", "off"}:
        return None
    try:
        return float(text) if key == "max_norm" else int(text)
    except ValueError:
        expected = "a number or none" if key == "max_norm" else "an integer"
        raise SettingError(f"--set {key}={text!r} is not {expected}.") from None
