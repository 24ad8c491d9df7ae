"""A comparison: rows, verdict, curves and the machine they were measured on, as one frozen value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.comparison.gate import GateResult, check_gate, parse_gate
from halfstep.comparison.record import RunRecord, read_run, run_files
from halfstep.comparison.rows import METRICS, Row, build_row, metric_of, noise_of, seeds_differ
from halfstep.comparison.survey import SURVEY, Survey, read_survey
from halfstep.comparison.table import table_cells
from halfstep.comparison.verdict import Verdict, judge
from halfstep.errors import SettingError
from halfstep.hardware.tables import html_table, plain_table
from halfstep.hardware.units import count_text

__all__ = ["SCHEMA", "Comparison", "Part", "merge_parts", "read_comparison"]

SCHEMA = 1
# Settings that directories must share to be merged into one table: a difference would look like an effect of the precision.
_SHARED_SETTINGS = ("steps", "seed", "max_norm", "warmup", "strategy", "ranks")

_AT_THE_END = ("loss", "val_loss", "metric")  # figures that depend on how far a run got


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison. `str()` is the table and the verdict; `as_dict()` is the content of comparison.json."""

    rows: tuple[Row, ...]
    verdict: Verdict
    runs: tuple[RunRecord, ...]
    surveys: tuple[Survey, ...]  # of each machine, in the order of the directories
    noise: float | None  # mean distance between fp32's loss curves of different seeds
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
        """Evaluate a gate such as "bf16.loss_gap > 0.02".

        It fails for a row that failed or has not run yet. The loss and metric of a row that was cut short count as not
        measured, because those of other rows are of another step; the gap to the reference is of the same step.
        """
        machines = _machine_names(self.surveys)
        pairs = zip(self.surveys, machines, strict=True)
        labels = [_named(label, machine) for survey, machine in pairs for label in survey.labels]
        done = [row for row in self.rows if row.status == "done"]
        figures = {
            row.label: {
                name: None if row.cut_at is not None and name in _AT_THE_END else metric_of(row, name)
                for name in METRICS
            }
            for row in done
        }
        return check_gate(parse_gate(text, labels), figures)

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON-serializable values; non-finite numbers become strings."""
        values = {
            "schema": SCHEMA,
            "verdict": dataclasses.asdict(self.verdict),
            "rows": [row.as_dict() for row in self.rows],
            "noise": self.noise,
            "notes": list(self.notes),
            "machines": [survey.as_dict() for survey in self.surveys],
            "curves": [_curves(run) for run in self.runs],
            "samples": sorted(
                (_sample(run) for run in self.runs if run.sample is not None),
                key=lambda sample: [row.label for row in self.rows].index(sample["label"]),
            ),
            "stopped_by": self.stopped_by,
        }
        plain: dict[str, Any] = _plain(values)
        return plain

    def __str__(self) -> str:
        headings, cells = table_cells(self.rows)
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([plain_table(headings, cells), "", self.verdict.text, *notes])

    def _repr_html_(self) -> str:
        headings, cells = table_cells(self.rows)
        return html_table(headings, cells, below=[self.verdict.text, *(f"note: {note}" for note in self.notes)])


def read_comparison(folders: Sequence[Path], *, stopped_by: str | None = None) -> Comparison:
    """Read the run files of one or several directories as one comparison.

    Directories of one machine with different rows are merged. With several machines, the label of a row includes its
    machine; each row is compared with the reference of its own machine, and every machine has its own verdict.
    """
    if not folders:
        raise SettingError("There is no directory to read a comparison from; pass the --out of one.")
    parts = merge_parts([_read_part(folder) for folder in folders])
    names = _machine_names([part.survey for part in parts])
    rows: list[Row] = []
    runs: list[RunRecord] = []
    notes: list[str] = []
    verdicts: list[Verdict] = []
    noise: float | None = None
    for part, name in zip(parts, names, strict=True):
        part_runs = [dataclasses.replace(run, machine=name) for run in part.runs]
        part_rows, reference = _rows_of(part_runs, part.survey, name)
        rows += part_rows
        runs += part_runs
        verdicts.append(judge(part_rows, _named(part.survey.reference, name) if reference else None, part.survey))
        noise = noise if noise is not None else noise_of(reference)
        notes += [f"{name}: {note}" if name else note for note in _notes(part_runs, part.survey, part_rows)]
    verdict = verdicts[0]
    if len(parts) > 1:
        text = " ".join(f"On {name}: {v.text}" for name, v in zip(names, verdicts, strict=True))
        verdict = dataclasses.replace(verdict, text=text)
    surveys = tuple(part.survey for part in parts)
    return Comparison(tuple(rows), verdict, tuple(runs), surveys, noise, tuple(notes), Path(folders[0]), stopped_by)


@dataclass(frozen=True)
class Part:
    """The runs of one machine."""

    survey: Survey
    runs: tuple[RunRecord, ...]


def _read_part(folder: Path) -> Part:
    if not (folder / SURVEY).exists():
        raise SettingError(f"There is no comparison in {folder} ({SURVEY} is missing); pass the --out of one.")
    return Part(read_survey(folder), tuple(read_run(path) for path in run_files(folder)))


def merge_parts(parts: Sequence[Part]) -> list[Part]:
    """Merge directories of the same machine, job, batch and settings whose rows are all different."""
    merged: list[Part] = []
    for part in parts:
        number = next((i for i, other in enumerate(merged) if _belong(other, part)), None)
        if number is None:
            merged.append(part)
        else:
            merged[number] = _join(merged[number], part)
    return merged


def _belong(one: Part, other: Part) -> bool:
    return _conditions(one.survey) == _conditions(other.survey) and not {*one.survey.labels} & {*other.survey.labels}


def _conditions(survey: Survey) -> tuple[Any, ...]:
    """Everything that must be equal for rows to be comparable."""
    job = (survey.machine, survey.source, survey.batch, survey.device, survey.num_params)
    settings = (getattr(survey.settings, key) for key in _SHARED_SETTINGS)
    return (*job, survey.environment.get("torch"), survey.threads, *settings)


def _join(one: Part, other: Part) -> Part:
    note = "The rows come from several directories; only those of the same directory took turns with each other."
    survey = dataclasses.replace(
        one.survey,
        variants=(*one.survey.variants, *other.survey.variants),
        reference="fp32" if other.survey.reference == "fp32" else one.survey.reference,
        stopped=one.survey.stopped or other.survey.stopped,
        notes=tuple(dict.fromkeys([*one.survey.notes, *other.survey.notes, note])),
        command=(*one.survey.command, "&&", *other.survey.command),
    )
    return Part(survey, (*one.runs, *other.runs))


def _rows_of(runs: list[RunRecord], survey: Survey, machine: str) -> tuple[list[Row], list[RunRecord]]:
    by_label = {label: [run for run in runs if run.variant.label == label] for label in survey.labels}
    reference = by_label.get(survey.reference, [])
    if reference and reference[0].variant.compute != "fp32":
        reference = []  # without an fp32 row there is no reference
    rows = [
        build_row(sorted(group, key=lambda r: r.repeat), reference, survey, _named(label, machine))
        for label, group in by_label.items()
        if group
    ]
    return rows, reference


def _notes(runs: list[RunRecord], survey: Survey, rows: list[Row]) -> list[str]:
    notes = [*survey.notes, *_mismatches(runs)]
    reference = [run for run in runs if run.variant.label == survey.reference and run.failure is None]
    if len(reference) > 1 and not seeds_differ(reference):
        notes.append(
            "Every seed gives the same weights and the same first batch, so the repeats measure speed but not the noise of fp32's loss. "
            "Use torch's generator in the job without seeding it, or add a `seed` argument to its functions."
        )
    if survey.stopped:
        notes.append(_stop_note(runs, survey, rows))
    elif slow := [run for run in runs if run.measured.stopped_after is not None]:
        labels = dict.fromkeys(f"{run.variant.label} after {run.measured.stopped_after}" for run in slow)
        notes.append(
            f"Cut short, and not repeated after that: {', '.join(labels)} of {slow[0].settings.steps} steps, so much slower than the reference that "
            "more steps would take long and add no information."
        )
    for run in runs:
        label, measured = run.variant.label, run.measured
        if measured.split_failed is not None:
            notes.append(f"{label}: timing the phases of a step failed ({measured.split_failed}).")
        if measured.census_failed is not None:
            notes.append(f"{label}: the operator census failed ({measured.census_failed}).")
        if measured.numerics_failed is not None:
            notes.append(f"{label}: its underflow was not measured: {measured.numerics_failed}.")
        if measured.validation_cut is not None:
            notes.append(
                f"Validation used the first {measured.validation_cut} batches, as many as there are training steps, because its data "
                "has no length."
            )
    notes += [f"{row.label}: {note}" for row in rows for note in row.notes]
    notes += _compiled_notes(rows)
    return list(dict.fromkeys(notes + _misaligned(rows, survey)))


def _mismatches(runs: list[RunRecord]) -> list[str]:
    """Repeats whose rows did not start from the same weights and batch."""
    notes = []
    for name, words in (("weights_digest", "initial weights"), ("batch_digest", "first batch")):
        digests: dict[int, set[str]] = {}
        for run in runs:
            if (digest := getattr(run.measured, name)) is not None:
                digests.setdefault(run.repeat, set()).add(digest)
        notes += [
            f"The {words} of repeat {repeat} differ between rows, so their losses are not comparable."
            for repeat in sorted(digests)
            if len(digests[repeat]) > 1
        ]
    return notes


def _compiled_notes(rows: list[Row]) -> list[str]:
    """How far the gradients of a compiled row are from those of the same row without compilation, and both from fp32's."""
    notes = []
    for row in rows:
        eager = next((other for other in rows if row.variant.is_compiled_form_of(other.variant)), None)
        if eager is None or row.eager_error is None:
            continue
        note = (
            f"{row.label}: its first gradients differ from those of {eager.label} by {row.eager_error:.2g} (relative)"
        )
        if row.gradient_error is not None and eager.gradient_error is not None:
            note += f"; from fp32's they differ by {row.gradient_error:.2g}, those of {eager.label} by {eager.gradient_error:.2g}"
        notes.append(f"{note}.")
    return notes


