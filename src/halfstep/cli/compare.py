"""`halfstep compare`: the same job in several precisions, and what each bought."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from halfstep.comparison.result import Comparison
    from halfstep.comparison.runner import Observer

__all__ = ["command"]

_EXIT = {"SIGINT": 130, "SIGTERM": 143}


@click.command("compare")
@click.argument("targets", metavar="[TARGET]", nargs=-1)
@click.option(
    "--precision", "-p", multiple=True, metavar="P", help="A preset or policy, also with compile=on; may be repeated."
)
@click.option(
    "--peer", multiple=True, metavar="NAME", help="torch-amp, accelerate or fabric on the same job; NAME:fp16 too."
)
@click.option("--steps", type=int, metavar="N", help="Training steps of each run (default 200).")
@click.option("--repeats", type=int, metavar="N", help="Runs of each row, each with its own seed (default 3).")
@click.option("--batch", type=int, metavar="N", help="Examples in a batch.")
@click.option(
    "--set", "settings", multiple=True, metavar="K=V", help="Set seed, max_norm, warmup or device; may be repeated."
)
@click.option(
    "--data", "data_dir", type=click.Path(path_type=Path), metavar="DIR", help="An ImageNet-style folder for the ViTs."
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Where everything is written (default: under runs/)."
)
@click.option("--force", is_flag=True, help="Replace an earlier comparison in --out.")
@click.option(
    "--from",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Run nothing; report on these directories.",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Finish a comparison that was stopped, in its place.",
)
@click.option(
    "--fail-if", "gates", multiple=True, metavar="EXPR", help='Exit with 3 if this holds, e.g. "bf16.loss_gap > 0.02".'
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON and show no progress.")
def command(
    targets: tuple[str, ...],
    precision: tuple[str, ...],
    peer: tuple[str, ...],
    steps: int | None,
    repeats: int | None,
    batch: int | None,
    settings: tuple[str, ...],
    data_dir: Path | None,
    out: Path | None,
    force: bool,
    folders: tuple[Path, ...],
    resume: Path | None,
    gates: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train TARGET (a job file, module:name or built-in; digits by default) in several precisions and compare them.

    Every run is a process of its own, with the same weights and batches; the rows take turns, so that whatever the
    machine does, it does to all of them. Writes report.html, comparison.json and one run file per run.

    \b
    halfstep compare
    halfstep compare job.py -p fp32 -p bf16 -p bf16-lean,compile=on --peer torch-amp --steps 500
    halfstep compare --fail-if "bf16.loss_gap > 0.02 or bf16.speedup < 1.5"
    halfstep compare --from runs/on-a100 --from runs/on-h200
    halfstep compare --resume runs/compare-digits-20261115-101500
    """
    given = {
        "--precision": precision, "--peer": peer, "--steps": steps, "--repeats": repeats, "--batch": batch, "--set": settings,
        "--data": data_dir,
    }  # fmt: skip
    if resume is not None:
        for flag, value in {**given, "TARGET": targets, "--from": folders, "--out": out, "--force": force}.items():
            if value:
                raise click.UsageError(
                    f"{flag} does not go with --resume, which finishes a comparison as it was begun."
                )
        comparison = _go_on(resume, gates, quiet=as_json)
        where = resume
    elif folders:
        for flag, value in given.items():
            if value:
                raise click.UsageError(f"{flag} has no effect on runs that are done; --from only reads them.")
        with _files_named():
            comparison, where = _rebuild((*folders, *map(Path, targets)), out, force=force)
    else:
        if len(targets) > 1:
            raise click.UsageError(
                f"One TARGET is compared at a time; {len(targets)} were given: {', '.join(targets)}."
            )
        comparison = _run(
            targets[0] if targets else None, precision, peer, _settings(settings, steps, repeats, batch), data_dir, out, gates,
            force=force, quiet=as_json,
        )  # fmt: skip
        where = comparison.out
    _report(comparison, where, gates, as_json=as_json)


