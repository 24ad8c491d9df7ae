"""The processes of a run on several ranks, asked as one.

Every rank gets every request and answers it; a request is done when all have answered. A rank that fails, dies or hangs ends
the run on all of them: the others, which wait for it in a message, notice it sooner (a closed connection) or later (the timeout
of the process group), and fail too. So after the first failure the others have a few seconds to answer, and the failure that
is reported is the one that caused the rest.

The ranks find each other through a store in this process, whose port the system chose: nothing else can have taken it. The
variables of a launcher are set as torchrun sets them, because jobs read them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from halfstep.backends.launch import LOCALHOST
from halfstep.comparison.measurements import LOST, Failure
from halfstep.comparison.process import ChildProcess, Stopped
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.spec import Answer, ChildSpec, Request

__all__ = ["RankProcesses", "choose_failure", "thread_variables"]

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0  # for the other ranks to fail as well


def thread_variables(settings: CompareSettings) -> dict[str, str]:
    """The number of threads of each rank: together they use every core once, unless the user has chosen."""
    if settings.ranks == 1 or os.environ.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // settings.ranks))}


class RankProcesses:
    """One child per rank, with the methods of a single child; rank 0 writes the run file."""

    def __init__(self, spec: ChildSpec, folder: Path, name: str, stopped: Callable[[], bool]) -> None:
        self._stopped, self._timeout = stopped, float(spec.settings.timeout)
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            LOCALHOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self._timeout)
        )
        num_ranks = spec.settings.ranks
        self._children = [
            ChildProcess(
                spec,
                folder,
                name if rank == 0 else f"{name}.rank{rank}",
                stopped,
                self._variables(rank, num_ranks) | thread_variables(spec.settings),
            )
            for rank in range(num_ranks)
        ]

    def _variables(self, rank: int, num_ranks: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": LOCALHOST,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    @property
    def is_busy(self) -> bool:
        """Whether an answer of a rank is outstanding."""
        return any(child.is_busy for child in self._children)

    def ask(self, do: str, *, count: int = 0, patient: bool = False) -> Answer:
        """Send a request to every rank and wait for all; the answer is rank 0's, or the failure that ended the run.

        As with one child, waiting raises `Stopped` when the comparison is asked to stop, and a `patient` call waits regardless.
        """
        if self.is_busy:
            answer = self._wait(patient=True)
            if answer.failure is not None:
                return answer
        for child in self._children:
            child.send(Request(do, count))
        return self._wait(patient=patient)

    def _wait(self, *, patient: bool) -> Answer:
        answers: dict[int, Answer] = {}
        end: float | None = None  # when the ranks that have not answered count as hanging
        waiting = [rank for rank, child in enumerate(self._children) if child.is_busy]
        while waiting and (end is None or time.monotonic() < end):
            if self._stopped() and not patient:
                raise Stopped
            for rank in list(waiting):
                answer = self._children[rank].poll(_POLL_SECONDS / len(waiting))
                if answer is None:
                    continue
                answers[rank] = answer
                waiting.remove(rank)
                limit = time.monotonic() + (self._timeout if answer.failure is None else _GRACE_SECONDS)
                end = limit if end is None or answer.failure is not None else end
        failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure is not None}
        if not failures and not waiting:
            return answers.get(0, Answer())
        for child in self._children:
            child.kill()
        return Answer(choose_failure(failures, waiting, len(self._children), self._timeout))

    def remove_logs(self) -> None:
        """Delete the logs of all ranks."""
        for child in self._children:
            child.remove_logs()

    def close(self) -> None:
        """End the processes that are still running; closing twice is fine."""
        for child in self._children:
            child.close()
        with contextlib.suppress(AttributeError):
            del self._store


def choose_failure(failures: Mapping[int, Failure], silent: list[int], num_ranks: int, timeout: float) -> Failure:
    """The failure that caused the others; `silent` are the ranks that have not answered."""
    own = {rank: failure for rank, failure in failures.items() if failure.kind != LOST}
    lost = next((failure for failure in failures.values() if failure.kind == LOST), None)
    # A rank that torch aborts because a message never came is no cause, if another one hangs.
    aborted = {
        rank for rank, failure in own.items() if silent and failure.kind == "killed" and "SIGABRT" in failure.reason
    }
    for rank, failure in own.items():
        if rank not in aborted:
            return Failure(failure.kind, f"Rank {rank} of {num_ranks}: {failure.reason}")
    if silent:
        shown = ", ".join(map(str, silent))
        detail = f" ({lost.reason})" if lost is not None else ""
        return Failure(
            LOST,
            f"Rank {shown} of {num_ranks} did not answer, and the others waited for it for timeout={timeout:g} s{detail}. Look for "
            "code that only some ranks run, or raise the limit with --set timeout=SECONDS.",
        )
    assert lost is not None
    return lost
