"""`halfstep learn`: the course, with an experiment for every claim."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from halfstep.cli.options import FilePath
from halfstep.cli.requirements import require_packages
from halfstep.errors import SettingError

if TYPE_CHECKING:
    from halfstep.report.learn.text import Page

__all__ = ["command"]

_BELOW_FULL_MARKS = 3
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class _Course(click.Group):
    """A group whose further subcommands are the units."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        from halfstep.learning.course import find_unit

        return _unit_command(find_unit(cmd_name).name)


@click.group(
    "learn", cls=_Course, invoke_without_command=True, subcommand_metavar="[UNIT | quiz | practice | progress]"
)
@_JSON
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Learn mixed precision: every claim of the course is backed by an experiment on this machine.

    Without UNIT, lists the units and what was run. A unit runs its experiments on the CPU, most in seconds; exit code 3
    means that a claim was not confirmed. What was run is recorded in $HALFSTEP_STATE, or else in the user's state directory.

    \b
    halfstep learn
    halfstep learn formats
    halfstep learn quiz
    halfstep learn practice 2
    halfstep learn progress
    """
    if ctx.invoked_subcommand is not None:
        if as_json:
            raise click.UsageError(
                f"Write --json after {ctx.invoked_subcommand}: halfstep learn {ctx.invoked_subcommand} --json"
            )
        return
    from halfstep.learning.progress import read_progress
    from halfstep.report.learn.text import units_data

    progress = read_progress()
    click.echo(json.dumps(units_data(progress), indent=2) if as_json else _page().units(progress))


def _unit_command(name: str) -> click.Command:
    from halfstep.learning.units import UNITS

    def run(as_json: bool) -> None:
        require_packages("halfstep learn", "numpy")
        _run_unit(name, as_json=as_json)

    option = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON.")
    help_text = f"{UNITS[name].title}. {' '.join(UNITS[name].objectives)}"
    return click.Command(name, callback=run, params=[option], help=help_text)


def _run_unit(name: str, *, as_json: bool) -> None:
    from halfstep.learning.course import find_unit, prove
    from halfstep.learning.progress import record_unit
    from halfstep.report.learn.text import unit_data

    page, unit = _page(), find_unit(name)
    if as_json:
        result = prove(unit)
        click.echo(json.dumps(unit_data(result), indent=2))
    else:
        click.echo(page.opening(unit))
        result = prove(unit, lambda proof: click.echo(page.proof(proof)))
        click.echo(page.closing(result))
    _record(lambda: record_unit(unit.name, holds=result.holds))
    if not result.holds:
        sys.exit(_BELOW_FULL_MARKS)


@command.command("quiz")
@click.option("--answers", metavar="1b,2b,...", help="Grade these answers instead of asking.")
@click.option("--show", type=int, metavar="N", help="Run the experiment behind question N.")
@_JSON
def _quiz(answers: str | None, show: int | None, as_json: bool) -> None:
    """Answer questions; each answer is backed by an experiment.

    Asks at a terminal; an empty answer skips a question, q ends the quiz. Exit code 3 means that an answer was wrong. With --json
    alone, prints the questions.

    \b
    halfstep learn quiz
    halfstep learn quiz --answers 1b,2b,3b --json
    halfstep learn quiz --show 4
    """
    if answers is not None and show is not None:
        raise click.UsageError("--answers and --show cannot be combined. Remove one of the two.")
    if show is not None:
        _show_question(show, as_json=as_json)
        return
    from halfstep.learning.progress import record_answers
    from halfstep.learning.questions import QUESTIONS
    from halfstep.learning.quiz import grade, parse_answers
    from halfstep.report.learn.text import grades_data, question_data

    page = _page()
    if answers is None and as_json:
        click.echo(json.dumps([question_data(question) for question in QUESTIONS], indent=2))
        return
    if answers is None and not _is_asked():
        raise click.UsageError(
            "The quiz asks at a terminal, and this is none. Pass --answers 1b,2b,3b, or --json for the questions."
        )
    grades = grade(_ask(page) if answers is None else parse_answers(answers))
    if as_json:
        click.echo(json.dumps(grades_data(grades), indent=2))
    else:
        if answers is not None:
            click.echo("\n".join(page.grade(each) for each in grades))
        click.echo(page.score(grades))
    if grades:
        _record(lambda: record_answers({each.question.number: each.right for each in grades}))
    if not all(each.right for each in grades):
        sys.exit(_BELOW_FULL_MARKS)


def _is_asked() -> bool:
    """Whether someone is there to answer."""
    return sys.stdin.isatty()


def _ask(page: Page) -> dict[int, str]:
    """Ask every question at the terminal; returns the answers."""
    from halfstep.learning.questions import QUESTIONS
    from halfstep.learning.quiz import Grade, parse_letter

    answers: dict[int, str] = {}
    for question in QUESTIONS:
        click.echo(page.question(question))
        while question.number not in answers:
            try:
                text = click.prompt("  answer", default="", show_default=False).strip()
            except click.Abort:  # Ctrl-D ends the quiz; what was answered counts
                click.echo()
                return answers
            if text.casefold() in {"q", "quit"}:
                return answers
            if not text:
                break
            try:
                answers[question.number] = parse_letter(question, text)
            except SettingError as error:
                click.echo(f"  {error}")
                continue
            click.echo(page.grade(Grade(question, answers[question.number])))
    return answers


def _show_question(number: int, *, as_json: bool) -> None:
    from halfstep.learning.experiment import run_experiment
    from halfstep.learning.quiz import find_question
    from halfstep.report.learn.text import proof_data, question_data

    question, page = find_question(number), _page()
    require_packages("halfstep learn quiz --show", "numpy")
    if not as_json:
        click.echo(page.question(question).lstrip("\n"))
    proof = run_experiment(question.experiment)
    if as_json:
        click.echo(json.dumps(question_data(question) | {"proof": proof_data(proof)}, indent=2))
    else:
        click.echo(page.proof(proof))
    if not proof.holds:
        sys.exit(_BELOW_FULL_MARKS)


@command.command("practice")
@click.argument("number", type=click.IntRange(1, 5), metavar="N")
@click.argument(
    "script", required=False, type=click.Path(exists=True, dir_okay=False, readable=True), metavar="[SCRIPT]"
)
@click.option("-o", "--output", type=FilePath(path_type=str), metavar="FILE", help="Where to write the starter file.")
@click.option(
    "--seconds", type=click.FloatRange(min=1), metavar="S", help="Time limit of each run of the script (default 60)."
)
@_JSON
def _practice(number: int, script: str | None, output: str | None, seconds: float | None, as_json: bool) -> None:
    """Practise: write a starter file for task N (1 to 5), or grade SCRIPT.

    SCRIPT is graded by `halfstep check` and by what it does in a run on the CPU, in a separate process and an empty working
    directory; `cuda` in it means the CPU. Exit code 3 means that a criterion was not met.

    \b
    halfstep learn practice 2
    halfstep learn practice 2 practice2_clipping.py
    """
    if script is None and seconds is not None:
        raise click.UsageError("--seconds is for a script that is graded. Pass the script, or leave it out.")
    if script is not None and output is not None:
        raise click.UsageError("-o is for the starter file, which is written without SCRIPT. Remove one of the two.")
    if script is None:
        _write_starter(number, output, as_json=as_json)
        return
    require_packages("halfstep learn practice", "numpy")
    _grade_practice(number, script, seconds, as_json=as_json)


def _write_starter(number: int, output: str | None, *, as_json: bool) -> None:
    from halfstep.learning.practice.starters import starter
    from halfstep.learning.practice.tasks import TASKS
    from halfstep.report.learn.practice import render_task, task_data

    task = TASKS[number - 1]
    path = Path(output or task.file)
    try:
        with path.open("x", encoding="utf-8") as file:  # an existing file is the reader's work
            file.write(starter(number, task.title, str(path)))
    except FileExistsError:
        raise click.UsageError(
            f"{path} exists and was not overwritten. Grade it: halfstep learn practice {number} {path}. For a new starter file, pass -o FILE."
        ) from None
    except OSError as error:
        raise click.UsageError(f"{path} cannot be written: {error.strerror or error}. Pass -o FILE.") from None
    click.echo(json.dumps(task_data(task, str(path)), indent=2) if as_json else render_task(_page(), task, str(path)))


def _grade_practice(number: int, script: str, seconds: float | None, *, as_json: bool) -> None:
    from halfstep.hardware.torch_build import require_torch
    from halfstep.learning.practice.grading import EXPLAIN, SECONDS, grade_practice, read_script
    from halfstep.learning.progress import record_practice
    from halfstep.report.learn.practice import grade_data, render_grade

    path = Path(script)
    if path.suffix != ".py" and number != EXPLAIN:
        raise click.UsageError(f"{script} is not a Python file; task {number} grades a script, whose name ends in .py.")
    try:
        read_script(path)
    except SettingError as error:
        raise click.UsageError(str(error)) from None
    require_torch("halfstep learn practice")
    grade = grade_practice(number, path, seconds or SECONDS)
    click.echo(json.dumps(grade_data(grade, script), indent=2) if as_json else render_grade(_page(), grade, script))
    _record(lambda: record_practice(number, passed=grade.passed))
    if not grade.passed:
        sys.exit(_BELOW_FULL_MARKS)


@command.command("progress")
@_JSON
def _progress(as_json: bool) -> None:
    """Show the checkpoint of the course, ticked from what was run."""
    from halfstep.learning.progress import checkpoint, read_progress, state_file
    from halfstep.report.learn.text import boxes_data

    progress, file = read_progress(), str(state_file())
    boxes = checkpoint(progress)
    data: dict[str, Any] = boxes_data(boxes, progress, file)
    click.echo(json.dumps(data, indent=2) if as_json else _page().progress(boxes, progress, file))


def _page() -> Page:
    from halfstep.events import terminal_width
    from halfstep.report.learn.text import WIDTH, Page
    from halfstep.report.theme import uses_colour

    return Page(terminal_width(sys.stdout) or WIDTH, colour=uses_colour(sys.stdout))


def _record(write: Callable[[], None]) -> None:
    """Record progress; a state directory that cannot be written costs a warning, not the result."""
    try:
        write()
    except SettingError as error:
        click.echo(f"halfstep: progress was not recorded. {error}", err=True)
    except OSError as error:
        reason = f"{error.filename} cannot be written ({error.strerror or error})"
        click.echo(
            f"halfstep: progress was not recorded: {reason}. Set HALFSTEP_STATE to a directory that can.", err=True
        )
