"""One thread that sends what a run logs, in order, so that a slow server never holds up a step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Sender"]


class Sender:
    """Runs tasks one after the other in a thread; the first that fails is reported by the next call, and ends it.

    MLflow's own queue runs ten threads, which race to create the folder of a metric in a file store, and it only prints
    what failed: values are lost without an error.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._error: Exception | None = None

    def submit(self, task: Callable[[], object]) -> None:
        """Run `task` after those before it; raise what one of them has raised."""
        self._raise()
        self._pool.submit(self._run, task)

    def close(self) -> None:
        """Wait for all tasks; raise what one of them has raised."""
        self._pool.shutdown()
        self._raise()

    def _run(self, task: Callable[[], object]) -> None:
        if self._error is None:  # a server that did not answer once would cost its time limit at every task
            try:
                task()
            except Exception as error:  # of any library
                self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
