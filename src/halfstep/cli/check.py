"""`halfstep check`: precision mistakes in scripts, notebooks and configurations."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from halfstep.cli.options import FilePath

if TYPE_CHECKING:
    from halfstep.check.options import Options
    from halfstep.check.session import Outcome

__all__ = ["command"]

FORMATS = ("text", "concise", "json", "sarif", "github", "gitlab", "junit")


@click.command("check")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option(
    "--select",
    multiple=True,
    metavar="RULES",
    help="Only these rules: codes, prefixes, names or severities, separated by commas.",
)
@click.option("--ignore", multiple=True, metavar="RULES", help="All rules except these.")
@click.option("--preview/--no-preview", default=None, help="Also run the rules that are not stable yet.")
@click.option("--list-rules", is_flag=True, help="List all rules and exit.")
@click.option("--fix", is_flag=True, help="Apply the fixes that are safe.")
@click.option("--diff", is_flag=True, help="Show the fixes as a diff without applying them.")
@click.option(
    "--unsafe-fixes/--no-unsafe-fixes",
    default=None,
    help="With --fix and --diff: include fixes that need review (default: as pyproject.toml sets it, else no).",
)
@click.option("--format", "style", default="text", show_default=True, metavar="|".join(FORMATS), help="Output format.")
@click.option("--json", "as_json", is_flag=True, help="Same as --format json.")
@click.option("--statistics", is_flag=True, help="Show how often each rule has findings instead of the findings.")
@click.option("--exit-zero", is_flag=True, help="Exit with 0 even if there are findings.")
@click.option(
    "--baseline",
    type=FilePath(path_type=str),
    metavar="FILE",
    help="Report only findings that this baseline does not have.",
)
@click.option(
    "--write-baseline",
    type=FilePath(path_type=str),
    metavar="FILE",
    help="Write the current findings to a baseline and exit.",
)
@click.option(
    "--respect-gitignore/--no-respect-gitignore", default=None, help="Skip files that git ignores (default: yes)."
)
@click.option("--force-exclude", is_flag=True, help="Treat named files like those of a directory, for hooks.")
@click.option("--no-cache", is_flag=True, help="Neither read nor write results of earlier runs.")
@click.option(
    "--cache-dir",
    type=FilePath(path_type=str),
    metavar="DIR",
    help="Directory of the cache (default: .halfstep_cache in the project).",
)
@click.option(
    "--deepspeed", metavar="VERSION", help="Check configurations against this version (default: the installed one)."
)
@click.option(
    "--transformers",
    metavar="VERSION",
    help="The version of transformers that the scripts run with (default: the installed one).",
)
@click.option(
    "--gpu", metavar="NAME", help="Also report settings that this GPU does not support (auto: query nvidia-smi)."
)
@click.option(
    "--with",
    "versions",
    multiple=True,
    metavar="NAME=VERSION",
    help="Also report known defects of this version of a library, e.g. torch=2.11 (default: pinned or installed ones).",
)
@click.option("--stdin-filename", metavar="NAME", help="File name for standard input (-); default: stdin.py.")
def command(
    paths: tuple[str, ...],
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    preview: bool | None,
    list_rules: bool,
    fix: bool,
    diff: bool,
    unsafe_fixes: bool | None,
    style: str,
    as_json: bool,
    statistics: bool,
    exit_zero: bool,
    baseline: str | None,
    write_baseline: str | None,
    respect_gitignore: bool | None,
    force_exclude: bool,
    no_cache: bool,
    cache_dir: str | None,
    deepspeed: str | None,
    transformers: str | None,
    gpu: str | None,
    versions: tuple[str, ...],
    stdin_filename: str | None,
) -> None:
    """Find precision mistakes in scripts, notebooks and configurations, without running them.

    PATH is a file, a directory (default: the current one), or - for standard input. Exits with 3 if there are findings.

    \b
    halfstep check
    halfstep check train.py ds_config.json --deepspeed 0.16.4 --gpu T4
    halfstep check src --select HS1 --ignore advice --diff
    halfstep check --write-baseline baseline.json
    halfstep check --baseline baseline.json
    halfstep explain HS104
    """
    from halfstep.check.options import make_options
    from halfstep.check.session import check_stdin

    from_stdin = "-" in paths
    changes = fix or diff
    _check_usage(
        (as_json and style not in {"text", "json"}, f"--json contradicts --format {style}. Remove one of the two.")
    )
    style = "json" if as_json else style
    _check_usage(
        (style not in FORMATS, f"Unknown --format {style}. Known: {', '.join(FORMATS)}."),
        (fix and diff, "--fix changes files, --diff only shows the changes. Remove one of the two."),
        (
            unsafe_fixes is not None and not changes,
            "--unsafe-fixes has no effect without --fix or --diff. Add one of them.",
        ),
        (diff and style != "text", f"--diff prints a diff, so --format {style} has no effect. Remove one of the two."),
        (
            from_stdin and len(paths) > 1,
            "- (standard input) cannot be combined with other paths; check them separately.",
        ),
        (
            stdin_filename is not None and not from_stdin,
            "--stdin-filename has no effect because standard input is not read. Pass - as the PATH.",
        ),
        (
            (statistics or list_rules) and style not in {"text", "json"},
            f"--statistics and --list-rules print text or JSON, not --format {style}.",
        ),
        (statistics and diff, "--diff prints a diff, so --statistics has no effect. Remove one of the two."),
        (
            write_baseline is not None and (changes or from_stdin or statistics or baseline is not None),
            "--write-baseline records findings; remove --baseline, --fix, --diff, --statistics and -.",
        ),
        (
            no_cache and cache_dir is not None,
            "--no-cache uses no cache, so --cache-dir has no effect. Remove one of the two.",
        ),
    )
    if list_rules:
        from halfstep.events import terminal_width
        from halfstep.report.check_tables import rules_as_json, rules_as_text

        click.echo(rules_as_json() if style == "json" else rules_as_text(terminal_width(sys.stdout)))
        return
    options = replace(
        make_options(select, ignore, deepspeed, gpu, transformers, versions, unsafe_fixes=unsafe_fixes),
        preview=preview,
        respect_gitignore=respect_gitignore,
        force_exclude=force_exclude,
    )
    if from_stdin:
        outcome = check_stdin(_standard_input(), stdin_filename or "stdin.py", options, fix=changes)
    else:
        outcome = _check(paths, options, None if no_cache else cache_dir or "", fix=changes, write=fix)
    if write_baseline is not None:
        _write_baseline(outcome, write_baseline)
        return
    outcome = _without_known(outcome, baseline, stdin_filename if from_stdin else (paths or (".",))[0])
    if diff:
        _show_diff(outcome)
    elif fix and from_stdin:
        sys.stdout.buffer.write(outcome.fixed[0].after.data)
        _show(outcome, style, statistics=statistics, to_stderr=True)
    else:
        _show(outcome, style, statistics=statistics)
    would_change = diff and any(fixed.applied for fixed in outcome.fixed)
    if (outcome.findings or would_change) and not exit_zero:
        sys.exit(3)
    if any(fixed.problem for fixed in outcome.fixed):
        sys.exit(1)


def _check_usage(*rules: tuple[object, str]) -> None:
    for is_wrong, message in rules:
        if is_wrong:
            raise click.UsageError(message)


def _check(paths: tuple[str, ...], options: Options, cache_dir: str | None, *, fix: bool, write: bool) -> Outcome:
    """Check files and folders; `cache_dir` is None for no cache, and empty for the default one."""
    from halfstep.check.session import check_paths
    from halfstep.errors import SettingError

    cache = None
    if cache_dir:  # the default directory may be unusable; one that was asked for may not
        try:
            Path(cache_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(
                f"--cache-dir {cache_dir} cannot be used: {error.strerror or error}. Pass another directory, or --no-cache."
            ) from error
    if cache_dir is not None and not fix:
        from halfstep.check.cache import open_cache

        cache = open_cache(Path(cache_dir) if cache_dir else None, options)
    return check_paths(paths or (".",), options, fix=fix, write=write, limit=True, cache=cache)


def _without_known(outcome: Outcome, baseline: str | None, path: str | None) -> Outcome:
    """The outcome without the findings of the baseline that the command line or the project names."""
    from halfstep.check.project import find_project

    if baseline is None:
        here = Path(path or "stdin.py").absolute()
        project = find_project(here if here.is_dir() else here.parent)
        if project.baseline is None or project.root is None:
            return outcome
        baseline = str(project.root / project.baseline)
    from halfstep.check.baseline import read_baseline, subtract

    left = replace(outcome, results=subtract(outcome.results, read_baseline(Path(baseline))))
    num_unsafe = sum(f.fix is not None and not f.fix.safe for f in left.findings)
    num_known = len(outcome.findings) - len(left.findings)
    return replace(left, num_known=num_known, num_unsafe_fixes=min(outcome.num_unsafe_fixes, num_unsafe))


def _write_baseline(outcome: Outcome, file: str) -> None:
    from halfstep.check.baseline import write_baseline
    from halfstep.hardware.units import count_text

    count = write_baseline(Path(file), outcome.results)
    click.echo(f"{count_text(outcome.num_files, 'file')} checked, {count_text(count, 'finding')} written to {file}.")


def _standard_input() -> bytes:
    from halfstep.check.files.document import MAX_NOTEBOOK_BYTES

    return sys.stdin.buffer.read(MAX_NOTEBOOK_BYTES + 1)


def _show(outcome: Outcome, style: str, *, statistics: bool, to_stderr: bool = False) -> None:
    from halfstep.events import terminal_width
    from halfstep.report.check_formats import render
    from halfstep.report.theme import uses_colour

    stream = sys.stderr if to_stderr else sys.stdout
    text = render(outcome, style, statistics=statistics, colour=uses_colour(stream), width=terminal_width(stream))
    if text:
        click.echo(_printable(text, stream.encoding), err=to_stderr)


def _show_diff(outcome: Outcome) -> None:
    from halfstep.events import fold_lines, terminal_width
    from halfstep.report.check_diff import as_diff
    from halfstep.report.check_text import summary

    click.echo(_printable(as_diff(outcome), sys.stdout.encoding), nl=False)
    text = fold_lines(summary(outcome, done=False), terminal_width(sys.stderr))
    click.echo(_printable(text, sys.stderr.encoding), err=True)


def _printable(text: str, encoding: str | None) -> str:
    """The text with characters escaped that the stream cannot encode; a file name may contain arbitrary bytes."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
