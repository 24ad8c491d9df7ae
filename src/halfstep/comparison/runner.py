"""Runs the rows of a comparison so that disturbances of the machine affect all of them alike.

How it works. Each run is a process (see `child`). A round is one run of every row with one seed. Within a round the rows
take turns: a few steps of one, then a few of the next, in an order that is reversed every time, so that neither a busy
neighbor nor a rising temperature favors any row. All processes of a round are alive at once, and only one of them
works. Where they would not fit in memory together (on a GPU always: its memory is measured), a round is one run after
the other, and the turns of a run follow each other; on a GPU the next process imports torch while the previous one
validates and writes its file.

The reference row goes first in the first round, because the others compare their first gradients with its own, and
compiled rows go last, because they also compare them with those of the same precision without compilation. A run
that fails is recorded with its reason, and the others continue. A row that cannot run here at all (out of memory, not
supported, not installed) is not tried again in later rounds; a run that hit a NaN is, because another seed may not. Nor
is a row that turns out more than 20 times slower than the reference, as an emulated format can be: after two turns it
is cut short, because the rest would take hours and add no information.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from halfstep.comparison.measurements import LOST, TrialResult
from halfstep.comparison.process import ChildProcess, Stopped
from halfstep.comparison.ranks.processes import RankProcesses, thread_variables
from halfstep.comparison.record import RUNS, run_name, write_run
from halfstep.comparison.remainder import CONTINUED, Remainder, check_same
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.spec import ChildSpec, TrialSpec
from halfstep.comparison.survey import Survey, write_survey
from halfstep.comparison.variant import Variant
from halfstep.errors import HalfstepError, MissingError, SettingError
from halfstep.events import log_warning
from halfstep.hardware.host import available_memory_bytes

__all__ = ["Observer", "Runner", "SilentObserver"]

GRADIENTS = "first_gradients.safetensors"
_FINAL = ("out of memory", "unsupported", "not installed", "killed", "job", LOST)
_TOO_SLOW, _TURNS_BEFORE_CUT, _SECONDS_BEFORE_CUT = 20, 2, 10  # when a slow row is cut short
_SHARE_OF_MEMORY = 0.5  # of the available memory, for all processes of a round together


class Observer(Protocol):
    """Receives the progress of a comparison."""

    def surveyed(self, survey: Survey, total_steps: int) -> None:
        """The preflight is done; `total_steps` steps follow."""

    def stepped(self, label: str, repeat: int, count: int) -> None:
        """A row made `count` more steps."""

    def failed(self, label: str, repeat: int, reason: str) -> None:
        """A run ended early."""


class SilentObserver:
    """An observer that ignores everything."""

    def surveyed(self, survey: Survey, total_steps: int) -> None:
        """Ignore it."""

    def stepped(self, label: str, repeat: int, count: int) -> None:
        """Ignore it."""

    def failed(self, label: str, repeat: int, reason: str) -> None:
        """Ignore it."""


@dataclass
class _ActiveRun:
    """A run in progress."""

    variant: Variant
    process: ChildProcess | RankProcesses
    spec: ChildSpec
    turns: list[int]
    steps: int = 0  # done in turns
    seconds: float = 0.0  # spent in turns, communication included


class Runner:
    """Runs one comparison into one directory."""

    def __init__(
        self,
        variants: Sequence[Variant],
        settings: CompareSettings,
        out: Path,
        *,
        target: str | None,
        data_dir: str | None,
        command: Sequence[str],
        observer: Observer,
        stopped: Callable[[], bool],
        earlier: Remainder | None = None,
    ) -> None:
        self.variants, self.settings, self.out = list(variants), settings, out
        self.target, self.data_dir, self.command = target, data_dir, tuple(command)
        self.observer, self.stopped = observer, stopped
        self.reference = next((v for v in variants if v.is_plain_fp32), variants[0])
        self.earlier = earlier
        failed = earlier.failed if earlier is not None else ()
        self.abandoned = {label for label, kind in failed if kind in _FINAL}  # rows that are not tried again
        self.environment: dict[str, Any] = {}  # of the machine, from the survey

    def run(self) -> None:
        """Preflight, then every round; returns early when asked to stop, with everything done so far written."""
        (self.out / RUNS).mkdir(parents=True, exist_ok=True)
        gradients = self.out / RUNS / GRADIENTS
        try:
            survey = self._survey()
            for repeat in range(self.settings.repeats):
                self._round(survey, repeat, gradients)
            write_survey(self.out, dataclasses.replace(survey, stopped=False))
            for path in gradients.parent.glob("*.safetensors"):
                path.unlink()
        except Stopped:
            pass  # the saved gradients stay, for the rows that a resume adds
        finally:
            for leftover in (self.out / RUNS).glob("*.spec.json"):
                leftover.unlink()

    def _survey(self) -> Survey:
        spec = ChildSpec(self.target, self.data_dir, self.settings)
        process = ChildProcess(spec, self.out / RUNS, "survey", self.stopped, thread_variables(self.settings))
        try:
            with contextlib.closing(process):
                answer = process.ask("survey")
        finally:
            process.remove_logs()
        if answer.failure is not None:
            errors: dict[str, type[HalfstepError]] = {"not installed": MissingError, "unsupported": SettingError}
            raise errors.get(answer.failure.kind, HalfstepError)(answer.failure.reason)
        survey = answer.survey
        assert survey is not None
        num_done = 0
        if self.earlier is not None:
            check_same(self.earlier.survey, survey)
            notes = tuple(dict.fromkeys([*self.earlier.survey.notes, CONTINUED]))
            survey = dataclasses.replace(survey, notes=notes)
            num_done = len(self.earlier.done)
        survey = dataclasses.replace(
            survey,
            settings=self.settings,
            variants=tuple(self.variants),
            reference=self.reference.label,
            command=self.command,
            side_by_side=self._fits_together(survey.device, survey.resident_bytes),
        )
        self.environment = survey.environment
        write_survey(self.out, survey)
        total_steps = (self.settings.repeats * len(self.variants) - num_done) * self.settings.steps
        self.observer.surveyed(survey, total_steps)
        return survey

    def _fits_together(self, device: str, resident_bytes: int) -> bool:
        if device != "cpu":
            return False
        free = available_memory_bytes()
        num_processes = len(self.variants) * self.settings.ranks
        return free is not None and resident_bytes * num_processes < free * _SHARE_OF_MEMORY

    # --- rounds -------------------------------------------------------------------------------------------------

    def _round(self, survey: Survey, repeat: int, gradients: Path) -> None:
        done = frozenset() if self.earlier is None else self.earlier.done
        rows = [v for v in self.variants if v.label not in self.abandoned and (v.label, repeat) not in done]
        if repeat % 2:
            rows.reverse()
        if repeat == 0:  # a stable sort: the reference first, compiled rows last, the others in their order
            rows.sort(key=lambda v: (v.label != self.reference.label, bool(v.compile)))
        groups = [rows] if survey.side_by_side else [[row] for row in rows]
        active: list[_ActiveRun] = []
        upcoming: list[_ActiveRun] = []
        try:
            for group, following in zip(groups, [*groups[1:], []], strict=True):
                active, upcoming = upcoming, []
                if not active:
                    active += (self._start(row, survey, repeat, gradients) for row in group)
                self._train(active, repeat)
                if self._may_start_early(survey):
                    upcoming += (self._start(row, survey, repeat, gradients) for row in following)
                self._finish(active, repeat)
                _close(active)
        except Stopped:
            self._wrap_up(active)
            for run in upcoming:
                run.process.remove_logs()  # it has not begun
            raise
        finally:
            _close([*active, *upcoming])

    def _may_start_early(self, survey: Survey) -> bool:
        """Whether the next process may import torch while this one ends; on a CPU it would compete for time and memory."""
        return survey.device != "cpu"

    def _start(self, variant: Variant, survey: Survey, repeat: int, gradients: Path) -> _ActiveRun:
        name = run_name(variant.label, repeat)
        out = (self.out / RUNS / f"{name}.jsonl").absolute()  # a job may change the working directory
        out.unlink(missing_ok=True)  # left by a stopped run
        # Without the same weights and batch, or without fp32, a difference of gradients means nothing.
        compare_gradients = self.reference.is_plain_fp32 and survey.is_comparable
        trial = TrialSpec(
            variant,
            self.settings,
            self.settings.seed + repeat,
            survey.batch,
            survey=repeat == 0,
            gradients=gradients.absolute() if compare_gradients else None,
            is_reference=variant.label == self.reference.label,
            repeat=repeat,
            eager_gradients=self._eager_gradients(variant, gradients) if survey.is_comparable else None,
        )
        spec = ChildSpec(survey.source, survey.data_dir, self.settings, trial, str(out), self.command)
        start = ChildProcess if self.settings.strategy == "single" else RankProcesses
        process = start(spec, self.out / RUNS, name, self.stopped)
        return _ActiveRun(variant, process, spec, list(self.settings.slices()))

    def _eager_gradients(self, variant: Variant, gradients: Path) -> Path | None:
        """The file that a row without compilation writes for its compiled forms, and that they read; None without both."""
        eager = next((v for v in self.variants if variant.is_compiled_form_of(v)), variant)
        if not any(v.is_compiled_form_of(eager) for v in self.variants):
            return None
        return (gradients.parent / f"{run_name(eager.label, 0)}.safetensors").absolute()

    def _train(self, active: list[_ActiveRun], repeat: int) -> None:
        for run in list(active):
            if self._ask(run, active, repeat, "warm"):
                self.observer.stepped(run.variant.label, repeat, self.settings.num_warmup)
        forwards = True
        while any(run.turns for run in active):
            for run in list(active if forwards else reversed(active)):
                if run.turns:
                    self._turn(run, active, repeat)
            forwards = not forwards
            self._cut_slow(active)

    def _finish(self, active: list[_ActiveRun], repeat: int) -> None:
        for run in list(active):
            if self._ask(run, active, repeat, "finish"):
                run.process.remove_logs()

    def _turn(self, run: _ActiveRun, active: list[_ActiveRun], repeat: int) -> None:
        count = run.turns.pop(0)
        start = time.perf_counter()
        if self._ask(run, active, repeat, "slice", count):
            run.seconds += time.perf_counter() - start
            run.steps += count
            self.observer.stepped(run.variant.label, repeat, count)

    def _cut_slow(self, active: list[_ActiveRun]) -> None:
        base = next((run for run in active if run.variant.label == self.reference.label), None)
        if base is None or not base.steps:
            return
        for run in active:
            turns = len(self.settings.slices()) - len(run.turns)
            slow = run.steps and run.seconds / run.steps > _TOO_SLOW * base.seconds / base.steps
            if run.turns and turns >= _TURNS_BEFORE_CUT and slow and run.seconds > _SECONDS_BEFORE_CUT:
                run.turns.clear()
                self.abandoned.add(run.variant.label)

    def _wrap_up(self, active: list[_ActiveRun]) -> None:
        """Let runs that were interrupted write what they have; a second signal ends this too."""
        if any(run.process.is_busy for run in active):
            log_warning(
                f"Stopping: runs finish their turn of up to {max(self.settings.slices())} steps and write what they have. Ctrl-C once "
                "more stops at once; --resume then repeats these runs."
            )
        for run in active:
            if len(run.turns) < len(self.settings.slices()) and not Path(run.spec.out).exists():
                run.process.ask("wrap", patient=True)

    def _ask(self, run: _ActiveRun, active: list[_ActiveRun], repeat: int, do: str, count: int = 0) -> bool:
        """Whether the run did it; a run that failed is recorded and leaves the round."""
        failure = run.process.ask(do, count=count).failure
        if failure is None:
            return True
        active.remove(run)
        run.process.close()
        if not Path(run.spec.out).exists():  # the process died without writing its file
            assert run.spec.trial is not None
            write_run(
                Path(run.spec.out),
                spec=run.spec.trial,
                command=run.spec.command,
                environment=self.environment,
                result=TrialResult(),
                failure=failure,
            )
        if failure.kind in _FINAL:
            self.abandoned.add(run.variant.label)
        self.observer.failed(run.variant.label, repeat, failure.reason)
        return False


def _close(active: list[_ActiveRun]) -> None:
    for run in active:
        run.process.close()
    active.clear()
