"""`halfstep watch`: a live view of a run, from its run file."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from halfstep.cli.options import FilePath
from halfstep.cli.outputs import check_file

if TYPE_CHECKING:
    from halfstep.report.numerics.view import RunView

__all__ = ["command", "write_page"]

RUN_FILE = "run.jsonl"
_READING = 5  # times as long as reading a run file takes is waited at least before it is read again


@click.command("watch")
@click.argument("run", type=FilePath())
@click.option("--html", type=FilePath(), metavar="FILE", help="Write the view as a page and exit.")
@click.option("--once", is_flag=True, help="Print the view once and exit.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=2.0, metavar="S", help="Seconds between updates (2)."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print a summary as JSON and exit: last step, events, truth table."
)
def command(run: Path, html: Path | None, once: bool, interval: float, as_json: bool) -> None:
    """Show the losses, the loss scale, skipped steps and the worst tensors of a RUN, live while it trains.

    RUN is the directory of a run or its run file. The view ends with the run, or with Ctrl-C; training is not affected.

    \b
    halfstep watch runs/digits-fp16-20261115-101500
    halfstep watch runs/digits-fp16-20261115-101500 --html run.html
    halfstep watch runs/digits-fp16-20261115-101500 --json
    """
    path = _run_file(run)
    if as_json:
        _print_json(path, html, once=once)
        return
    if html is not None:
        check_file("--html", html)
        write_page(path, html)
        click.echo(f"written {html}")
        return
    from rich.console import Console

    from halfstep.report.numerics.text import render_view
    from halfstep.report.theme import console_options

    console = Console(**console_options(sys.stdout))
    if once or not console.is_terminal:
        console.print(render_view(_read(path), console))
        return
    from rich.live import Live

    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                started = time.perf_counter()
                view = _read(path)
                height = None if view.ended else console.height - 1  # what is below the last line would not be seen
                live.update(render_view(view, console, height=height), refresh=True)
                if view.ended:
                    return
                time.sleep(max(interval, _READING * (time.perf_counter() - started)))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("view closed; the run is not affected.") from None


def _run_file(run: Path) -> Path:
    from halfstep.errors import SettingError

    path = run / RUN_FILE if run.is_dir() else run
    if not path.is_file():
        raise SettingError(f"There is no run file {path}; pass the directory that `halfstep train --out` wrote.")
    return path


def _print_json(path: Path, html: Path | None, *, once: bool) -> None:
    if html is not None or once:
        raise click.UsageError("--json prints a summary and exits; remove --html and --once.")
    import json

    from halfstep.checkpoint.runlog import read_runlog
    from halfstep.report.numerics.summary import run_data

    click.echo(json.dumps(run_data(read_runlog(path)), indent=2))


def _read(path: Path) -> RunView:
    from halfstep.checkpoint.runlog import read_runlog
    from halfstep.report.numerics.view import view_of

    return view_of(read_runlog(path))


def write_page(path: Path, html: Path) -> None:
    """Write the page of a run file."""
    from halfstep.report.numerics.page import render_watch_page

    html.write_text(render_watch_page(_read(path)), encoding="utf-8")
