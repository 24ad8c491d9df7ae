"""A run on disk: written by the child process that ran it, read back for every report.

It is a run file in the format of `halfstep.checkpoint.runlog`. The first line has an extra key `comparison`: the row, the
seed, the repeat, the settings. One `step` line per training step has loss, gradient norm, scale, whether it was skipped,
and for timed steps their seconds and the number of the slice. A `numerics` event has the exponents of one step after
training, a `measured` event everything that is one value per run; a `failed` event gives the reason why a run ended early.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.checkpoint.runlog import Run, RunLog, read_runlog
from halfstep.comparison.measurements import Failure, Measurements, TrialResult
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.spec import TrialSpec
from halfstep.comparison.variant import Variant
from halfstep.errors import SettingError
from halfstep.train.numerics import record_sample

__all__ = ["CUT_OFF", "RUNS", "RunRecord", "read_run", "run_files", "run_name", "write_run"]

RUNS = "runs"  # in the directory of a comparison
_LONGEST_NAME = 120  # of a run's files; file systems allow 255 bytes
CUT_OFF = "cut off"  # the failure of a run whose file is truncated
NUMERICS = "numerics"  # the event of a sample
_STORED = ("contender", "settings", "repeat", "seed", "batch", "is_reference")  # of the TrialSpec


@dataclass(frozen=True)
class RunRecord:
    """One run, read from its file."""

    variant: Variant
    settings: CompareSettings
    repeat: int
    seed: int
    environment: dict[str, Any]
    loss: tuple[float, ...]
    grad_norm: tuple[float | None, ...]
    scale: tuple[float | None, ...]
    skipped: tuple[bool, ...]
    slices: tuple[tuple[float, ...], ...]  # seconds of the timed steps, turn by turn
    measured: Measurements = field(default_factory=Measurements)
    failure: Failure | None = None
    machine: str = ""
    sample: dict[str, Any] | None = None  # exponents of the gradients and activations of a step after training

    @property
    def seconds(self) -> list[float]:
        """The time of every timed step."""
        return [second for turn in self.slices for second in turn]

    @property
    def num_nonfinite(self) -> int:
        """The number of steps whose loss was inf or NaN."""
        return sum(not math.isfinite(value) for value in self.loss)

    @property
    def diverged_at(self) -> int | None:
        """The first step of a non-finite tail of the loss, counted from 1; None if the last loss is finite."""
        if not self.loss or math.isfinite(self.loss[-1]):
            return None
        finite = [i for i, value in enumerate(self.loss) if math.isfinite(value)]
        return finite[-1] + 2 if finite else 1


def write_run(
    path: Path,
    *,
    spec: TrialSpec,
    command: Sequence[str],
    environment: dict[str, Any],
    result: TrialResult,
    failure: Failure | None,
) -> None:
    """Write a run file atomically."""
    unfinished = path.with_suffix(".part")
    unfinished.unlink(missing_ok=True)
    stored = spec.as_dict()
    measured = result.measurements.as_dict()
    with RunLog.create(
        unfinished,
        command=list(command),
        policy=spec.variant.policy,
        truth=result.measurements.truth or {},
        environment=environment,
        comparison={key: stored[key] for key in _STORED},
    ) as log:
        _write_steps(log, result)
        if result.sample is not None:
            record_sample(log, result.sample)
        if measured:
            log.event("measured", values=measured)
        if failure is not None:
            log.event("failed", failure=failure.kind, reason=failure.reason)
    unfinished.replace(path)


def _write_steps(log: RunLog, result: TrialResult) -> None:
    curves, seconds = result.curves, result.seconds
    turns = [number for number, count in enumerate(result.slices) for _ in range(count)]
    first_timed = len(curves.loss) - len(seconds)
    num_skipped = 0
    for i, loss in enumerate(curves.loss):
        num_skipped += curves.skipped[i]
        timed = i - first_timed
        timing = {"seconds": seconds[timed], "slice": turns[timed]} if 0 <= timed < len(turns) else {}
        log.step(
            micro_batch=i + 1,
            attempted=i + 1,
            applied=i + 1 - num_skipped,
            loss=loss,
            grad_norm=curves.grad_norm[i],
            scale=curves.scale[i],
            skipped=bool(curves.skipped[i]),
            **timing,
        )


def read_run(path: Path, machine: str = "") -> RunRecord:
    """Read a run of a comparison."""
    run = read_runlog(path)
    header = run.header.get("comparison")
    if not isinstance(header, dict):
        raise SettingError(f"{path} is the file of a single run, not of a comparison; check the path.")
    try:
        return _read(run, header, machine)
    except (KeyError, TypeError, ValueError) as error:
        raise SettingError(
            f"{path} is damaged: a line lacks a required value ({type(error).__name__}: {error}). Remove the file."
        ) from error


def _read(run: Run, header: dict[str, Any], machine: str) -> RunRecord:
    steps = run.records
    turns: dict[int, list[float]] = {}
    for step in steps:
        if "slice" in step:
            turns.setdefault(step["slice"], []).append(step["seconds"])
    measured: dict[str, Any] = next((event["values"] for event in run.events if event["event"] == "measured"), {})
    failed = next((event for event in run.events if event["event"] == "failed"), None)
    failure = None if failed is None else Failure(failed["failure"], failed["reason"])
    if not measured and failure is None:  # the measurements are the last or last but one line: the file is truncated
        reason = f"{run.path.name} ends after step {len(steps)}, before its measurements: the file is truncated"
        failure, turns = Failure(CUT_OFF, reason), {}
    return RunRecord(
        Variant.from_dict(header["contender"]),
        CompareSettings.from_dict(header["settings"]),
        header["repeat"],
        header["seed"],
        run.header["environment"],
        tuple(float(step["loss"]) for step in steps),
        tuple(step["grad_norm"] for step in steps),
        tuple(step["scale"] for step in steps),
        tuple(step["skipped"] for step in steps),
        tuple(tuple(turns[number]) for number in sorted(turns)),
        Measurements.from_dict(measured, run.header["truth"]),
        failure,
        machine,
        next((event for event in reversed(run.events) if event["event"] == NUMERICS), None),
    )


def run_name(label: str, repeat: int) -> str:
    """A unique, portable file name for a run: separators become dashes, other characters are escaped as ~hex."""
    plain = re.sub(r"[^A-Za-z0-9_.=-]", lambda sign: f"~{ord(sign[0]):x}", re.sub(r"[,:]", "-", label))
    if len(plain) > _LONGEST_NAME:
        plain = f"{plain[:_LONGEST_NAME]}~{hashlib.sha256(label.encode()).hexdigest()[:12]}"
    return f"{plain}-{repeat}"


def run_files(folder: Path) -> Iterator[Path]:
    """The run files of a comparison's directory."""
    yield from sorted((folder / RUNS).glob("*.jsonl"))