def _settings(pairs: tuple[str, ...], steps: int | None, repeats: int | None, batch: int | None) -> dict[str, Any]:
    from halfstep.comparison.settings import parse_settings
    from halfstep.errors import SettingError

    found = parse_settings(pairs)
    for name, value in (("steps", steps), ("repeats", repeats), ("batch", batch)):
        if value is not None:
            if name in found:
                raise SettingError(f"{name} is given twice, by --{name} and by --set; keep one.")
            found[name] = value
    return found


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

    with _files_named(), _progress(quiet=quiet) as shown:
        return compare(
            target,
            precision or DEFAULT_PRECISIONS,
            peers=peer,
            out=out,
            force=force,
            data_dir=data_dir,
            fail_if=gates,
            observer=shown,
            **settings,
        )


def _go_on(folder: Path, gates: tuple[str, ...], *, quiet: bool) -> Comparison:
    from halfstep.comparison.compare import resume_comparison

    with _files_named(), _progress(quiet=quiet) as shown:
        return resume_comparison(folder, fail_if=gates, observer=shown)


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Observer | None]:
    """The live display, or nobody who watches."""
    from halfstep.report.compare import CompareProgress

    shown = None if quiet else CompareProgress()
    try:
        yield shown
    finally:
        if shown is not None:
            shown.close()


@contextlib.contextmanager
def _files_named() -> Iterator[None]:
    """A file that cannot be read or written (no permission, no room) is one message, as any other mistake."""
    from halfstep.errors import HalfstepError

    try:
        yield
    except OSError as error:
        file = error.filename or "A file of the comparison"
        raise HalfstepError(
            f"{file} cannot be read or written: {error.strerror or error}. Make room or give another --out; a comparison that had "
            "begun goes on with --resume."
        ) from error


def _rebuild(folders: tuple[Path, ...], out: Path | None, *, force: bool) -> tuple[Comparison, Path]:
    """A comparison out of earlier run files; written beside them if there is one directory and no --out."""
    from halfstep.comparison import read_comparison
    from halfstep.comparison.compare import PAGE, RESULT, new_folder, prepare_out
    from halfstep.errors import SettingError

    comparison = read_comparison(folders)
    sources = [folder.resolve() for folder in folders]
    inside = out is not None and out.resolve() in sources
    if inside and len(folders) > 1:  # clearing it for the new report would take the runs away that it is made of
        raise SettingError(f"--out {out} is one of the directories that --from reads; give another --out.")
    if len(folders) == 1 and (out is None or inside):
        where = folders[0]
        if (where / PAGE).exists() and not force:
            raise SettingError(f"{where / PAGE} exists; give --force to replace it, or another --out.")
    else:
        where = out or new_folder(None)
        prepare_out(where, force=force)
        where.mkdir(parents=True, exist_ok=True)
    (where / RESULT).write_text(json.dumps(comparison.as_dict(), indent=1) + "\n", encoding="utf-8")
    return comparison, where


def _report(comparison: Comparison, where: Path, gates: tuple[str, ...], *, as_json: bool) -> None:
    from halfstep.comparison.compare import PAGE, RESULT
    from halfstep.errors import MissingError
    from halfstep.report.compare import WIDTH, as_text
    from halfstep.report.page import render_page

    files = [("figures", where / RESULT)]
    aside = ""
    try:
        with _files_named():
            (where / PAGE).write_text(render_page(comparison), encoding="utf-8")
        files.insert(0, ("report", where / PAGE))
    except MissingError as error:
        aside = f"{error} Then: halfstep compare --from {where}"
    answers = [comparison.gate(text) for text in gates]
    if as_json:
        values = comparison.as_dict() | {
            "gates": [{"text": a.text, "failed": a.failed, "seen": a.values} for a in answers]
        }
        click.echo(json.dumps(values, indent=1))
    else:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else WIDTH
        colour = terminal and not os.environ.get("NO_COLOR")
        click.echo(as_text(comparison, files, answers, colour=colour, width=width))
    if aside:
        click.echo(aside, err=True)
    if comparison.stopped_by:
        click.echo(f"To make the runs that are missing: halfstep compare --resume {where}", err=True)
        sys.exit(_EXIT[comparison.stopped_by])
    if any(answer.failed for answer in answers):
        sys.exit(3)
    if not any(row.status == "done" for row in comparison.rows):
        sys.exit(1)
