"""`halfstep rehearse`: a few fp32 steps, what other formats would do to their numbers, and a policy that avoids it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from halfstep.cli.options import FilePath, data_option
from halfstep.cli.outputs import check_file
from halfstep.cli.requirements import require_packages

if TYPE_CHECKING:
    from halfstep.comparison.result import Comparison
    from halfstep.rehearsal import Rehearsal

__all__ = ["command"]

_FINDINGS = 3
_CONFIRM_STEPS, _CONFIRM_REPEATS = 50, 2


@click.command("rehearse")
@click.argument("target", required=False)
@click.option(
    "--precision", "-p", default="fp16", show_default=True, metavar="P", help="Policy to predict: fp16 or bf16 compute."
)
@click.option("--steps", type=int, default=20, show_default=True, metavar="N", help="Number of fp32 steps.")
@click.option("--batch", type=int, metavar="N", help="Batch size (default: the target's).")
@click.option("--set", "settings", multiple=True, metavar="K=V", help="Set seed, max_norm or device; may be repeated.")
@data_option
@click.option("--confirm", is_flag=True, help="Also train in fp32, fp16 and the proposal, and compare them.")
@click.option(
    "--out",
    type=FilePath(),
    metavar="DIR",
    help="Directory of --confirm (default: a new one under runs/).",
)
@click.option("--html", type=FilePath(), metavar="FILE", help="Also write an HTML page with heat maps.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    target: str | None,
    precision: str,
    steps: int,
    batch: int | None,
    settings: tuple[str, ...],
    data_dir: Path | None,
    confirm: bool,
    out: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Train TARGET for a few fp32 steps, predict what overflows or underflows in fp16, and propose a policy.

    TARGET is a job file, module:name, a built-in name, timm:NAME, torchvision:NAME or transformers:DIR_OR_CONFIG
    (default: digits). Exits with 3 if something is out of range in the precision.

    \b
    halfstep rehearse
    halfstep rehearse job.py --steps 50 --html rehearsal.html
    halfstep rehearse job.py --precision fp16,keep_fp32=head
    halfstep rehearse job.py --confirm
    """
    from halfstep.errors import SettingError

    require_packages("halfstep rehearse", "numpy", *(["jinja2"] if html is not None else []))
    if out is not None and not confirm:
        raise SettingError("--out has no effect without --confirm, which trains; add it or remove --out.")
    if html is not None:
        check_file("--html", html)
    if out is not None:
        from halfstep.comparison.compare import prepare_out
        from halfstep.train.checkpoints import check_out

        check_out(out)
        prepare_out(out, force=False)
    from halfstep.backends.launch import reject_distributed_launch
    from halfstep.rehearsal import rehearse

    reject_distributed_launch("halfstep rehearse")
    options = _settings(settings)
    rehearsal = rehearse(
        target, precision, steps=steps, batch=batch, data_dir=None if data_dir is None else str(data_dir), **options
    )
    if html is not None:
        from halfstep.report.rehearsal.page import render_rehearsal_page

        html.write_text(render_rehearsal_page(rehearsal), encoding="utf-8")
    comparison = None
    if confirm:
        comparison = _confirm(rehearsal, target, data_dir, out, batch, options, quiet=as_json)
    _show(rehearsal, comparison, html, as_json=as_json)
    if rehearsal.troubles:
        sys.exit(_FINDINGS)


def _settings(pairs: tuple[str, ...]) -> dict[str, Any]:
    from halfstep.comparison.settings import parse_settings
    from halfstep.errors import unknown

    known = ("seed", "max_norm", "device")
    for pair in pairs:
        if (name := pair.partition("=")[0].strip()) not in known:
            raise unknown("setting", name, known)
    return parse_settings(pairs)


def _confirm(
    rehearsal: Rehearsal,
    target: str | None,
    data_dir: Path | None,
    out: Path | None,
    batch: int | None,
    options: dict[str, Any],
    *,
    quiet: bool,
) -> Comparison:
    from halfstep.comparison import compare
    from halfstep.report.compare import CompareProgress

    precisions = dict.fromkeys(("fp32", rehearsal.policy, rehearsal.proposal.policy))
    steps = max(_CONFIRM_STEPS, rehearsal.steps)
    progress = None if quiet else CompareProgress()
    try:
        return compare(
            target,
            precisions,
            steps=steps,
            repeats=_CONFIRM_REPEATS,
            batch=batch,
            out=out,
            data_dir=data_dir,
            observer=progress,
            **options,
        )
    finally:
        if progress is not None:
            progress.close()


def _show(rehearsal: Rehearsal, comparison: Comparison | None, html: Path | None, *, as_json: bool) -> None:
    if as_json:
        values = rehearsal.as_dict()
        if comparison is not None:
            values["comparison"] = comparison.as_dict()
        click.echo(json.dumps(values, indent=1))
        return
    from halfstep.report.rehearsal.text import as_text

    click.echo(as_text(rehearsal))
    if comparison is not None:
        from halfstep.comparison.compare import RESULT
        from halfstep.events import terminal_width
        from halfstep.report.compare import WIDTH
        from halfstep.report.compare import as_text as comparison_text

        width = terminal_width(sys.stdout) or WIDTH
        files = [("data", comparison.out / RESULT)]
        click.echo("\n" + comparison_text(comparison, files, [], colour=False, width=width))
    if html is not None:
        click.echo(f"\nWrote {html}")
