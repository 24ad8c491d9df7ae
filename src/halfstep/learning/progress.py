"""What a reader has run, and the checkpoint boxes of the lesson that it ticks.

How it works. Each unit, quiz answer and practice that was run is one line of JSON in `learn.jsonl`, appended with a single write.
Nothing is ever rewritten: a damaged line is skipped and stays in the file, a torn last line is closed by the next one, and two
programs that write at the same time do not lose each other's lines. The last line about a thing counts.

The directory is $HALFSTEP_STATE, or $XDG_STATE_HOME/halfstep, or ~/.local/state/halfstep.

A box is ticked by passing one of its practices, or by running all of its units, with every claim true, and answering all of its questions right.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from halfstep.errors import SettingError

__all__ = ["BOXES", "NUM_PRACTICES", "Box", "BoxState", "Progress", "checkpoint", "read_progress", "record_answers",
           "record_practice", "record_unit", "state_file"]  # fmt: skip

NUM_PRACTICES = 5
_FILE = "learn.jsonl"


@dataclass(frozen=True)
class Progress:
    """The latest outcome of everything that was run."""

    units: Mapping[str, bool] = field(default_factory=dict)  # name -> whether every claim was true
    answers: Mapping[int, bool] = field(default_factory=dict)  # question -> whether the answer was right
    practices: Mapping[int, bool] = field(default_factory=dict)  # task -> whether it passed
    num_damaged: int = 0  # lines of the file that could not be read


@dataclass(frozen=True)
class Box:
    """One item of the lesson's checkpoint."""

    text: str
    units: tuple[str, ...]
    questions: tuple[int, ...]
    practices: tuple[int, ...]


@dataclass(frozen=True)
class BoxState:
    """A box, whether it is ticked, and what is missing."""

    box: Box
    ticked: bool
    missing: tuple[str, ...]  # commands to run


BOXES = (
    Box("Implement autocast and GradScaler in a training loop", ("autocast",), (2, 8, 9), (2, 3)),
    Box("Compare memory usage with and without mixed precision", ("memory",), (1, 12), (1,)),
    Box("Handle gradient clipping correctly with the scaler", ("clipping",), (10, 11), (2,)),
    Box("Choose between float16 and bfloat16 for your hardware", ("formats", "choice"), (5, 6, 13), (4, 5)),
    Box("Monitor for NaN losses and adjust scaling if needed", ("failures",), (4, 18), (3,)),
)


def state_file() -> Path:
    """The file that progress is written to."""
    if own := os.environ.get("HALFSTEP_STATE"):
        return Path(own) / _FILE
    base = os.environ.get("XDG_STATE_HOME")
    # The XDG specification has relative paths ignored.
    if base and Path(base).is_absolute():
        return Path(base) / "halfstep" / _FILE
    try:
        root = Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise SettingError(
            "This user has no home directory. Set HALFSTEP_STATE to a directory for progress."
        ) from error
    return root / "halfstep" / _FILE


def read_progress(path: Path | None = None) -> Progress:
    """What was run so far; nothing if there is no file."""
    try:
        text = (path or state_file()).read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return Progress()
    units: dict[str, bool] = {}
    answers: dict[int, bool] = {}
    practices: dict[int, bool] = {}
    num_damaged = 0
    for line in filter(str.strip, text.splitlines()):
        match _parse(line):
            case {"kind": "unit", "name": str(name), "holds": bool(holds)}:
                units[name] = holds
            case {"kind": "answer", "question": int(number), "right": bool(right)}:
                answers[number] = right
            case {"kind": "practice", "number": int(number), "passed": bool(passed)}:
                practices[number] = passed
            case {"kind": str()}:
                pass  # of a later version
            case _:
                num_damaged += 1
    return Progress(units, answers, practices, num_damaged)


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def record_unit(name: str, *, holds: bool, path: Path | None = None) -> None:
    """Record that a unit was run, and whether every claim was true."""
    _append([{"kind": "unit", "name": name, "holds": holds}], path)


def record_answers(right: Mapping[int, bool], path: Path | None = None) -> None:
    """Record for each answered question whether the answer was right."""
    _append([{"kind": "answer", "question": number, "right": value} for number, value in right.items()], path)


def record_practice(number: int, *, passed: bool, path: Path | None = None) -> None:
    """Record the outcome of practice task `number`, from 1 to 5."""
    assert 1 <= number <= NUM_PRACTICES
    _append([{"kind": "practice", "number": number, "passed": passed}], path)


def _append(records: list[dict[str, Any]], path: Path | None) -> None:
    """Append records as lines, with one write."""
    path = path or state_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    text = "".join(json.dumps(record | {"date": now}) + "\n" for record in records)
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            text = text if file.read(1) == b"\n" else "\n" + text  # the last write was cut short
        file.write(text.encode())


def checkpoint(progress: Progress) -> tuple[BoxState, ...]:
    """The boxes, with what is missing for each that is not ticked."""
    return tuple(_state(box, progress) for box in BOXES)


def _state(box: Box, progress: Progress) -> BoxState:
    units = [f"halfstep learn {name}" for name in box.units if not progress.units.get(name, False)]
    wrong = [number for number in box.questions if not progress.answers.get(number, False)]
    listed = ", ".join(map(str, wrong))
    questions = [f"halfstep learn quiz (question{'s' if len(wrong) > 1 else ''} {listed})"] if wrong else []
    missing = (*units, *questions)
    practised = any(progress.practices.get(number, False) for number in box.practices)
    return BoxState(box, practised or not missing, () if practised else missing)
