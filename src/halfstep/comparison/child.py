"""The process of one run: `python -m halfstep.comparison.child SPEC.json REPLY_FD`.

A separate process gives each run clean memory statistics, its own TF32 switches and autocast cache, and a crash that
takes nothing else down. The parent sends one JSON line per request on stdin and gets one JSON line back on the reply
descriptor; the job's own output goes to the log that the parent opened. Requests are

    {"do": "warm"}                 build and warm up
    {"do": "slice", "count": n}    train and time n steps
    {"do": "finish"}               validate, measure the rest, write the run file, exit
    {"do": "wrap"}                 the same in a hurry: validation only
    {"do": "survey"}               run the preflight instead

and every answer is `{"is": "done", ...}` or `{"is": "failed", "kind": ..., "reason": ...}`. When stdin ends, the parent is
gone, and the child exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import torch

from halfstep.comparison.measurements import LOST, Failure, TrialResult
from halfstep.comparison.ranks.member import join_ranks
from halfstep.comparison.record import write_run
from halfstep.comparison.spec import Answer, ChildSpec, Request
from halfstep.comparison.trial import Trial
from halfstep.errors import HalfstepError, MissingError, OverflowStop, SettingError
from halfstep.hardware.environment import environment
from halfstep.jobs.job import JobError
from halfstep.jobs.targets import Target, load_target
from halfstep.train.heartbeat import is_communication_error

__all__ = ["classify_failure", "detach_stdin", "main"]


class _Child:
    """One run, driven by requests."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.trial: Trial | None = None
        self._group = contextlib.ExitStack()

    def answer(self, request: Request) -> Answer:
        if request.do == "survey":
            from halfstep.comparison.preflight import run_preflight  # a second of imports that runs do not need

            return Answer(survey=run_preflight(self._target(), self.spec.settings))
        if request.do == "warm":
            assert self.spec.trial is not None
            member = self._group.enter_context(join_ranks(self.spec.trial))
            self.trial = Trial(self._target().job, self.spec.trial, member)
            self.trial.warm_up()
            return Answer()
        assert self.trial is not None
        if request.do == "slice":
            self.trial.run_slice(request.count)
            return Answer()
        self.trial.finish(quick=request.do == "wrap")
        if self.trial.member.is_main:
            self.write()
        self.trial.loop.close()
        self._group.close()
        return Answer()

    def _target(self) -> Target:
        return load_target(self.spec.target, data_dir=self.spec.data_dir)

    def write(self, failure: Failure | None = None) -> None:
        """Write the run file; after a failure, with as much as there is."""
        assert self.spec.trial is not None
        is_secondary = (
            self.trial is None or not self.trial.member.is_main or (failure is not None and failure.kind == LOST)
        )
        if failure is not None and is_secondary and self.spec.settings.strategy != "single":
            return  # the parent knows which rank failed first, and writes it
        write_run(
            Path(self.spec.out),
            spec=self.spec.trial,
            command=self.spec.command,
            environment=environment(),
            result=TrialResult() if self.trial is None else self.trial.result(),
            failure=failure,
        )


def classify_failure(error: BaseException) -> Failure:
    """The kind of a failure, and a reason that a user can act on."""
    message = str(error).strip() or type(error).__name__
    # Also inside an error of the job's: a forward may send messages itself.
    lost = next((each for each in (error, error.__cause__) if each is not None and is_communication_error(each)), None)
    if lost is not None:
        return Failure(LOST, f"A message between ranks failed: {(str(lost).strip().splitlines() or [''])[0]}")
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: can't allocate" in message:
        first_line = message.splitlines()[0].rstrip(".")
        return Failure("out of memory", f"{first_line}. Lower the batch, or see `halfstep plan`.")
    if isinstance(error, OverflowStop):
        return Failure("overflow", message)
    if isinstance(error, MissingError):
        return Failure("not installed", message)
    if isinstance(error, JobError):
        return Failure("job", message)
    if isinstance(error, SettingError | NotImplementedError):
        return Failure("unsupported", message)
    if isinstance(error, HalfstepError):
        return Failure("error", message)
    return Failure("error", f"{type(error).__name__}: {message.splitlines()[0]}")


def detach_stdin() -> TextIO:
    """The requests on a separate descriptor; the job, and every program it starts, gets an empty stdin instead."""
    requests = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return os.fdopen(requests, encoding="utf-8")


def main(arguments: list[str], requests: Iterable[str]) -> int:
    """Answer requests until the run is over or the parent is gone."""
    spec = ChildSpec.from_dict(json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    child = _Child(spec)
    with os.fdopen(int(arguments[1]), "wb", buffering=0) as reply:
        for line in requests:
            request = Request.from_dict(json.loads(line))
            try:
                answer = child.answer(request)
            except Exception as error:  # whatever the user's code raises becomes a row with that reason
                traceback.print_exc()
                answer = Answer(classify_failure(error))
                if spec.trial is not None:
                    child.write(answer.failure)
            try:
                reply.write(json.dumps(answer.as_dict()).encode() + b"\n")
            except BrokenPipeError:  # the parent was killed, which is not a failure of this run: --resume repeats it
                return 1
            if answer.failure is not None:
                return 1
            if request.do in {"finish", "wrap", "survey"}:
                return 0
    return 1  # the parent is gone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], detach_stdin()))
