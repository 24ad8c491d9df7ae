"""The run file: everything a run did, one JSON object per line, readable during the run and after a crash.

Every line has `kind` and `time` (seconds since 1970, UTC). There are four kinds.

`run`, only in the first line:

    schema        the version of this description, 1
    run           the id of the run
    command       the command line: a string or a list of strings
    policy        the precision policy, as text
    truth         the truth table: the actual dtype of everything
    environment   versions and machine, from `environment()`
    ...           anything else that was passed to `create`

`step`, one per micro-batch or per step, as the caller chooses. The three counts include the step of this line and run
from the start of the run, so the first step is 1; they continue across a resume:

    micro_batch   micro-batches processed
    attempted     steps attempted, skipped ones included
    applied       steps that changed the weights
    ...           any numbers: loss, metric, lr, scale, skipped, grad_norm, samples_per_second

`event`, something that happened: `event` is its name, and `micro_batch`, `attempted` and `applied` are those of the
last `step` or `resume` line that this process wrote, if any.

`resume`, training resumed from a checkpoint: `attempted`, `applied` and, where known, `micro_batch` are the counts in
that checkpoint. Earlier `step` and `event` lines with a larger `attempted` or `micro_batch` describe work that was
lost and repeated; readers drop them.

Non-finite numbers are the strings "nan", "inf" and "-inf". A text that equals one of them is written with a leading
apostrophe, which readers remove. Everything is ASCII. Each line is passed to the operating system in one write, so it
survives the death of the process; an incomplete last line comes from a machine that crashed and is ignored.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from halfstep.errors import HalfstepError, SettingError
from halfstep.hardware.environment import environment

__all__ = ["SCHEMA", "Run", "RunLog", "environment", "read_runlog"]

SCHEMA = 1
_COUNTS = ("micro_batch", "attempted", "applied")
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LIKE_SPECIAL = re.compile(r"'*(nan|inf|-inf)")
_DEEPEST = 50

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The contents of a run file, without the lines that a later attempt replaced.

    `records` are the `step` lines, `events` the `event` lines, `resumes` the `resume` lines, each in the order of the
    file; `num_replaced` counts the dropped lines, and `torn` is true if the last line was incomplete.
    """

    path: Path
    header: Record
    records: tuple[Record, ...]
    events: tuple[Record, ...]
    resumes: tuple[Record, ...]
    num_replaced: int
    torn: bool

    def __str__(self) -> str:
        counts = f"{len(self.records)} step records, {len(self.events)} events, {len(self.resumes)} resumes"
        return f"run {self.header['run']}: {counts}"


