"""`halfstep compare`: run a job in several precisions and compare speed, memory and learning."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from halfstep.cli.options import FilePath, data_option
from halfstep.cli.requirements import require_packages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from halfstep.comparison.result import Comparison
    from halfstep.comparison.runner import Observer
    from halfstep.planning.ranks.hours import Budget

__all__ = ["command"]

_EXIT = {"SIGINT": 130, "SIGTERM": 143}


@click.command("compare")
@click.argument("targets", metavar="[TARGET]", nargs=-1)
@click.option(
    "--precision",
    "-p",
    multiple=True,
    metavar="P",
    help="Preset or policy, optionally with compile=on; may be repeated.",
)
@click.option(
    "--peer",
    multiple=True,
    metavar="NAME",
    help="Baseline on the same job: torch-amp, accelerate or fabric, also as NAME:fp16; may be repeated.",
)
@click.option("--steps", type=int, metavar="N", help="Training steps per run (default 200).")
@click.option("--repeats", type=int, metavar="N", help="Runs per precision, each with its own seed (default 3).")
@click.option("--batch", type=int, metavar="N", help="Batch size, of all ranks together.")
@click.option(
    "--backend",
    type=click.Choice(["single", "ddp", "fsdp"]),
    help="How ranks train together (default: ddp with --ranks above 1).",
)
@click.option(
    "--ranks", type=int, metavar="N", help="Processes that train each row together, started here (default 1)."
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="K=V",
    help="Set seed, max_norm, warmup, device, timeout or gpu (whose peak a CPU predicts); may be repeated.",
)
@data_option
@click.option("--out", type=FilePath(), metavar="DIR", help="Output directory (default: a new one under runs/).")
@click.option("--force", is_flag=True, help="Replace an earlier comparison in --out.")
@click.option(
    "--from",
    "folders",
    multiple=True,
    type=FilePath(),
    metavar="DIR",
    help="Run nothing; report on the runs in this directory; may be repeated.",
)
@click.option(
    "--resume",
    type=FilePath(),
    metavar="DIR",
    help="Finish the interrupted comparison in this directory.",
)
@click.option(
    "--fail-if",
    "gates",
    multiple=True,
    metavar="EXPR",
    help='Exit with 3 if this is true, e.g. "bf16.loss_gap > 0.02"; may be repeated.',
)
@click.option("--epochs", type=float, metavar="N", help="Print GPU-hours for this many epochs at the measured speed.")
@click.option("--examples", type=int, metavar="N", help="Training examples in an epoch (default: the job's).")
@click.option("--price", type=float, metavar="X", help="Price of a GPU-hour; also print the cost.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, without progress.")
def command(
    targets: tuple[str, ...],
    precision: tuple[str, ...],
    peer: tuple[str, ...],
    steps: int | None,
    repeats: int | None,
    batch: int | None,
    backend: str | None,
    ranks: int | None,
    settings: tuple[str, ...],
    data_dir: Path | None,
    out: Path | None,
    force: bool,
    folders: tuple[Path, ...],
    resume: Path | None,
    gates: tuple[str, ...],
    epochs: float | None,
    examples: int | None,
    price: float | None,
    as_json: bool,
) -> None:
    """Train TARGET in several precisions and compare speed, memory and learning.

    TARGET is a job file, module:name, a built-in name, timm:NAME, torchvision:NAME or transformers:DIR_OR_CONFIG
    (default: digits). Every run is a separate process with the same
    initial weights and batches; runs are interleaved, so that changes in machine load affect all of them alike. Writes
    report.html, comparison.json and one run file per run.

    \b
    halfstep compare
    halfstep compare job.py -p fp32 -p bf16 -p bf16,compile=on --peer torch-amp
    halfstep compare --fail-if "bf16.loss_gap > 0.02 or bf16.speedup < 1.5"
    halfstep compare --from runs/on-a100 --from runs/on-h200
    halfstep compare --resume runs/compare-digits-20261115-101500
    halfstep compare job.py --epochs 90 --price 2.5
    halfstep compare job.py --backend fsdp --ranks 4 --batch 256
    """
    require_packages("halfstep compare", "numpy", "safetensors", *(() if folders else ("jinja2", "plotly")))
    from halfstep.backends.launch import reject_distributed_launch

    reject_distributed_launch("halfstep compare")
    budget = _budget(epochs, examples, price, targets, data_dir, rerun=bool(folders) or resume is not None)
    options = {
        "--precision": precision, "--peer": peer, "--steps": steps, "--repeats": repeats, "--batch": batch, "--set": settings,
        "--data": data_dir, "--backend": backend, "--ranks": ranks,
    }  # fmt: skip
    if resume is not None:
        for flag, value in {**options, "TARGET": targets, "--from": folders, "--out": out, "--force": force}.items():
            if value:
                raise click.UsageError(
                    f"{flag} cannot be combined with --resume, which keeps the settings of the comparison."
                )
        comparison = _resume(resume, gates, quiet=as_json)
        where = resume
    elif folders:
        for flag, value in options.items():
            if value:
                raise click.UsageError(f"{flag} has no effect with --from, which reports on completed runs.")
        with _named_file_errors():
            comparison, where = _rebuild((*folders, *map(Path, targets)), out, force=force)
    else:
        if len(targets) > 1:
            raise click.UsageError(f"Expected one TARGET, got {len(targets)}: {', '.join(targets)}.")
        comparison = _run(
            targets[0] if targets else None, precision, peer,
            _settings(settings, steps=steps, repeats=repeats, batch=batch, backend=backend, ranks=ranks), data_dir, out, gates,
            force=force, quiet=as_json,
        )  # fmt: skip
        where = comparison.out
    _report(comparison, where, gates, budget, as_json=as_json)


def _budget(
    epochs: float | None,
    examples: int | None,
    price: float | None,
    targets: tuple[str, ...],
    data_dir: Path | None,
    *,
    rerun: bool,
) -> Budget | None:
    """What GPU-hours are for; the job's number of examples is read before anything runs."""
    if epochs is None and examples is None and price is None:
        return None
    from halfstep.jobs.targets import load_target
    from halfstep.planning.ranks.hours import make_budget

    reads_job = epochs is not None and examples is None and not rerun and len(targets) < 2
    job = load_target(targets[0] if targets else None, data_dir=data_dir).job if reads_job else None
    return make_budget(epochs, examples, price, job)


