"""The run file: everything a run did, one JSON object per line, readable while the run goes on and after it dies.

Every line has `kind` and `time` (seconds since 1970, UTC). There are four kinds.

`run`, the first line and only there:

    schema        the version of this description, 1
    run           the id of the run
    command       what was called: a string or a list of strings
    policy        the precision policy, as it prints
    truth         the truth table: which dtype everything really has
    environment   versions and machine, from `environment()`
    ...           anything else that was passed to `create`

`step`, one per micro-batch or per step, as the caller likes. The three counts are those reached once the line is
written, counted from the start of the run, so the first step is 1; they go on over a resume:

    micro_batch   micro-batches seen
    attempted     steps attempted, skipped ones included
    applied       steps that changed the weights
    ...           any numbers: loss, metric, lr, scale, skipped, grad_norm, samples_per_second

`event`, something that happened: `event` names it, and `micro_batch`, `attempted` and `applied` are those of the last
`step` or `resume` line this process wrote, if it wrote one.

`resume`, training went on from a checkpoint: `attempted`, `applied` and, where known, `micro_batch` are the counts in
that checkpoint. Earlier `step` and `event` lines with a larger `attempted` or `micro_batch` tell of work that was
lost and done again; readers drop them.

Numbers that JSON lacks are the strings "nan", "inf" and "-inf". A text that reads like one of them gets an apostrophe
in front, which readers take off. Everything is ASCII. A line is handed to the operating system whole, so it survives
the death of the process; a last line without its end comes from a machine that died and does not count.
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
    """What a run file says, without what a later attempt replaced.

    `records` are the `step` lines, `events` the `event` lines, `resumes` the `resume` lines, each in the order of the
    file; `num_replaced` counts the lines dropped, and `torn` says whether the last line was incomplete.
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
    """Writes a run file; `RunLog.create` starts one, `RunLog(path)` goes on with one after a stop or a crash."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        run = read_runlog(self.path)
        self.run_id: str = run.header["run"]
        self._counts: Record = {}
        self._must_resume = bool(run.records or run.resumes)
        self._handle = _open(self.path, os.O_WRONLY)
        self._mend()

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
        line = _line("run", {"schema": SCHEMA, "run": run_id, **fields}, _apart(extra, "run", "schema"))
        handle = _open(path, os.O_WRONLY | os.O_CREAT)
        try:
            if os.fstat(handle).st_size:
                raise SettingError(
                    f"{path} exists already and is not replaced; go on with it by RunLog(path), or choose another name."
                )
            _append(handle, path, line)
        finally:
            os.close(handle)
        return cls(path)

    def step(self, *, micro_batch: int, attempted: int, applied: int, **values: Any) -> None:
        """Record a micro-batch or a step by the counts reached with it, and any numbers about it."""
        if self._must_resume:
            raise SettingError(
                f"{self.path} has an earlier attempt in it; call resume(attempted=..., applied=...) before step()."
            )
        counts = {"micro_batch": _count("micro_batch", micro_batch), **_steps(attempted, applied)}
        self._append(_line("step", counts, _apart(values)))
        self._counts = counts

    def event(self, kind: str, **fields: Any) -> None:
        """Record that something happened, `kind` being its name; it carries the counts of the last step."""
        self._append(_line("event", {"event": kind, **self._counts}, _apart(fields, "event", *_COUNTS)))

    def resume(self, *, attempted: int, applied: int, micro_batch: int | None = None, **fields: Any) -> None:
        """Record that training goes on from a checkpoint with these counts; what earlier attempts did later is void."""
        counts = _steps(attempted, applied)
        if micro_batch is not None:
            counts = {"micro_batch": _count("micro_batch", micro_batch), **counts}
        self._append(_line("resume", counts, _apart(fields)))
        self._counts, self._must_resume = counts, False

    def close(self) -> None:
        """Sync the file to the disk and close it; closing twice is fine."""
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

    def _mend(self) -> None:
        """End the last line if it is whole but for its newline, or cut it off if it is torn."""
        whole, _, last = self.path.read_bytes().rpartition(b"\n")
        if last and _torn(last):
            os.ftruncate(self._handle, len(whole) + 1)
        elif last:
            self._append(b"\n")

    def _append(self, line: bytes) -> None:
        if self._handle < 0:
            raise SettingError(f"The run file {self.path} is closed; go on with it by RunLog(path).")
        _append(self._handle, self.path, line)


def read_runlog(path: str | Path) -> Run:
    """Read a run file, leaving out a torn last line and every record that a later attempt replaced."""
    path = Path(path)
    lines = _lines(path)
    _, header, torn = next(lines, (0, None, True))
    if header is None:
        raise SettingError(f"{path} has no complete first line: the run died as it started. Remove the file.")
    _require_ours(path, header)
    kept: list[Record] = []
    resumes: list[Record] = []
    num_replaced = 0
    for number, record, is_torn in lines:
        torn = is_torn
        if record is None:
            continue
        _require_known(path, number, record)
        if record["kind"] == "resume":
            still = [other for other in kept if not _replaced(other, record)]
            num_replaced += len(kept) - len(still)
            kept = still
            resumes.append(record)
        else:
            kept.append(record)
    steps = tuple(r for r in kept if r["kind"] == "step")
    events = tuple(r for r in kept if r["kind"] == "event")
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
    """Write all of a line, or none of it."""
    end = os.fstat(handle).st_size
    try:
        done = 0
        while done < len(line):
            done += os.write(handle, line[done:])
    except OSError as error:
        os.ftruncate(handle, end)  # half a line would spoil the next one
        raise HalfstepError(
            f"A line of {len(line)} bytes could not be written to {path}: {error.strerror or error}. The lines before "
            "it are whole; make room on the disk."
        ) from error


def _line(kind: str, fixed: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes:
    record = {"kind": kind, "time": round(time.time(), 6), **fixed, **fields}
    return json.dumps(_plain(record, kind, 0), allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def _apart(fields: Mapping[str, Any], *taken: str) -> Mapping[str, Any]:
    clash = sorted({"kind", "time", *taken} & set(fields))
    if clash:
        raise SettingError(f"A run file has the field {clash[0]!r} of its own; give yours another name.")
    return fields


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise SettingError(f"{name}={value!r} is not a count; pass an int of 0 or more.")
    return int(value)


def _steps(attempted: Any, applied: Any) -> Record:
    counts = {"attempted": _count("attempted", attempted), "applied": _count("applied", applied)}
    if counts["applied"] > counts["attempted"]:
        raise SettingError(
            f"applied={applied} is more than attempted={attempted}; a step is attempted before it is applied."
        )
    return counts


def _plain(value: Any, where: str, depth: int) -> Any:
    """The value as JSON has it; refuses what JSON has not, by its path."""
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
        f"{where} is a {type(value).__name__}, which a run file cannot hold; pass numbers, text, None, lists, or dicts "
        "with text as keys (for a tensor, its .item())."
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
    """Each line's number and record; the record is None and the flag True for a torn last line."""
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
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        record = json.loads(line.decode("utf-8"), parse_constant=refuse)
    except UnicodeDecodeError:
        raise SettingError(
            f"{path}, line {number}: not UTF-8 text, so not a run file or a damaged one. {_advice(number)}"
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
        else "The file was changed after it was written; restore it, or remove that line."
    )


def _require_ours(path: Path, header: Record) -> None:
    schema = header.get("schema")
    if header.get("kind") != "run" or not isinstance(schema, int) or not isinstance(header.get("run"), str):
        raise SettingError(
            f"{path}, line 1: not the first line of a Halfstep run file (kind {header.get('kind')!r}). Check the path."
        )
    if schema > SCHEMA:
        raise SettingError(
            f"{path}, line 1: schema {schema}, and this Halfstep reads up to {SCHEMA}; upgrade halfstep."
        )


def _require_known(path: Path, number: int, record: Record) -> None:
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
