"""A child process and the conversation with it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfstep.comparison.spec import ChildSpec

__all__ = ["INSIDE", "ChildProcess", "Stopped"]

INSIDE = "HALFSTEP_COMPARISON_CHILD"  # set in every child, so that a job file which compares itself is noticed
_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 5.0


class Stopped(Exception):
    """The comparison was asked to stop while it waited for a child."""


class ChildProcess:
    """One child; it dies with its parent, and its output goes to a log beside its run file."""

    def __init__(self, spec: ChildSpec, folder: Path, name: str, stopped: Callable[[], bool]) -> None:
        self._stopped = stopped
        self.log = folder / f"{name}.log"
        spec_file = folder / f"{name}.spec.json"
        spec_file.write_text(json.dumps(asdict(spec)), encoding="utf-8")
        reader, writer = os.pipe()
        with self.log.open("wb") as log:
            # A session of its own: Ctrl-C at the terminal reaches the parent alone, which then decides.
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "halfstep.comparison.child", str(spec_file), str(writer)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                start_new_session=True,
                env={**os.environ, INSIDE: "1"},
            )
        os.close(writer)
        self._reply = os.fdopen(reader, "rb", buffering=0)
        self._buffer = b""
        self._waiting = False  # for an answer

    def ask(self, *, patient: bool = False, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer; a child that died answers with how it died.

        When the comparison is asked to stop, waiting ends with `Stopped`, unless it is `patient`: then the answer that
        was being waited for is taken first, and this one too.
        """
        assert self._process.stdin is not None
        if self._waiting:
            answer = self._wait(patient=True)
            if answer["is"] == "failed":
                return answer
        with contextlib.suppress(BrokenPipeError):  # dead: the answer below says how
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        self._waiting = True
        return self._wait(patient=patient)

    def _wait(self, *, patient: bool) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._reply, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if self._stopped() and not patient:
                    raise Stopped
                ready = selector.select(_POLL_SECONDS)
                if ready or self._is_gone(selector):
                    read = self._reply.read(65536) if ready else b""
                    if not read:
                        self._waiting = False
                        return {"is": "failed", **self._how_it_died()}
                    self._buffer += read
        self._waiting = False
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _is_gone(self, selector: selectors.BaseSelector) -> bool:
        """Whether it ended without a word; a process that it forked may hold its end of the pipe open."""
        return self._process.poll() is not None and not selector.select(0)

    def _how_it_died(self) -> dict[str, str]:
        code = self._process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            hint = ", as Linux does to the largest process when memory runs out" if -code == signal.SIGKILL else ""
            return {"kind": "killed", "reason": f"The process was ended by {name}{hint}.{self._last_words()}"}
        return {"kind": "error", "reason": f"The process ended with exit code {code}.{self._last_words()}"}

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            if lines:
                return f" Its last line was: {lines[-1][:300]}"
        return ""

    def close(self) -> None:
        """End the child if it has not ended; closing twice is fine."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_SECONDS if not self._stopped() else 0.1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reply.close()