def _settings(pairs: tuple[str, ...], **flags: Any) -> dict[str, Any]:
    from halfstep.comparison.settings import parse_settings
    from halfstep.errors import SettingError

    overrides = parse_settings(pairs)
    for name, value in flags.items():
        if value is not None:
            if name in overrides:
                raise SettingError(f"{name} is set twice, by --{name} and by --set; remove one.")
            overrides[name] = value
    return overrides


def _run(
    target: str | None,
    precision: tuple[str, ...],
    peer: tuple[str, ...],
    settings: dict[str, Any],
    data_dir: Path | None,
    out: Path | None,
    gates: tuple[str, ...],
    *,
    force: bool,
    quiet: bool,
) -> Comparison:
    from halfstep.comparison import compare
    from halfstep.comparison.variant import DEFAULT_PRECISIONS

    with _named_file_errors(), _progress(quiet=quiet) as progress:
        return compare(
            target,
            precision or DEFAULT_PRECISIONS,
            peers=peer,
            out=out,
            force=force,
            data_dir=data_dir,
            fail_if=gates,
            observer=progress,
            **settings,
        )


def _resume(folder: Path, gates: tuple[str, ...], *, quiet: bool) -> Comparison:
    from halfstep.comparison.compare import resume_comparison

    with _named_file_errors(), _progress(quiet=quiet) as progress:
        return resume_comparison(folder, fail_if=gates, observer=progress)


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Observer | None]:
    """The live display, or None."""
    from halfstep.report.compare import CompareProgress

    progress = None if quiet else CompareProgress()
    try:
        yield progress
    finally:
        if progress is not None:
            progress.close()


@contextlib.contextmanager
def _named_file_errors() -> Iterator[None]:
    """Turn an OSError (no permission, disk full) into one message that names the file."""
    from halfstep.errors import HalfstepError

    try:
        yield
    except OSError as error:
        file = error.filename or "A file of the comparison"
        raise HalfstepError(
            f"{file} cannot be read or written: {error.strerror or error}. Free disk space or pass another --out; "
            "--resume continues a comparison that has started."
        ) from error


def _rebuild(folders: tuple[Path, ...], out: Path | None, *, force: bool) -> tuple[Comparison, Path]:
    """A comparison from existing run files; written next to them if there is one directory and no --out."""
    from halfstep.comparison import read_comparison
    from halfstep.comparison.compare import PAGE, RESULT, new_folder, prepare_out
    from halfstep.errors import SettingError

    comparison = read_comparison(folders)
    sources = [folder.resolve() for folder in folders]
    inside = out is not None and out.resolve() in sources
    if inside and len(folders) > 1:  # clearing it for the new report would delete its own runs
        raise SettingError(f"--out {out} is one of the directories that --from reads; pass another --out.")
    if len(folders) == 1 and (out is None or inside):
        where = folders[0]
        if (where / PAGE).exists() and not force:
            raise SettingError(f"{where / PAGE} exists; pass --force to replace it, or another --out.")
    else:
        where = out or new_folder(None)
        prepare_out(where, force=force)
        where.mkdir(parents=True, exist_ok=True)
    (where / RESULT).write_text(json.dumps(comparison.as_dict(), indent=1) + "\n", encoding="utf-8")
    return comparison, where


def _report(
    comparison: Comparison, where: Path, gates: tuple[str, ...], budget: Budget | None, *, as_json: bool
) -> None:
    from halfstep.comparison.compare import PAGE, RESULT
    from halfstep.errors import MissingError
    from halfstep.events import terminal_width
    from halfstep.report.compare import WIDTH, as_text
    from halfstep.report.page import render_page
    from halfstep.report.ranks.compare import hours_text, row_hours
    from halfstep.report.theme import uses_colour

    files = [("data", where / RESULT)]
    missing = ""
    try:
        with _named_file_errors():
            (where / PAGE).write_text(render_page(comparison), encoding="utf-8")
        files.insert(0, ("report", where / PAGE))
    except MissingError as error:
        missing = f"{error}. Then: halfstep compare --from {where}"
    results = [comparison.gate(text) for text in gates]
    if as_json:
        values = comparison.as_dict() | {
            "gates": [{"text": r.text, "failed": r.failed, "seen": r.values} for r in results]
        }
        if budget is not None:
            values["hours"] = row_hours(comparison, budget)
        click.echo(json.dumps(values, indent=1))
    else:
        width = terminal_width(sys.stdout) or WIDTH
        colour = uses_colour(sys.stdout)
        text = as_text(comparison, files, results, colour=colour, width=width)
        click.echo(text if budget is None else f"{text}\n\n{hours_text(comparison, budget)}")
    if missing:
        click.echo(missing, err=True)
    if comparison.stopped_by:
        click.echo(f"To finish it: halfstep compare --resume {where}", err=True)
        sys.exit(_EXIT[comparison.stopped_by])
    if any(result.failed for result in results):
        sys.exit(3)
    if not any(row.status == "done" for row in comparison.rows):
        sys.exit(1)