class RunLog:
    """Writes a run file; `RunLog.create` starts one, `RunLog(path)` continues one after a stop or a crash."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        run = read_runlog(self.path)
        self.run_id: str = run.header["run"]
        self._counts: Record = {}
        self._must_resume = bool(run.records or run.resumes)
        self._handle = _open(self.path, os.O_WRONLY)
        self._repair_last_line()

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        command: Any,
        policy: Any,
        truth: Any,
        environment: Mapping[str, Any],
        run_id: str | None = None,
        **extra: Any,
    ) -> RunLog:
        """Start a run file at `path`, which must not exist or be empty, and write its first line."""
        path = Path(path)
        run_id = run_id or f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        fields = {"command": command, "policy": policy, "truth": truth, "environment": environment}
        line = _line("run", {"schema": SCHEMA, "run": run_id, **fields}, _checked_fields(extra, "run", "schema"))
        handle = _open(path, os.O_WRONLY | os.O_CREAT)
        try:
            if os.fstat(handle).st_size:
                raise SettingError(
                    f"{path} exists already and is never overwritten; continue it with RunLog(path), or choose another name."
                )
            _append(handle, path, line)
        finally:
            os.close(handle)
        return cls(path)

    def step(self, *, micro_batch: int, attempted: int, applied: int, **values: Any) -> None:
        """Record a micro-batch or a step: the counts including it, and any numbers about it."""
        if self._must_resume:
            raise SettingError(
                f"{self.path} contains an earlier attempt; call resume(attempted=..., applied=...) before step()."
            )
        counts = {"micro_batch": _count("micro_batch", micro_batch), **_steps(attempted, applied)}
        self._append(_line("step", counts, _checked_fields(values)))
        self._counts = counts

    def event(self, kind: str, **fields: Any) -> None:
        """Record that something called `kind` happened, with the counts of the last step."""
        self._append(_line("event", {"event": kind, **self._counts}, _checked_fields(fields, "event", *_COUNTS)))

    def resume(self, *, attempted: int, applied: int, micro_batch: int | None = None, **fields: Any) -> None:
        """Record that training resumes from a checkpoint with these counts; later records of earlier attempts are void."""
        counts = _steps(attempted, applied)
        if micro_batch is not None:
            counts = {"micro_batch": _count("micro_batch", micro_batch), **counts}
        self._append(_line("resume", counts, _checked_fields(fields)))
        self._counts, self._must_resume = counts, False

    def close(self) -> None:
        """Sync the file to disk and close it; closing twice is allowed."""
        if self._handle >= 0:
            try:
                os.fsync(self._handle)
            finally:
                os.close(self._handle)
                self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repair_last_line(self) -> None:
        """Add the newline if only that is missing from the last line, or remove the line if it is incomplete."""
        complete, _, last = self.path.read_bytes().rpartition(b"\n")
        if last and _torn(last):
            os.ftruncate(self._handle, len(complete) + 1)
        elif last:
            self._append(b"\n")

    def _append(self, line: bytes) -> None:
        if self._handle < 0:
            raise SettingError(f"The run file {self.path} is closed; continue it with RunLog(path).")
        _append(self._handle, self.path, line)


def read_runlog(path: str | Path) -> Run:
    """Read a run file without an incomplete last line and without the records that a later attempt replaced."""
    path = Path(path)
    lines = _lines(path)
    _, header, torn = next(lines, (0, None, True))
    if header is None:
        raise SettingError(
            f"{path} has no complete first line: not a run file, or its run died during start-up. Check the path, or start the "
            "run again in another --out."
        )
    _require_run_header(path, header)
    records: list[Record] = []
    resumes: list[Record] = []
    num_replaced = 0
    for number, record, is_torn in lines:
        torn = is_torn
        if record is None:
            continue
        _require_known_kind(path, number, record)
        if record["kind"] == "resume":
            current = [other for other in records if not _replaced(other, record)]
            num_replaced += len(records) - len(current)
            records = current
            resumes.append(record)
        else:
            records.append(record)
    steps = tuple(r for r in records if r["kind"] == "step")
    events = tuple(r for r in records if r["kind"] == "event")
    return Run(path, header, steps, events, tuple(resumes), num_replaced, torn)


def _open(path: Path, flags: int) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags | os.O_APPEND, 0o666)
    except OSError as error:
        raise SettingError(
            f"{path} cannot be written: {error.strerror or error}. Check the path and its permissions."
        ) from error


def _append(handle: int, path: Path, line: bytes) -> None:
    """Write a complete line, or nothing."""
    end = os.fstat(handle).st_size
    try:
        done = 0
        while done < len(line):
            done += os.write(handle, line[done:])
    except OSError as error:
        os.ftruncate(handle, end)  # a partial line would corrupt the next one
        raise HalfstepError(
            f"A line of {len(line)} bytes could not be written to {path}: {error.strerror or error}. The lines before "
            "it are intact; free disk space."
        ) from error


def _line(kind: str, fixed: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes:
    record = {"kind": kind, "time": round(time.time(), 6), **fixed, **fields}
    return json.dumps(_plain(record, kind, 0), allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def _checked_fields(fields: Mapping[str, Any], *reserved: str) -> Mapping[str, Any]:
    """The caller's fields; raises if one has a name that the run file uses itself."""
    clashes = sorted({"kind", "time", *reserved} & set(fields))
    if clashes:
        raise SettingError(f"The field {clashes[0]!r} is reserved by the run file; use another name.")
    return fields


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise SettingError(f"{name}={value!r} is not a count; pass an int of at least 0.")
    return int(value)


