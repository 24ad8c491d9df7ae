"""What is left to do of a comparison that was stopped: its rows, settings and target, and the runs that are done.

A run that was cut short by the stop, or stopped before its phases and operators were looked at, counts as not done and is
made again. The machine must be the one of the earlier runs, with the same torch: otherwise the rows would not compare like
with like, and two directories put side by side with `--from` say that, where one directory could not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.comparison.contender import Contender
from halfstep.comparison.record import CUT_OFF, SURVEY, RunRecord, read_run, read_survey, run_files
from halfstep.comparison.settings import CompareSettings
from halfstep.errors import SettingError

__all__ = ["Remainder", "check_same", "read_remainder"]

_SAME = ("machine", "device", "source", "batch", "num_params")
CONTINUED = "The comparison was stopped and continued later, so not all rows took turns with each other."


@dataclass(frozen=True)
class Remainder:
    """A stopped comparison, as its directory tells it."""

    contenders: tuple[Contender, ...]
    settings: CompareSettings
    survey: dict[str, Any]
    done: frozenset[tuple[str, int]]  # label and repeat
    failed: frozenset[tuple[str, str]]  # label and kind of failure


def read_remainder(folder: Path) -> Remainder:
    """What there is and what is missing in a comparison's directory; refused if nothing is missing."""
    if not (folder / SURVEY).exists():
        raise SettingError(f"{folder} holds no comparison to go on with ({SURVEY} is missing); check the path.")
    survey = read_survey(folder)
    contenders = tuple(Contender.from_dict(values) for values in survey["contenders"])
    settings = CompareSettings.from_dict(survey["settings"])
    runs = [read_run(path) for path in run_files(folder)]
    done = {(run.contender.label, run.repeat) for run in runs if _is_done(run)}
    if not survey["stopped"] or len(done) == len(contenders) * settings.repeats:
        raise SettingError(
            f"The comparison in {folder} was not stopped: there is nothing to go on with. To see it again: --from {folder}."
        )
    failed = {(run.contender.label, run.failure["kind"]) for run in runs if run.failure is not None}
    return Remainder(contenders, settings, survey, frozenset(done), frozenset(failed))


def _is_done(run: RunRecord) -> bool:
    cut_off = run.failure is not None and run.failure["kind"] == CUT_OFF
    return not cut_off and not run.measured.keys() & {"stopped_after", "unsurveyed"}


def check_same(earlier: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on with a comparison on another machine, with another torch or with another job."""
    differs = [f"{key} was {earlier[key]!r} and is {now[key]!r}" for key in _SAME if earlier[key] != now[key]]
    before, here = (found["environment"].get("torch") for found in (earlier, now))
    if before != here:
        differs.append(f"torch was {before} and is {here}")
    threads, now_threads = earlier.get("threads"), now.get("threads")
    if threads != now_threads and threads is not None:
        differs.append(f"torch had {threads} threads and has {now_threads} (OMP_NUM_THREADS)")
    if differs:
        raise SettingError(
            f"This is not where the comparison began: {'; '.join(differs)}. Compare anew with another --out, and put both side by "
            "side with --from."
        )
