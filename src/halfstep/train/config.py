"""The settings of a training run: one frozen dataclass, whose fields are the keys of `--set key=value`."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from halfstep.engine.compiling import SWITCH, check_compile, parse_compile
from halfstep.engine.recompute import check_recompute, parse_recompute
from halfstep.errors import SettingError, unknown
from halfstep.events import log_info
from halfstep.train.optimizer import check_optimizer

__all__ = ["BACKENDS", "DEFAULT_BATCH", "TrainConfig", "changed_fields", "parse_settings", "total_steps"]

BACKENDS = ("auto", "single", "ddp", "fsdp", "deepspeed")
DEFAULT_BATCH = 64  # examples in a micro-batch of a job that has no default of its own
# Settings that determine the trajectory: a resumed run must have the same values.
FIXED = ("batch", "seed", "accumulate", "max_norm", "ema", "deterministic", "optimizer")


@dataclass(frozen=True)
class TrainConfig:
    """How long and how to train; None means off, or for epochs and steps, no limit."""

    batch: int | None = None  # examples in a micro-batch of all ranks together; None: the job's own, else DEFAULT_BATCH
    epochs: int | None = None
    steps: int | None = None  # optimizer steps; the first limit reached ends the run
    seed: int = 0
    accumulate: int = 1
    max_norm: float | None = 1.0
    ema: float | None = None
    optimizer: str | None = None  # onebit-adam, zero-one-adam or onebit-lamb, with settings; None: the job's own
    compile: bool | str = False  # a string is "blocks" or a torch.compile mode
    deterministic: bool = False
    gradient_release: bool = False
    recompute: str | float | None = None  # "cheap", or a share of the activations to keep
    eval_every: int = 1  # epochs between validations; the end of the run is always validated
    eval_batches: int | None = None  # at most; None: all, or MAX_UNSIZED_BATCHES of data that has no length
    save_every: int | None = None  # steps between checkpoints; None: at the end of each epoch
    async_save: bool = False  # write checkpoints in the background, from a copy in host memory
    keep_last: int = 2
    keep_best: int = 1
    higher_is_better: bool = True  # of the job's metric; without a metric, the lowest validation loss is best
    device: str = "auto"
    backend: str = "auto"  # single, ddp, fsdp or deepspeed; auto: ddp on several ranks
    ds_config: str | None = None  # the path of a DeepSpeed configuration, for backend=deepspeed
    timeout: int = 600  # seconds that a rank waits for another one
    watch: int | None = 100  # steps between samples of gradients and weights; None: neither samples nor autopsies
    watch_activations: bool = False  # also of the outputs of modules

    def __post_init__(self) -> None:
        for name in ("accumulate", "eval_every", "keep_last"):
            _at_least(name, getattr(self, name), 1)
        for name in ("batch", "epochs", "steps", "eval_batches", "save_every", "watch"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least("keep_best", self.keep_best, 0)
        _at_least("timeout", self.timeout, 1)
        if self.backend not in BACKENDS:
            raise unknown("backend", self.backend, BACKENDS)
        if self.ds_config is not None and self.backend != "deepspeed":
            raise SettingError(
                f"ds_config={self.ds_config} has no effect with backend={self.backend}; use backend=deepspeed."
            )
        _at_least("seed", self.seed, 0)
        if self.seed >= 2**63:
            raise SettingError(f"seed={self.seed} is too large for torch's generators; use a number below 2^63.")
        if self.watch_activations and self.watch is None:
            raise SettingError("watch_activations=True has no effect with watch=None; set watch, or leave it out.")
        if self.optimizer is not None:
            check_optimizer(self.optimizer)
        check_compile(self.compile)
        check_recompute(self.recompute)


def _at_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(f"{name}={value!r} must be an integer of at least {least}.")


def parse_settings(pairs: Iterable[str]) -> dict[str, Any]:
    """The fields set by `key=value` arguments, converted to their types."""
    hints = typing.get_type_hints(TrainConfig)
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if key not in hints:
            raise unknown("setting", key, hints, "Only these can be set with --set.")
        if not equals:
            raise SettingError(f"--set {pair!r} has no value; write --set {key}=VALUE.")
        if key in settings:
            raise SettingError(f"--set {key} is given twice; remove one.")
        settings[key] = _parse(key, text, hints[key])
    return settings


def _parse(key: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in kinds and text.casefold() in {"none", "off"}:
        return None
    if key == "compile":
        return parse_compile(text)
    if key == "recompute":
        return parse_recompute(text)
    try:
        if bool in kinds:
            return SWITCH[text.casefold()]
        if int in kinds:
            return int(text)
        if float in kinds:
            return float(text)  # its range is checked where it is used
    except (ValueError, KeyError):
        expected = " or ".join("none" if k is type(None) else k.__name__ for k in kinds)
        raise SettingError(f"--set {key}={text!r} is not a value of type {expected}.") from None
    return text


def changed_fields(saved: dict[str, Any], now: TrainConfig) -> list[str]:
    """Fields that determine the trajectory and differ from those of the resumed run."""
    current = dataclasses.asdict(now)
    return [
        f"{name}: was {saved[name]!r}, is {current[name]!r}"
        for name in FIXED
        if name in saved and saved[name] != current[name]
    ]


def total_steps(config: TrainConfig, num_batches: int | None) -> int | None:
    """The number of steps at the end of the run, if it is known in advance; `num_batches` is that of an epoch."""
    if config.steps is None and num_batches is None:
        log_info("The training data has no length: the epoch ends when the data does. If it is endless, set --steps.")
    if config.epochs is None or num_batches is None:
        return config.steps
    total = config.epochs * -(-num_batches // config.accumulate)
    return total if config.steps is None else min(total, config.steps)
