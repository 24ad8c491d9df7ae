"""A run on disk: written by the child that ran it, read back for every report.

It is a run file as `halfstep.checkpoint.runlog` has it. The first line carries, besides the usual, `comparison`: the row, the seed,
the repeat, the settings. One `step` line per training step has loss, gradient norm, scale, whether it was skipped, and
for timed steps their seconds and the number of the slice. A `measured` event holds everything that is one value per run; a
`failed` event says why a run ended early.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.checkpoint.runlog import Run, RunLog, read_runlog
from halfstep.comparison.contender import Contender
from halfstep.comparison.settings import CompareSettings
from halfstep.errors import SettingError

__all__ = [
    "CUT_OFF",
    "RUNS",
    "SURVEY",
    "RunRecord",
    "read_json",
    "read_run",
    "read_survey",
    "run_files",
    "run_name",
    "write_run",
]

RUNS, SURVEY = "runs", "survey.json"  # in the directory of a comparison
_LONGEST_NAME = 120  # of a run's files; file systems take 255 bytes
CUT_OFF = "cut off"  # the failure of a run whose file has no end
_SURVEYED = (
    "target", "source", "data_dir", "batch", "device", "machine", "support", "environment", "matmul", "notes", "same_weights",
    "same_batches", "num_params", "samples", "settings", "contenders", "reference", "command", "side_by_side", "stopped",
)  # fmt: skip


@dataclass(frozen=True)
class RunRecord:
    """One run as its file tells it."""

    contender: Contender
    settings: CompareSettings
    repeat: int
    seed: int
    environment: dict[str, Any]
    loss: tuple[float, ...]
    grad_norm: tuple[float | None, ...]
    scale: tuple[float | None, ...]
    skipped: tuple[bool, ...]
    slices: tuple[tuple[float, ...], ...]  # seconds of the timed steps, turn by turn
    measured: dict[str, Any] = field(default_factory=dict)
    failure: dict[str, str] | None = None
    machine: str = ""

    @property
    def seconds(self) -> list[float]:
        """Of every timed step."""
        return [second for turn in self.slices for second in turn]

    @property
    def num_nonfinite(self) -> int:
        """Steps whose loss was inf or NaN."""
        return sum(not math.isfinite(value) for value in self.loss)

    @property
    def diverged_at(self) -> int | None:
        """The step from which on the loss was never finite again, counted from 1, if it ended that way."""
        if not self.loss or math.isfinite(self.loss[-1]):
            return None
        finite = [i for i, value in enumerate(self.loss) if math.isfinite(value)]
        return finite[-1] + 2 if finite else 1


def write_run(
    path: Path,
    *,
    spec: dict[str, Any],
    environment: dict[str, Any],
    curves: Mapping[str, Sequence[Any]],
    seconds: Sequence[float],
    slices: Sequence[int],
    record: dict[str, Any],
    failure: dict[str, str] | None,
) -> None:
    """Write a whole run file at once: it is there complete, or not at all."""
    contender = spec["contender"]
    unfinished = path.with_suffix(".part")
    unfinished.unlink(missing_ok=True)
    told = {key: spec[key] for key in ("contender", "settings", "repeat", "seed", "batch", "is_reference")}
    measured = {key: value for key, value in record.items() if key != "truth"}
    with RunLog.create(
        unfinished,
        command=list(spec["command"]),
        policy=contender["policy"],
        truth=record.get("truth", {}),
        environment=environment,
        comparison=told,
    ) as log:
        losses = curves.get("loss", ())
        turns = [number for number, count in enumerate(slices) for _ in range(count)]
        first_timed = len(losses) - len(seconds)
        skips = 0
        for i, loss in enumerate(losses):
            skipped = bool(curves["skipped"][i])
            skips += skipped
            timed = i - first_timed
            when = {"seconds": seconds[timed], "slice": turns[timed]} if 0 <= timed < len(turns) else {}
            log.step(
                micro_batch=i + 1,
                attempted=i + 1,
                applied=i + 1 - skips,
                loss=loss,
                grad_norm=curves["grad_norm"][i],
                scale=curves["scale"][i],
                skipped=skipped,
                **when,
            )
        if measured:
            log.event("measured", values=measured)
        if failure is not None:
            log.event("failed", failure=failure["kind"], reason=failure["reason"])
    unfinished.replace(path)


def read_run(path: Path, machine: str = "") -> RunRecord:
    """Read a run of a comparison."""
    run = read_runlog(path)
    told = run.header.get("comparison")
    if not isinstance(told, dict):
        raise SettingError(f"{path} is the file of a single run, not of a comparison; check the path.")
    try:
        return _read(run, told, machine)
    except (KeyError, TypeError, ValueError) as error:
        raise SettingError(
            f"{path} is damaged: its lines lack what a run of a comparison has ({type(error).__name__}: {error}). Remove the file."
        ) from error


def _read(run: Run, told: dict[str, Any], machine: str) -> RunRecord:
    steps = run.records
    turns: dict[int, list[float]] = {}
    for step in steps:
        if "slice" in step:
            turns.setdefault(step["slice"], []).append(step["seconds"])
    measured: dict[str, Any] = next((event["values"] for event in run.events if event["event"] == "measured"), {})
    failed = next((event for event in run.events if event["event"] == "failed"), None)
    if not measured and failed is None:  # what was measured is the last line but one: this file lost its end
        reason = f"{run.path.name} ends after step {len(steps)}, before what was measured: the file is not whole"
        failed, turns = {"failure": CUT_OFF, "reason": reason}, {}
    return RunRecord(
        Contender.from_dict(told["contender"]),
        CompareSettings.from_dict(told["settings"]),
        told["repeat"],
        told["seed"],
        run.header["environment"],
        tuple(float(step["loss"]) for step in steps),
        tuple(step["grad_norm"] for step in steps),
        tuple(step["scale"] for step in steps),
        tuple(step["skipped"] for step in steps),
        tuple(tuple(turns[number]) for number in sorted(turns)),
        {**measured, "truth": run.header["truth"]},
        None if failed is None else {"kind": failed["failure"], "reason": failed["reason"]},
        machine,
    )


def run_name(label: str, repeat: int) -> str:
    """The name of a run's files, plain and another for every label: what separates is a dash, other signs are spelt out."""
    plain = re.sub(r"[^A-Za-z0-9_.=-]", lambda sign: f"~{ord(sign[0]):x}", re.sub(r"[,:]", "-", label))
    if len(plain) > _LONGEST_NAME:
        plain = f"{plain[:_LONGEST_NAME]}~{hashlib.sha256(label.encode()).hexdigest()[:12]}"
    return f"{plain}-{repeat}"


def run_files(folder: Path) -> Iterator[Path]:
    """The run files of a comparison's directory."""
    yield from sorted((folder / RUNS).glob("*.jsonl"))


def read_survey(folder: Path) -> dict[str, Any]:
    """The survey of a comparison's directory, with all that reports need."""
    survey = read_json(folder / SURVEY)
    missing = [key for key in _SURVEYED if key not in survey]
    if missing:
        raise SettingError(
            f"{folder / SURVEY} lacks {', '.join(missing)}; it is damaged, or was not written by this version of halfstep compare."
        )
    return survey


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a comparison's directory."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror or error}. Check the path.") from error
    except ValueError as error:
        raise SettingError(f"{path} is not JSON ({error}); it was not written by halfstep compare.") from error
    if not isinstance(value, dict):
        raise SettingError(f"{path} holds no JSON object; it was not written by halfstep compare.")
    return value
