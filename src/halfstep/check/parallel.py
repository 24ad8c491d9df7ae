"""Check many files, in several processes where that is faster.

Starting workers takes as long as checking about twenty files (4 ms each), so a few files are checked in this process.
Results are in the order of the files, whichever finished first. Each file has a limit of CPU time: a file that exceeds it
is skipped with a finding, like one that is nested too deeply. The limit uses a signal, so only the command sets it, which
owns its process, and not the library call.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from halfstep.check.files.problems import TooDeep
from halfstep.check.finding import Place
from halfstep.check.options import Options
from halfstep.check.registry import words_of_rules
from halfstep.check.runner import FileResult, check_target
from halfstep.check.walk import Target
from halfstep.errors import HalfstepError

__all__ = ["MAX_SECONDS", "check_targets"]

# CPU time, so that load on the machine does not count; the slowest real file measured took less than one.
MAX_SECONDS = 10.0
FEW = 48  # files that are checked faster than workers start
CHUNK = 16
# Syntax trees are many small objects that are freed together: collecting garbage among them took a quarter of the time.
_RARELY = (1_000_000, 20, 20)


class _TimeLimit(BaseException):
    """Raised by the alarm; not an Exception, so that a handler for failures of rules does not catch it."""


def check_targets(targets: Sequence[Target], options: Options, *, limit: bool = False) -> Iterator[FileResult]:
    """The results of all files, in order; `limit` also bounds the CPU time for each one."""
    workers = min(_num_cores(), len(targets) // FEW + 1)
    if workers < 2 or threading.active_count() > 1 or not limit:
        # In a process with threads, a fork may copy a locked lock; and a library call starts no processes.
        with _collecting_rarely() if limit else contextlib.nullcontext():
            for target in targets:
                yield _check_one(target, options, limit=limit)
        return
    yield from _check_in_processes(targets, options, workers)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_in_processes(targets: Sequence[Target], options: Options, workers: int) -> Iterator[FileResult]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if "fork" in methods else None)
    words_of_rules("script")  # loads the rules once, and not in each worker
    chunks = [targets[i : i + CHUNK] for i in range(0, len(targets), CHUNK)]
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_work) as pool:
        try:
            with _interrupts_blocked():
                futures = [pool.submit(_check_chunk, chunk, options) for chunk in chunks]
            for future in futures:
                yield from future.result()
        except BrokenProcessPool:
            raise HalfstepError(
                "A worker process died during the check, possibly because memory ran out. "
                "Check fewer files at once to find the file that causes it."
            ) from None
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                # The command ends now. A second Ctrl-C would end it with a traceback, or without its exit code.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            # Interrupted: nobody waits for the results, so the workers need not finish.
            for child in multiprocessing.active_children():
                child.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Delay Ctrl-C: raised while processes start, KeyboardInterrupt can be lost or leave a lock locked."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_work() -> None:
    # Only the parent handles Ctrl-C; it then terminates its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    gc.set_threshold(*_RARELY)


def _exit_with_parent() -> None:
    """Exit when the parent was killed: nothing else would end this worker."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _check_chunk(targets: Sequence[Target], options: Options) -> list[FileResult]:
    return [_check_one(target, options, limit=True) for target in targets]


def _check_one(target: Target, options: Options, *, limit: bool) -> FileResult:
    can_alarm = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not limit or not can_alarm:
        return check_target(target, options)
    before = signal.signal(signal.SIGPROF, _raise_time_limit)
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        return check_target(target, options)
    except _TimeLimit:
        message = f"Checking this file took more than {MAX_SECONDS:g} seconds of CPU time; it was skipped."
        finding = TooDeep.finding(Place(target.path), message)
        wanted = options.selection(target.project, target.path).wants(finding)
        return FileResult(target.path, (finding,) if wanted else ())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _raise_time_limit(_signum: int, _frame: FrameType | None) -> None:
    raise _TimeLimit