def _steps(attempted: Any, applied: Any) -> Record:
    counts = {"attempted": _count("attempted", attempted), "applied": _count("applied", applied)}
    if counts["applied"] > counts["attempted"]:
        raise SettingError(
            f"applied={applied} is more than attempted={attempted}; a step is attempted before it is applied."
        )
    return counts


def _plain(value: Any, where: str, depth: int) -> Any:
    """The value as plain JSON; raises an error with its path if there is no such form."""
    if depth > _DEEPEST:
        raise SettingError(f"{where[:80]}... is nested deeper than {_DEEPEST} levels, or contains itself.")
    if isinstance(value, str):
        return f"'{value}" if _LIKE_SPECIAL.fullmatch(value) else str(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    raise SettingError(
        f"{where} is a {type(value).__name__}, which a run file cannot store; pass numbers, strings, None, lists, or dicts "
        "with string keys (for a tensor, its .item())."
    )


def _special(value: Any) -> Any:
    """Undo `_plain` for a value read from the file."""
    if isinstance(value, str):
        return _SPECIAL.get(value, value[1:] if value.startswith("'") and _LIKE_SPECIAL.fullmatch(value) else value)
    if isinstance(value, list):
        return [_special(item) for item in value]
    if isinstance(value, dict):
        return {key: _special(item) for key, item in value.items()}
    return value


def _lines(path: Path) -> Iterator[tuple[int, Record | None, bool]]:
    """Each line's number and record; for an incomplete last line the record is None and the flag is True."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and _torn(line):
                    yield number, None, True
                else:
                    yield number, _record(path, number, line), False
    except OSError as error:
        raise SettingError(
            f"{path} cannot be read: {error.strerror or error}. Check the path and its permissions."
        ) from error


def _torn(line: bytes) -> bool:
    try:
        return not isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return True


def _record(path: Path, number: int, line: bytes) -> Record:
    def reject(constant: str) -> None:
        raise ValueError(constant)

    try:
        record = json.loads(line.decode("utf-8"), parse_constant=reject)
    except UnicodeDecodeError:
        raise SettingError(
            f"{path}, line {number}: not UTF-8 text, so this is not a run file, or a damaged one. {_advice(number)}"
        ) from None
    except (ValueError, RecursionError):
        raise SettingError(f"{path}, line {number}: not a JSON object: {line[:60]!r}. {_advice(number)}") from None
    if not isinstance(record, dict):
        raise SettingError(f"{path}, line {number}: not a JSON object: {line[:60]!r}. {_advice(number)}")
    special: Record = _special(record)
    return special


def _advice(number: int) -> str:
    return (
        "Check the path."
        if number == 1
        else "The file was modified after it was written; restore it, or delete that line."
    )


def _require_run_header(path: Path, header: Record) -> None:
    schema = header.get("schema")
    if header.get("kind") != "run" or not isinstance(schema, int) or not isinstance(header.get("run"), str):
        raise SettingError(
            f"{path}, line 1: not the first line of a Halfstep run file (kind {header.get('kind')!r}). Check the path."
        )
    if schema > SCHEMA:
        raise SettingError(
            f"{path}, line 1: schema {schema}, but this Halfstep reads at most {SCHEMA}; upgrade halfstep."
        )


def _require_known_kind(path: Path, number: int, record: Record) -> None:
    kind = record.get("kind")
    needed = {"step": _COUNTS, "event": (), "resume": ("attempted", "applied")}.get(str(kind))
    if needed is None:
        raise SettingError(
            f"{path}, line {number}: unknown kind {kind!r}; known: step, event, resume. {_advice(number)}"
        )
    for name in {*needed, *(name for name in _COUNTS if name in record)}:
        if type(record.get(name)) is not int:
            raise SettingError(f"{path}, line {number}: {name} is {record.get(name)!r}, not a count. {_advice(number)}")


def _replaced(record: Record, resume: Record) -> bool:
    return any(record.get(name, 0) > resume.get(name, math.inf) for name in ("micro_batch", "attempted"))
