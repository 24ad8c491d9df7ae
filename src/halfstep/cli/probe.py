"""`halfstep probe`: which formats this machine or a named GPU runs natively, and which precision to use."""

from __future__ import annotations

import json
import sys

import click

from halfstep.events import terminal_width
from halfstep.hardware.advisories import advisories_for
from halfstep.hardware.installed import this_environment
from halfstep.hardware.measure import Measured, confirm, measure_matmuls
from halfstep.hardware.probe import find_gpu, probe
from halfstep.precision.choice import choose
from halfstep.report.probe import WIDTH, as_data, as_text
from halfstep.report.theme import uses_colour

__all__ = ["command"]


@click.command("probe")
@click.option("--gpu", metavar="NAME", help="Describe this GPU instead of the machine, e.g. A100, 'RTX 4090' or sm90.")
@click.option("--measure", is_flag=True, help="Also measure matmul speed in each format (about 1.5 seconds).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(gpu: str | None, measure: bool, as_json: bool) -> None:
    """Show which formats this machine (or a named GPU) runs natively and which precision to use.

    Every format that is not chosen is listed with the reason, and so are known defects of the installed libraries.

    \b
    halfstep probe
    halfstep probe --gpu T4
    halfstep probe --measure --json
    """
    if gpu is not None and measure:
        raise click.UsageError(
            f"--measure measures this machine and cannot be combined with --gpu {gpu}. Remove one of the two."
        )
    hardware = probe() if gpu is None else find_gpu(gpu)
    choice = choose(hardware)
    measured: tuple[Measured, ...] = ()
    statements: tuple[str, ...] = ()
    if measure:
        measured = measure_matmuls()
        statements = confirm(hardware, measured)
    # A GPU that is not here runs with libraries that are not here.
    advisories = advisories_for(this_environment(hardware)) if gpu is None else ()
    if as_json:
        click.echo(json.dumps(as_data(hardware, choice, measured, statements, advisories), indent=2))
        return
    width = terminal_width(sys.stdout) or WIDTH
    colour = uses_colour(sys.stdout)
    click.echo(as_text(hardware, choice, measured, statements, advisories, colour=colour, width=width))
