"""A child process, its requests and its answers."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from halfstep.comparison.measurements import Failure
from halfstep.comparison.spec import Answer, ChildSpec, Request

__all__ = ["INSIDE", "ChildProcess", "Stopped"]

INSIDE = "HALFSTEP_COMPARISON_CHILD"  # set in every child, to detect a job file that compares itself
_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 5.0


class Stopped(Exception):
    """The comparison was asked to stop while it waited for a child."""


class ChildProcess:
    """One child; it dies with its parent, and its output goes to a log next to its run file."""

    def __init__(
        self,
        spec: ChildSpec,
        folder: Path,
        name: str,
        stopped: Callable[[], bool],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`variables` are added to the environment of the process."""
        self._stopped = stopped
        self.log = folder / f"{name}.log"
        spec_file = folder / f"{name}.spec.json"
        spec_file.write_text(json.dumps(spec.as_dict()), encoding="utf-8")
        reader, writer = os.pipe()
        with self.log.open("wb") as log:
            # A new session: Ctrl-C at the terminal reaches only the parent, which then decides.
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "halfstep.comparison.child", str(spec_file), str(writer)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                start_new_session=True,
                env={**os.environ, INSIDE: "1", **(variables or {})},
            )
        os.close(writer)
        self._reply = os.fdopen(reader, "rb", buffering=0)
        self._buffer = b""
        self._waiting = False  # for an answer

    def ask(self, do: str, *, count: int = 0, patient: bool = False) -> Answer:
        """Send a request and wait for the answer; a child that died answers with the way it died.

        When the comparison is asked to stop, waiting raises `Stopped`. A `patient` call waits regardless, first for an
        answer that is still outstanding and then for its own.
        """
        if self._waiting:
            answer = self._wait(patient=True)
            if answer.failure is not None:
                return answer
        self.send(Request(do, count))
        return self._wait(patient=patient)

    def send(self, request: Request) -> None:
        """Send a request without waiting for its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # dead: the answer shows how
            self._process.stdin.write(json.dumps(request.as_dict()).encode() + b"\n")
            self._process.stdin.flush()
        self._waiting = True

    @property
    def is_busy(self) -> bool:
        """Whether an answer is outstanding."""
        return self._waiting

    def poll(self, seconds: float) -> Answer | None:
        """The answer, if it arrives within `seconds`; a child that died answers with the way it died."""
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._reply, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                ready = selector.select(max(0.0, end - time.monotonic()))
                if ready or self._has_exited(selector):
                    read = self._reply.read(65536) if ready else b""
                    if not read:
                        self._waiting = False
                        return Answer(self._cause_of_death())
                    self._buffer += read
                elif time.monotonic() >= end:
                    return None
        self._waiting = False
        line, _, self._buffer = self._buffer.partition(b"\n")
        return Answer.from_dict(json.loads(line))

    def _wait(self, *, patient: bool) -> Answer:
        while True:
            if self._stopped() and not patient:
                raise Stopped
            answer = self.poll(_POLL_SECONDS)
            if answer is not None:
                return answer

    def _has_exited(self, selector: selectors.BaseSelector) -> bool:
        """Whether it exited without an answer; a process that it forked may keep its end of the pipe open."""
        return self._process.poll() is not None and not selector.select(0)

    def _cause_of_death(self) -> Failure:
        code = self._process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            hint = ", as the Linux OOM killer does when memory runs out" if -code == signal.SIGKILL else ""
            return Failure("killed", f"The process was killed by {name}{hint}.{self._last_line()}")
        return Failure("error", f"The process exited with code {code}.{self._last_line()}")

    def _last_line(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            if lines:
                return f" The last line of its log: {lines[-1][:300]}"
        return ""

    def remove_logs(self) -> None:
        """Delete the log: only failed runs leave one."""
        self.log.unlink(missing_ok=True)

    def kill(self) -> None:
        """End the child at once."""
        self._process.kill()

    def close(self) -> None:
        """End the child if it is still running; closing twice is fine."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_SECONDS if not self._stopped() else 0.1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reply.close()
