"""`halfstep check`: precision mistakes in scripts, notebooks and configurations."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from halfstep.check.session import Outcome

__all__ = ["command"]

FORMATS = ("text", "json", "sarif", "github")


@click.command("check")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option(
    "--select",
    multiple=True,
    metavar="RULES",
    help="Only these rules: codes, prefixes, names or severities, separated by commas.",
)
@click.option("--ignore", multiple=True, metavar="RULES", help="All rules except these.")
@click.option("--fix", is_flag=True, help="Apply the fixes that are safe.")
@click.option("--diff", is_flag=True, help="Show the fixes as a diff without applying them.")
@click.option(
    "--unsafe-fixes/--no-unsafe-fixes",
    default=None,
    help="With --fix and --diff: include fixes that need review (default: as pyproject.toml sets it, else no).",
)
@click.option("--format", "style", default="text", show_default=True, metavar="|".join(FORMATS), help="Output format.")
@click.option(
    "--deepspeed", metavar="VERSION", help="Check configurations against this version (default: the installed one)."
)
@click.option(
    "--transformers",
    metavar="VERSION",
    help="The version of transformers that the scripts run with (default: installed).",
)
@click.option(
    "--gpu", metavar="NAME", help="Also report settings that this GPU does not support (auto: query nvidia-smi)."
)
@click.option("--stdin-filename", metavar="NAME", help="File name for standard input (-); default: stdin.py.")
def command(
    paths: tuple[str, ...],
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    fix: bool,
    diff: bool,
    unsafe_fixes: bool | None,
    style: str,
    deepspeed: str | None,
    transformers: str | None,
    gpu: str | None,
    stdin_filename: str | None,
) -> None:
    """Find precision mistakes in scripts, notebooks and configurations, without running them.

    PATH is a file, a directory (default: the current one), or - for standard input. Exits with 3 if there are findings.

    \b
    halfstep check
    halfstep check train.py ds_config.json --deepspeed 0.16.4 --gpu T4
    halfstep check src --select HS1 --ignore advice --diff
    halfstep explain HS104
    """
    from halfstep.check.options import make_options
    from halfstep.check.session import check_paths, check_stdin

    from_stdin = "-" in paths
    if unsafe_fixes is not None and not (fix or diff):
        raise click.UsageError("--unsafe-fixes has no effect without --fix or --diff. Add one of them.")
    _check_usage(paths, style, stdin_filename, fix=fix, diff=diff)
    options = make_options(select, ignore, deepspeed, gpu, transformers, unsafe_fixes=unsafe_fixes)
    try:
        if from_stdin:
            outcome = check_stdin(_standard_input(), stdin_filename or "stdin.py", options, fix=fix or diff)
        else:
            outcome = check_paths(paths or (".",), options, fix=fix or diff, write=fix, limit=True)
    except KeyboardInterrupt:
        sys.exit(130)
    if diff:
        _show_diff(outcome)
    elif fix and from_stdin:
        sys.stdout.buffer.write(outcome.fixed[0].after.data)
        _show(outcome, style, to_stderr=True)
    else:
        _show(outcome, style)
    would_change = diff and any(fixed.applied for fixed in outcome.fixed)
    if outcome.findings or would_change:
        sys.exit(3)
    if any(fixed.problem for fixed in outcome.fixed):
        sys.exit(1)


def _check_usage(paths: tuple[str, ...], style: str, stdin_filename: str | None, *, fix: bool, diff: bool) -> None:
    if style not in FORMATS:
        raise click.UsageError(f"Unknown --format {style}. Known: {', '.join(FORMATS)}.")
    if fix and diff:
        raise click.UsageError("--fix changes files, --diff only shows the changes. Remove one of the two.")
    if diff and style != "text":
        raise click.UsageError(f"--diff prints a diff, so --format {style} has no effect. Remove one of the two.")
    if "-" in paths and len(paths) > 1:
        raise click.UsageError("- (standard input) cannot be combined with other paths; check them in separate calls.")
    if stdin_filename is not None and "-" not in paths:
        raise click.UsageError("--stdin-filename has no effect because standard input is not read. Pass - as the PATH.")


def _standard_input() -> bytes:
    from halfstep.check.files.document import MAX_NOTEBOOK_BYTES

    return sys.stdin.buffer.read(MAX_NOTEBOOK_BYTES + 1)


def _show(outcome: Outcome, style: str, *, to_stderr: bool = False) -> None:
    stream = sys.stderr if to_stderr else sys.stdout
    if style == "json":
        from halfstep.report.check_json import as_json

        text = as_json(outcome)
    elif style == "sarif":
        from halfstep.report.check_sarif import as_sarif

        text = as_sarif(outcome)
    elif style == "github":
        from halfstep.report.check_github import as_github

        text = as_github(outcome)
    else:
        from halfstep.report.check_text import as_text

        text = as_text(outcome, colour=stream.isatty() and not os.environ.get("NO_COLOR"))
    if text:
        click.echo(_printable(text, stream.encoding), err=to_stderr)


def _show_diff(outcome: Outcome) -> None:
    from halfstep.report.check_diff import as_diff
    from halfstep.report.check_text import summary

    click.echo(_printable(as_diff(outcome), sys.stdout.encoding), nl=False)
    click.echo(_printable(summary(outcome, done=False), sys.stderr.encoding), err=True)


def _printable(text: str, encoding: str | None) -> str:
    """The text with characters escaped that the stream cannot encode; a file name may contain arbitrary bytes."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