def _stop_note(runs: list[RunRecord], survey: Survey, rows: list[Row]) -> str:
    missing = len(survey.variants) - len(rows)
    short = sum(run.measured.stopped_after is not None for run in runs)
    gaps = [f"{missing} of {count_text(len(survey.variants), 'row')} did not run"] if missing else []
    gaps += [f"{count_text(short, 'run')} ended before the last step"] if short else []
    note = f"The comparison was stopped early{': ' * bool(gaps)}{' and '.join(gaps)}."
    most = max((row.num_runs for row in rows), default=0)
    fewer = [f"{row.label} ({row.num_runs})" for row in rows if row.num_runs < most]
    if fewer:  # their losses are means over other seeds
        note += (
            f" Only part of the {most} repeats is complete for {', '.join(fewer)}: compare their losses by the gap to fp32, which is "
            "computed seed by seed."
        )
    return note


def _misaligned(rows: list[Row], survey: Survey) -> list[str]:
    """Shapes that may miss tensor cores, on a GPU."""
    labels: dict[str, list[str]] = {}
    for row in rows if survey.device == "cuda" else ():
        for item in (row.census or {}).get("misaligned", []):
            labels.setdefault("x".join(map(str, item["shape"])), []).append(row.label)
    return [
        f"Matrix products of shape {shape} have a dimension that is not a multiple of 8 and may miss tensor cores ({', '.join(names)})."
        for shape, names in labels.items()
    ]


def _machine_names(surveys: Sequence[Survey]) -> list[str]:
    """The names that distinguish machines; empty where there is only one."""
    if len(surveys) < 2:
        return [""] * len(surveys)
    names = [survey.place for survey in surveys]
    return [f"{name} #{i + 1}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _named(label: str, machine: str) -> str:
    return f"{label} @ {machine}" if machine else label


def _curves(run: RunRecord) -> dict[str, Any]:
    return {
        "label": _named(run.variant.label, run.machine),
        "repeat": run.repeat,
        "seed": run.seed,
        "loss": list(run.loss),
        "grad_norm": list(run.grad_norm),
        "scale": list(run.scale),
        "skipped": [i + 1 for i, skipped in enumerate(run.skipped) if skipped],
        "seconds": run.seconds,
    }


def _sample(run: RunRecord) -> dict[str, Any]:
    """The exponents of a run, in the form of its run file."""
    assert run.sample is not None
    values: dict[str, Any] = {
        name: run.sample[name] for name in ("step", "scale", "gradients", "activations") if name in run.sample
    }
    return {"label": _named(run.variant.label, run.machine), "compute": run.variant.compute, **values}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
