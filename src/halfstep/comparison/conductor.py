"""Runs the rows of a comparison so that whatever the machine does, it does to all of them.

How it works. Each run is a process (see `child`). A round is one run of every row with one seed. Within a round the rows
take turns: a few steps of one, then a few of the next, in an order that is reversed every time, so that neither a busy
neighbour nor a rising temperature favours anybody. All processes of a round are alive at once, and only one of them
works. Where they would not fit in memory together (on a GPU always: its memory is what is measured), a round is one run
after the other, and the turns of a run follow each other; on a GPU the next process imports torch while the one before
it validates and writes its file.

The reference row goes first in the first round, because the others compare their first gradients with its own. A run
that fails is written down with its reason, and the others go on. A row that cannot run here at all (out of memory, not
supported, not installed) is not tried again in later rounds; a run that met a NaN is, because another seed may not. Nor
is a row that turns out more than 20 times slower than the reference, as an emulated format can be: after two turns it
is cut short, because the rest would take hours and tell nothing new.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from halfstep.comparison.contender import Contender
from halfstep.comparison.process import ChildProcess, Stopped
from halfstep.comparison.record import RUNS, SURVEY, run_name, write_run
from halfstep.comparison.remainder import CONTINUED, Remainder, check_same
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.spec import ChildSpec
from halfstep.errors import HalfstepError, MissingError, SettingError
from halfstep.hardware.host import available_memory_bytes

__all__ = ["Conductor", "Quiet", "Watcher", "is_reference"]

GRADIENTS = "first_gradients.safetensors"
_FINAL = ("out of memory", "unsupported", "not installed", "killed", "job")
_TOO_SLOW, _TURNS_BEFORE_CUT, _PATIENCE_SECONDS = 20, 2, 10  # a row is not cut before it took this long
_SHARE_OF_MEMORY = 0.5  # of what is available, that the processes of a round may take together


class Watcher(Protocol):
    """Somebody who shows a comparison while it goes on."""

    def surveyed(self, found: dict[str, Any], total_steps: int) -> None:
        """The machine and the job are known; so many steps will be made."""

    def stepped(self, label: str, repeat: int, count: int) -> None:
        """A row made `count` more steps."""

    def failed(self, label: str, repeat: int, reason: str) -> None:
        """A run ended early."""


class Quiet:
    """A watcher that shows nothing."""

    def surveyed(self, found: dict[str, Any], total_steps: int) -> None:
        """Nothing."""

    def stepped(self, label: str, repeat: int, count: int) -> None:
        """Nothing."""

    def failed(self, label: str, repeat: int, reason: str) -> None:
        """Nothing."""


def is_reference(contender: Contender) -> bool:
    """Whether a row is what others are measured against: Halfstep's plain fp32."""
    return contender.peer is None and contender.policy == "fp32" and not contender.compile


@dataclass
class _Live:
    """A run that is going on."""

    contender: Contender
    process: ChildProcess
    spec: ChildSpec
    turns: list[int]
    steps: int = 0  # done in turns
    seconds: float = 0.0  # that they took, the conversation included


