"""The rest of a comparison that was stopped: its rows, settings and target, and the runs that are done.

A run that was cut short by the stop, or stopped before its phases and operators were measured, counts as not done and
is repeated. Machine and torch version must match those of the earlier runs: otherwise the rows would not be comparable.
Two directories combined with `--from` show that difference, one directory could not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from halfstep.comparison.record import CUT_OFF, RunRecord, read_run, run_files
from halfstep.comparison.survey import SURVEY, Survey, read_survey
from halfstep.errors import SettingError

__all__ = ["Remainder", "check_same", "read_remainder"]

_SAME = ("machine", "device", "source", "batch", "num_params")
CONTINUED = "The comparison was stopped and resumed later, so not all rows took turns with each other."


@dataclass(frozen=True)
class Remainder:
    """A stopped comparison, read from its directory."""

    survey: Survey
    done: frozenset[tuple[str, int]]  # label and repeat
    failed: frozenset[tuple[str, str]]  # label and kind of failure


def read_remainder(folder: Path) -> Remainder:
    """What is done and what is missing in a comparison's directory; raises if nothing is missing."""
    if not (folder / SURVEY).exists():
        raise SettingError(f"There is no comparison to resume in {folder} ({SURVEY} is missing); check the path.")
    survey = read_survey(folder)
    runs = [read_run(path) for path in run_files(folder)]
    done = {(run.variant.label, run.repeat) for run in runs if _is_done(run)}
    if not survey.stopped or len(done) == len(survey.variants) * survey.settings.repeats:
        raise SettingError(
            f"The comparison in {folder} was not stopped: there is nothing to resume. To show it again: --from {folder}."
        )
    failed = {(run.variant.label, run.failure.kind) for run in runs if run.failure is not None}
    return Remainder(survey, frozenset(done), frozenset(failed))


def _is_done(run: RunRecord) -> bool:
    cut_off = run.failure is not None and run.failure.kind == CUT_OFF
    return not cut_off and run.measured.stopped_after is None and not run.measured.unsurveyed


def check_same(earlier: Survey, now: Survey) -> None:
    """Raise if a comparison is resumed on another machine, with another torch or with another job."""
    before = {key: getattr(earlier, key) for key in _SAME} | {"torch": earlier.environment.get("torch")}
    here = {key: getattr(now, key) for key in _SAME} | {"torch": now.environment.get("torch")}
    changes = [f"{key} was {before[key]!r} and is {here[key]!r}" for key in before if before[key] != here[key]]
    if earlier.threads is not None and earlier.threads != now.threads:
        changes.append(f"torch had {earlier.threads} threads and has {now.threads} (OMP_NUM_THREADS)")
    if changes:
        raise SettingError(
            f"This comparison was started under different conditions: {'; '.join(changes)}. Run a new comparison with another "
            "--out, and combine both with --from."
        )
