"""A comparison: rows, verdict, curves and the machine they were measured on, as one frozen value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.comparison.gate import GateResult, check_gate, parse_gate
from halfstep.comparison.record import SURVEY, RunRecord, read_run, read_survey, run_files
from halfstep.comparison.rows import METRICS, Row, build_row, metric_of, noise_of, seeds_tell
from halfstep.comparison.table import plain_table, table_cells
from halfstep.comparison.verdict import Verdict, judge
from halfstep.errors import SettingError

__all__ = ["SCHEMA", "Comparison", "Part", "merge_parts", "read_comparison"]

SCHEMA = 1
# Settings that directories must have in common to be one table: otherwise what they do would pass for a row's own doing.
_HOW = ("steps", "seed", "max_norm", "warmup")


@dataclass(frozen=True)
class Comparison:
    """What a comparison found. `str()` is the table and the verdict; `as_dict()` is what the JSON file holds."""

    rows: tuple[Row, ...]
    verdict: Verdict
    runs: tuple[RunRecord, ...]
    surveys: tuple[dict[str, Any], ...]  # of each machine, in the order of the directories
    noise: float | None  # of fp32's loss curve, from seed to seed
    notes: tuple[str, ...]
    out: Path
    stopped_by: str | None = None

    def row(self, label: str) -> Row:
        """The row with this label."""
        for row in self.rows:
            if row.label == label:
                return row
        raise SettingError(f"There is no row {label!r}; there are {', '.join(row.label for row in self.rows)}.")

    def gate(self, text: str) -> GateResult:
        """Whether a gate such as "bf16.loss_gap > 0.02" fails; a row that failed or has no run yet passes none."""
        machines = _machine_names(self.surveys) if len(self.surveys) > 1 else [""]
        pairs = zip(self.surveys, machines, strict=True)
        labels = [
            _named(contender["label"], machine) for survey, machine in pairs for contender in survey["contenders"]
        ]
        done = [row for row in self.rows if row.status == "done"]
        figures = {row.label: {name: metric_of(row, name) for name in METRICS} for row in done}
        return check_gate(parse_gate(text, labels), figures)

    def as_dict(self) -> dict[str, Any]:
        """Everything as values that JSON can hold; numbers that it lacks are strings."""
        plain = {
            "schema": SCHEMA,
            "verdict": dataclasses.asdict(self.verdict),
            "rows": [
                dataclasses.asdict(row) | {"figures": {m: metric_of(row, m) for m in METRICS}} for row in self.rows
            ],
            "noise": self.noise,
            "notes": list(self.notes),
            "machines": list(self.surveys),
            "curves": [_curves(run) for run in self.runs],
            "stopped_by": self.stopped_by,
        }
        found: dict[str, Any] = _plain(plain)
        return found

    def __str__(self) -> str:
        headings, cells = table_cells(self.rows)
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([plain_table(headings, cells), "", self.verdict.text, *notes])


def read_comparison(folders: Sequence[Path], *, stopped_by: str | None = None) -> Comparison:
    """The comparison that the run files of one or several directories make.

    Directories of one machine with different rows are put together. With several machines the rows carry the name of
    theirs; each is compared with the reference of its own machine, and so is the verdict.
    """
    if not folders:
        raise SettingError("There is no directory to read a comparison from; name the --out of one.")
    parts = merge_parts([_read_part(folder) for folder in folders])
    names = _machine_names([part.survey for part in parts]) if len(parts) > 1 else [""]
    rows: list[Row] = []
    runs: list[RunRecord] = []
    notes: list[str] = []
    verdicts: list[Verdict] = []
    noise: float | None = None
    for part, name in zip(parts, names, strict=True):
        own = [dataclasses.replace(run, machine=name) for run in part.runs]
        mine, reference = _rows_of(own, part.survey, name)
        rows += mine
        runs += own
        verdicts.append(judge(mine, _named(part.survey["reference"], name) if reference else None, part.survey))
        noise = noise if noise is not None else noise_of(reference)
        notes += [f"{name}: {note}" if name else note for note in _notes(own, part.survey, mine)]
    verdict = verdicts[0]
    if len(parts) > 1:
        text = " ".join(f"On {name}: {v.text}" for name, v in zip(names, verdicts, strict=True))
        verdict = dataclasses.replace(verdict, text=text)
    surveys = tuple(part.survey for part in parts)
    return Comparison(tuple(rows), verdict, tuple(runs), surveys, noise, tuple(notes), Path(folders[0]), stopped_by)


@dataclass(frozen=True)
class Part:
    """The runs of one machine."""

    survey: dict[str, Any]
    runs: tuple[RunRecord, ...]


def _read_part(folder: Path) -> Part:
    survey = read_survey(_inside(folder))
    return Part(survey, tuple(read_run(path) for path in run_files(folder)))


def merge_parts(parts: Sequence[Part]) -> list[Part]:
    """Directories of one machine, job and batch whose rows are all different are one comparison made in instalments."""
    merged: list[Part] = []
    for part in parts:
        number = next((i for i, other in enumerate(merged) if _belong(other, part)), None)
        if number is None:
            merged.append(part)
        else:
            merged[number] = _join(merged[number], part)
    return merged


def _belong(one: Part, other: Part) -> bool:
    same = all(one.survey[key] == other.survey[key] for key in ("machine", "source", "batch", "device", "num_params"))
    torch = one.survey["environment"].get("torch") == other.survey["environment"].get("torch")
    threads = one.survey.get("threads") == other.survey.get("threads")
    how = all(one.survey["settings"].get(key) == other.survey["settings"].get(key) for key in _HOW)
    return same and torch and threads and how and not _labels(one) & _labels(other)


def _labels(part: Part) -> set[str]:
    return {contender["label"] for contender in part.survey["contenders"]}


def _join(one: Part, other: Part) -> Part:
    has_fp32 = [part for part in (one, other) if part.survey["reference"] == "fp32"]
    note = "The rows come from several directories, and only those of one directory took turns with each other."
    notes = [*one.survey["notes"], *other.survey["notes"], note]
    survey = {
        **one.survey,
        "contenders": [*one.survey["contenders"], *other.survey["contenders"]],
        "reference": has_fp32[0].survey["reference"] if has_fp32 else one.survey["reference"],
        "stopped": one.survey["stopped"] or other.survey["stopped"],
        "notes": list(dict.fromkeys(notes)),
        "command": [*one.survey["command"], "&&", *other.survey["command"]],
    }
    return Part(survey, (*one.runs, *other.runs))


def _rows_of(runs: list[RunRecord], survey: dict[str, Any], name: str) -> tuple[list[Row], list[RunRecord]]:
    order = [contender["label"] for contender in survey["contenders"]]
    by_label = {label: [run for run in runs if run.contender.label == label] for label in order}
    reference = by_label.get(survey["reference"], [])
    if reference and reference[0].contender.compute != "fp32":
        reference = []  # the first row of a comparison without fp32 stands for nothing
    rows = [
        build_row(sorted(found, key=lambda r: r.repeat), reference, survey, _named(label, name))
        for label, found in by_label.items()
        if found
    ]
    return rows, reference


def _notes(runs: list[RunRecord], survey: dict[str, Any], rows: list[Row]) -> list[str]:
    notes = list(survey["notes"])
    for what, words in (("weights", "initial weights"), ("batch", "first batch")):
        for repeat in sorted({run.repeat for run in runs}):
            seen = {run.measured[what] for run in runs if run.repeat == repeat and what in run.measured}
            if len(seen) > 1:
                notes.append(
                    f"The {words} of repeat {repeat} differ between rows, so their losses do not compare like with like."
                )
    reference = [run for run in runs if run.contender.label == survey["reference"] and run.failure is None]
    if len(reference) > 1 and not seeds_tell(reference):
        notes.append(
            "Every seed gives the same weights and the same first batch, so the repeats tell about speed and not about learning: how far "
            "fp32 is from itself is not known. Let the job draw from torch's generator without seeding it, or name its argument `seed`."
        )
    missing = len(survey["contenders"]) - len(rows)
    if survey["stopped"]:
        short = sum("stopped_after" in run.measured for run in runs)
        gaps = [f"{missing} of {len(survey['contenders'])} rows have no run"] if missing else []
        gaps += [f"{short} {'run is' if short == 1 else 'runs are'} shorter than the others"] if short else []
        notes.append(f"The comparison was stopped early{': ' * bool(gaps)}{' and '.join(gaps)}." + _fewer(rows))
    notes += [
        f"{run.contender.label}: {words} failed ({run.measured[key]})."
        for key, words in (("split_failed", "timing the parts of a step"), ("census_failed", "the census of operators"))
        for run in runs
        if key in run.measured
    ]
    notes += [
        f"{run.contender.label} was cut after {run.measured['stopped_after']} of {run.settings.steps} steps and not repeated: it is so "
        "much slower than the reference that more of it would take long and tell nothing new."
        for run in runs
        if "stopped_after" in run.measured and not survey["stopped"]
    ]
    notes += [
        f"Validation took the first {run.measured['validation_cut']} batches, as many as there are steps: its data has no length, and more "
        "of it than that."
        for run in runs
        if "validation_cut" in run.measured
    ]
    notes += [f"{row.label}: {note}" for row in rows for note in row.notes]
    return list(dict.fromkeys(notes + _misaligned(rows, survey)))


def _fewer(rows: list[Row]) -> str:
    """The rows that a stop left with fewer repeats than others, whose losses are then means over other seeds."""
    most = max((row.num_runs for row in rows), default=0)
    fewer = [f"{row.label} ({row.num_runs})" for row in rows if row.num_runs < most]
    if not fewer:
        return ""
    whole = [row.label for row in rows if row.num_runs == most]
    which = f"fewer are there for {', '.join(fewer)}"
    if len(whole) < len(fewer):
        which = f"all are there for {', '.join(whole)} alone"
    return (
        f" Of {most} repeats, {which}: compare losses of rows with other repeats by their gap to fp32, which is "
        "taken seed by seed."
    )


def _misaligned(rows: list[Row], survey: dict[str, Any]) -> list[str]:
    """Shapes that miss tensor cores; a CPU has none to miss."""
    found: dict[str, list[str]] = {}
    for row in rows if survey["device"] == "cuda" else ():
        for item in (row.census or {}).get("misaligned", []):
            found.setdefault("x".join(map(str, item["shape"])), []).append(row.label)
    return [
        f"Matrix products of {shape} have a side that is no multiple of 8 and may miss tensor cores ({', '.join(labels)})."
        for shape, labels in found.items()
    ]


def _machine_names(surveys: Sequence[dict[str, Any]]) -> list[str]:
    names = [str(survey["machine"]) for survey in surveys]
    return [f"{name} #{i + 1}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _named(label: str, machine: str) -> str:
    return f"{label} @ {machine}" if machine else label


def _inside(folder: Path) -> Path:
    if not (folder / SURVEY).exists():
        raise SettingError(f"{folder} holds no comparison (there is no {SURVEY} in it); name the --out of one.")
    return folder


def _curves(run: RunRecord) -> dict[str, Any]:
    return {
        "label": _named(run.contender.label, run.machine),
        "repeat": run.repeat,
        "seed": run.seed,
        "loss": list(run.loss),
        "grad_norm": list(run.grad_norm),
        "scale": list(run.scale),
        "skipped": [i + 1 for i, skipped in enumerate(run.skipped) if skipped],
        "seconds": run.seconds,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
