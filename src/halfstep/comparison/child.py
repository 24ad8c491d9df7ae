"""The process in which one run happens: `python -m halfstep.comparison.child SPEC.json REPLY_FD`.

A process of its own gives each run clean memory statistics, its own TF32 switches and autocast cache, and the right to
die alone. The parent sends one JSON line per request on stdin and gets one JSON line back on the given descriptor; the
job's own output goes where the parent pointed it. Requests are

    {"do": "warm"}                 build and warm up
    {"do": "slice", "count": n}    train and time n steps
    {"do": "finish"}               validate, measure the rest, write the run file, end
    {"do": "wrap"}                 the same in a hurry: nothing but validation
    {"do": "survey"}               look at machine and job instead

and every answer is `{"is": "done", ...}` or `{"is": "failed", "kind": ..., "reason": ...}`. When stdin ends, the parent is
gone, and so is the child.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from halfstep.comparison.record import write_run
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.spec import ChildSpec
from halfstep.comparison.trial import Trial
from halfstep.errors import HalfstepError, MissingError, OverflowStop, SettingError
from halfstep.hardware.environment import environment
from halfstep.jobs.job import JobError
from halfstep.jobs.targets import load_target

__all__ = ["main", "take_stdin", "why_failed"]


class _Child:
    """One run, as the requests come in."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.trial: Trial | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        what = request["do"]
        target = load_target(self.spec.target, data_dir=self.spec.data_dir) if what in {"survey", "warm"} else None
        if what == "survey":
            assert target is not None
            from halfstep.comparison.survey import survey  # a second of imports that runs do not need

            return {"survey": survey(target, CompareSettings.from_dict(self.spec.settings))}
        if what == "warm":
            assert target is not None
            self.trial = Trial(target.job, self.spec.trial())
            self.trial.warm_up()
            return {}
        assert self.trial is not None
        if what == "slice":
            self.trial.run_slice(request["count"])
            return {}
        self.trial.finish(quick=what == "wrap")
        self.write()
        self.trial.loop.close()
        return {}

    def write(self, failure: dict[str, str] | None = None) -> None:
        """The run file, of a failed run as far as it came."""
        trial, curves = self.trial, {}
        if trial is not None:
            with contextlib.suppress(Exception):  # after an error on the device nothing may be readable any more
                curves = trial.curves()
        write_run(
            Path(self.spec.out),
            spec=asdict(self.spec),
            environment=environment(),
            curves=curves,
            seconds=[] if trial is None else trial.seconds,
            slices=[] if trial is None else trial.slices,
            record={} if trial is None else trial.record,
            failure=failure,
        )


def why_failed(error: BaseException) -> dict[str, str]:
    """The kind of a failure, and a reason a person can act on."""
    said = str(error).strip() or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: can't allocate" in said:
        first = said.splitlines()[0]
        return {"kind": "out of memory", "reason": f"{first} Lower the batch, or see `halfstep plan`."}
    if isinstance(error, OverflowStop):
        return {"kind": "overflow", "reason": said}
    if isinstance(error, MissingError):
        return {"kind": "not installed", "reason": said}
    if isinstance(error, JobError):
        return {"kind": "job", "reason": said}
    if isinstance(error, SettingError | NotImplementedError):
        return {"kind": "unsupported", "reason": said}
    if isinstance(error, HalfstepError):
        return {"kind": "error", "reason": said}
    return {"kind": "error", "reason": f"{type(error).__name__}: {said.splitlines()[0]}"}


def take_stdin() -> TextIO:
    """The requests on a descriptor of their own; the job, and every program it starts, reads an empty stdin instead."""
    own = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return os.fdopen(own, encoding="utf-8")


def main(arguments: list[str], requests: Iterable[str]) -> int:
    """Answer requests until the run is over or the parent is gone."""
    given = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    spec = replace(ChildSpec(**given), command=tuple(given.get("command", ())))
    child = _Child(spec)
    with os.fdopen(int(arguments[1]), "wb", buffering=0) as reply:

        def send(message: dict[str, Any]) -> None:
            reply.write(json.dumps(message).encode() + b"\n")

        for line in requests:
            request = json.loads(line)
            try:
                answer = {"is": "done", **child.answer(request)}
            except Exception as error:  # whatever the user's code raises becomes a row that says so
                traceback.print_exc()
                failure = why_failed(error)
                if spec.contender is not None:
                    child.write(failure)
                answer = {"is": "failed", **failure}
            try:
                send(answer)
            except BrokenPipeError:  # the parent was killed, which is no failure of this run: --resume makes it again
                return 1
            if answer["is"] == "failed":
                return 1
            if request["do"] in {"finish", "wrap", "survey"}:
                return 0
    return 1  # the parent is gone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], take_stdin()))