class Conductor:
    """Runs one comparison into one directory."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        settings: CompareSettings,
        out: Path,
        *,
        target: str | None,
        data_dir: str | None,
        command: Sequence[str],
        watcher: Watcher,
        stopped: Callable[[], bool],
        earlier: Remainder | None = None,
    ) -> None:
        self.contenders, self.settings, self.out = list(contenders), settings, out
        self.target, self.data_dir, self.command = target, data_dir, tuple(command)
        self.watcher, self.stopped = watcher, stopped
        self.reference = next((c for c in contenders if is_reference(c)), contenders[0])
        self.earlier = earlier
        known = earlier.failed if earlier is not None else ()
        self.given_up = {label for label, kind in known if kind in _FINAL}
        self.found: dict[str, Any] = {}

    def run(self) -> None:
        """Survey, then every round; returns early when asked to stop, with what is done written down."""
        (self.out / RUNS).mkdir(parents=True, exist_ok=True)
        gradients = self.out / RUNS / GRADIENTS
        try:
            self._survey()
            for repeat in range(self.settings.repeats):
                self._round(repeat, gradients)
            self.found["stopped"] = False
            self._write_survey()
            gradients.unlink(missing_ok=True)
        except Stopped:
            pass  # the reference's gradients stay, for the rows that may still come
        finally:
            for leftover in (self.out / RUNS).glob("*.spec.json"):
                leftover.unlink()

    def _survey(self) -> None:
        spec = ChildSpec(self.target, self.data_dir, self.settings.as_dict())
        process = ChildProcess(spec, self.out / RUNS, "survey", self.stopped)
        try:
            with contextlib.closing(process):
                answer = process.ask(do="survey")
        finally:
            process.log.unlink(missing_ok=True)
        if answer["is"] == "failed":
            kinds: dict[str, type[HalfstepError]] = {"not installed": MissingError, "unsupported": SettingError}
            raise kinds.get(answer["kind"], HalfstepError)(answer["reason"])
        if self.earlier is not None:
            check_same(self.earlier.survey, answer["survey"])
            answer["survey"]["notes"] = list(dict.fromkeys([*self.earlier.survey["notes"], CONTINUED]))
        num_done = 0 if self.earlier is None else len(self.earlier.done)
        total = (self.settings.repeats * len(self.contenders) - num_done) * self.settings.steps
        self.found = {
            **answer["survey"],
            "settings": self.settings.as_dict(),
            "contenders": [dataclasses.asdict(c) for c in self.contenders],
            "reference": self.reference.label,
            "command": list(self.command),
            "side_by_side": self._fits_together(answer["survey"]),
            "stopped": True,  # until the last run is done, so that one that was killed says so too
        }
        self._write_survey()
        self.watcher.surveyed(self.found, total)

    def _write_survey(self) -> None:
        text = json.dumps(self.found, indent=1)
        (self.out / SURVEY).write_text(text + "\n", encoding="utf-8")

    def _fits_together(self, found: dict[str, Any]) -> bool:
        if found["device"] != "cpu":
            return False
        free = available_memory_bytes()
        return free is not None and found["resident_bytes"] * len(self.contenders) < free * _SHARE_OF_MEMORY

    # --- rounds -------------------------------------------------------------------------------------------------

    def _round(self, repeat: int, gradients: Path) -> None:
        done = frozenset() if self.earlier is None else self.earlier.done
        rows = [c for c in self.contenders if c.label not in self.given_up and (c.label, repeat) not in done]
        if repeat % 2:
            rows.reverse()
        if repeat == 0:  # a stable sort: the reference first, the others as they are
            rows.sort(key=lambda c: c.label != self.reference.label)
        groups = [rows] if self.found["side_by_side"] else [[row] for row in rows]
        live: list[_Live] = []
        upcoming: list[_Live] = []
        try:
            for group, following in zip(groups, [*groups[1:], []], strict=True):
                live, upcoming = upcoming, []
                if not live:
                    live += (self._start(row, repeat, gradients) for row in group)
                self._train(live, repeat)
                if self._may_start_early():
                    upcoming += (self._start(row, repeat, gradients) for row in following)
                self._finish(live, repeat)
                _close(live)
        except Stopped:
            self._wrap_up(live)
            for run in upcoming:
                run.process.log.unlink(missing_ok=True)  # it has not begun
            raise
        finally:
            _close([*live, *upcoming])

    def _may_start_early(self) -> bool:
        """Whether the next process may import torch while this one ends; on a CPU it would take its time and memory."""
        return bool(self.found["device"] != "cpu")

    def _start(self, contender: Contender, repeat: int, gradients: Path) -> _Live:
        name = run_name(contender.label, repeat)
        out = (self.out / RUNS / f"{name}.jsonl").absolute()  # a job may change the folder
        out.unlink(missing_ok=True)  # what a stopped run left
        spec = ChildSpec(
            self.found["source"],
            self.found["data_dir"],
            self.settings.as_dict(),
            dataclasses.asdict(contender),
            repeat,
            self.settings.seed + repeat,
            self.found["batch"],
            survey=repeat == 0,
            gradients=str(gradients.absolute()) if self._gradients_tell() else None,
            is_reference=contender.label == self.reference.label,
            out=str(out),
            command=self.command,
        )
        process = ChildProcess(spec, self.out / RUNS, name, self.stopped)
        return _Live(contender, process, spec, list(self.settings.slices()))

    def _gradients_tell(self) -> bool:
        """Without the same weights and batch, or without fp32, a difference of gradients means nothing."""
        return is_reference(self.reference) and self.found["same_weights"] and self.found["same_batches"]

    def _train(self, live: list[_Live], repeat: int) -> None:
        for run in list(live):
            if self._ask(run, live, repeat, do="warm"):
                self.watcher.stepped(run.contender.label, repeat, self.settings.num_warmup)
        forwards = True
        while any(run.turns for run in live):
            for run in list(live if forwards else reversed(live)):
                if run.turns:
                    self._turn(run, live, repeat)
            forwards = not forwards
            self._cut_slow(live)

    def _finish(self, live: list[_Live], repeat: int) -> None:
        for run in list(live):
            self._ask(run, live, repeat, do="finish")
            if run in live:
                run.process.log.unlink(missing_ok=True)  # a run that went well leaves its file and nothing else

    def _turn(self, run: _Live, live: list[_Live], repeat: int) -> None:
        count = run.turns.pop(0)
        start = time.perf_counter()
        if self._ask(run, live, repeat, do="slice", count=count):
            run.seconds += time.perf_counter() - start
            run.steps += count
            self.watcher.stepped(run.contender.label, repeat, count)

    def _cut_slow(self, live: list[_Live]) -> None:
        base = next((run for run in live if run.contender.label == self.reference.label), None)
        if base is None or not base.steps:
            return
        for run in live:
            turns = len(self.settings.slices()) - len(run.turns)
            slow = run.steps and run.seconds / run.steps > _TOO_SLOW * base.seconds / base.steps
            if run.turns and turns >= _TURNS_BEFORE_CUT and slow and run.seconds > _PATIENCE_SECONDS:
                run.turns.clear()
                self.given_up.add(run.contender.label)

    def _wrap_up(self, live: list[_Live]) -> None:
        """Let runs that were stopped in the middle write down what they have; a second signal ends this too."""
        for run in live:
            if len(run.turns) < len(self.settings.slices()) and not Path(run.spec.out).exists():
                run.process.ask(patient=True, do="wrap")

    def _ask(self, run: _Live, live: list[_Live], repeat: int, **request: Any) -> bool:
        """Whether the run did it; one that failed is written down and leaves the round."""
        answer = run.process.ask(**request)
        if answer["is"] == "done":
            return True
        live.remove(run)
        run.process.close()
        failure = {"kind": answer["kind"], "reason": answer["reason"]}
        if not Path(run.spec.out).exists():  # it died without a word
            self._write_failure(run.spec, failure)
        if failure["kind"] in _FINAL:
            self.given_up.add(run.contender.label)
        self.watcher.failed(run.contender.label, repeat, failure["reason"])
        return False

    def _write_failure(self, spec: ChildSpec, failure: dict[str, str]) -> None:
        write_run(
            Path(spec.out),
            spec=dataclasses.asdict(spec),
            environment=self.found["environment"],
            curves={},
            seconds=[],
            slices=[],
            record={},
            failure=failure,
        )


def _close(live: list[_Live]) -> None:
    for run in live:
        run.process.close()
    live.clear()
