"""Ranks that die or hang: noticed within the timeout, named, and ended on every rank.

How it works. A thread of every rank posts once a second, in the store of the process group, a count that grows while the
process lives, what its main thread does (a count of micro-batches that all ranks pass in the same order), and for how
long. When a message between ranks fails (a dead rank closes its connections at once, a hanging one is waited for until the
timeout), the rank that sees it reads what the others posted twice: those whose count does not grow are dead, and those that
have passed the fewest micro-batches are the ones that the others wait for.

A main thread that hangs raises nothing. Its thread ends the process if another rank has failed, or if some rank is behind
and nothing has moved for longer than the timeout: on GPUs the host does not wait in a message itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from halfstep.backends.context import RunContext
from halfstep.errors import HalfstepError, RankError
from halfstep.hardware.units import few

__all__ = ["Heartbeat", "RankState", "describe_ranks_behind", "is_communication_error", "watch_ranks"]

_BEAT_SECONDS = 1.0
_GRACE_SECONDS = 10.0  # for a main thread to end by itself after another rank has failed
_FAILED = "failed"
_COMMUNICATION = re.compile(
    r"gloo/|NCCL|ncclUnhandled|Connection (closed|reset|to)|Timed out waiting|Broken pipe|recv(Value|Bytes)|TCPStore",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankState:
    """What one rank posted last."""

    beat: int  # grows while the process lives
    tick: int  # grows while its main thread makes progress
    doing: str
    seconds: float  # since the last tick


class Heartbeat:
    """The thread of one rank; with one process it only stores what the main thread does."""

    def __init__(self, context: RunContext, timeout_seconds: float) -> None:
        self._rank, self._num_ranks, self._timeout = context.rank, context.world_size, timeout_seconds
        self._beat = self._tick = 0
        self._doing, self._since = "the start", time.monotonic()
        self._closed = threading.Event()
        self._failure_seen: float | None = None
        self._store: Any = None
        if self._num_ranks > 1:
            default = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - it has no public name
            self._store = dist.PrefixStore("halfstep", default)  # type: ignore[attr-defined]
            self._thread = threading.Thread(target=self._run, daemon=True, name="halfstep-heartbeat")
            self._thread.start()

    def tick(self, doing: str) -> None:
        """The main thread has made progress; all ranks make the same calls in the same order."""
        self._tick, self._doing, self._since = self._tick + 1, doing, time.monotonic()

    @property
    def doing(self) -> str:
        """What the main thread does."""
        return self._doing

    def fail(self, message: str) -> None:
        """Post that this rank fails, so that ranks whose main thread hangs end as well."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone with rank 0
                self._store.set(_FAILED, f"rank {self._rank}: {message}"[:2000])

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        if self._store is not None:
            self._thread.join(5 * _BEAT_SECONDS)

    def states(self) -> dict[int, RankState]:
        """What every rank posted last; without those that have posted nothing."""
        states = {}
        for rank in range(self._num_ranks):
            with contextlib.suppress(RuntimeError, ValueError):
                if self._store.check([str(rank)]):
                    states[rank] = RankState(**json.loads(self._store.get(str(rank))))
        return states

    def explain(self) -> str:
        """Which ranks are dead or behind."""
        before = self.states()
        time.sleep(3 * _BEAT_SECONDS)
        return describe_ranks_behind(before, self.states(), self._num_ranks, self._rank)

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.wait(_BEAT_SECONDS):
            try:
                self._post()
                reason = self._reason_to_exit()
            except RuntimeError:  # the store is gone: rank 0 has ended, and every message fails
                return
            if reason is not None and not self._closed.is_set():
                self.fail(reason)
                sys.stderr.write(f"halfstep: [rank {self._rank}] {reason} This rank, in {self._doing}, ends now.\n")
                sys.stderr.flush()
                os._exit(1)

    def _post(self) -> None:
        self._beat += 1
        state = {
            "beat": self._beat,
            "tick": self._tick,
            "doing": self._doing,
            "seconds": round(time.monotonic() - self._since, 1),
        }
        self._store.set(str(self._rank), json.dumps(state))

    def _reason_to_exit(self) -> str | None:
        now = time.monotonic()
        if self._failure_seen is None and self._store.check([_FAILED]):
            self._failure_seen = now
        if self._failure_seen is not None and now - self._failure_seen > _GRACE_SECONDS:
            return f"Another rank has failed ({self._store.get(_FAILED).decode()})."
        waited = now - self._since
        if waited < self._timeout + _GRACE_SECONDS / 2:
            return None
        states = self.states()
        slowest = min(state.tick for state in states.values())
        behind = [rank for rank, state in states.items() if state.tick == slowest]
        if slowest < self._tick and all(states[rank].seconds > self._timeout for rank in behind):
            shown = ", ".join(f"rank {rank} in {states[rank].doing}" for rank in behind[:3])
            return f"No progress for {waited:.0f} s (timeout={self._timeout:g}): the others wait for {shown}."
        return None


def describe_ranks_behind(before: dict[int, RankState], after: dict[int, RankState], num_ranks: int, rank: int) -> str:
    """Dead and late ranks, from two readings some seconds apart; `rank` is the one that reads."""
    if not after:
        return "The store of the process group does not answer, so rank 0's process or torchrun has ended."
    others = [each for each in range(num_ranks) if each != rank]
    dead = [r for r in others if r not in after or (r in before and after[r].beat == before[r].beat)]
    if dead:
        last = after.get(dead[0])
        place = f", last seen in {last.doing}" if last is not None else ""
        return f"No sign of life of rank {few(list(map(str, dead)))}{place}."
    slowest = min(state.tick for state in after.values())
    behind = [r for r, state in after.items() if state.tick == slowest]
    if len(behind) < len(after):
        state = after[behind[0]]
        return f"The others wait for rank {few(list(map(str, behind)))}, in {state.doing} for {state.seconds:.0f} s."
    return "All ranks live and have passed the same number of batches."


@contextlib.contextmanager
def watch_ranks(context: RunContext, timeout_seconds: float) -> Iterator[Heartbeat]:
    """A block in which the ranks watch each other; a message that fails becomes a RankError that names the rank to blame."""
    heartbeat = Heartbeat(context, timeout_seconds)
    try:
        yield heartbeat
    except BaseException as error:
        if context.world_size == 1 or not is_communication_error(error):
            heartbeat.fail(f"{type(error).__name__}: {error}")
            raise
        cause = error.__cause__ or error if isinstance(error, RankError) else error
        first_line = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        explanation = heartbeat.explain()
        heartbeat.fail(explanation)
        raise RankError(
            f"Rank {context.rank} of {context.world_size} lost the others in {heartbeat.doing} (timeout={timeout_seconds:g} s). "
            f"{explanation} Look at the errors of the other ranks; the run resumes from its last checkpoint with --resume, or by "
            f"itself under torchrun --max-restarts. ({first_line})"
        ) from error
    finally:
        heartbeat.close()


def is_communication_error(error: BaseException) -> bool:
    """Whether a message between ranks failed."""
    if isinstance(error, dist.DistError | RankError):
        return True
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, HalfstepError)
        and _COMMUNICATION.search(str(error)) is not None
    )
