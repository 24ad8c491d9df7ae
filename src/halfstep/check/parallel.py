"""Many files, over the cores of the machine where that pays.

Starting workers takes as long as checking some twenty files (about 4 ms each), so a few files are checked right here.
Results come in the order of the files, whoever finished first. Each file has a limit of processor time: a file that
takes more is given up with a finding, as one that is nested too deeply is. The limit uses a signal, so it belongs to the
command, which owns its process, and not to the library call.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from halfstep.check.files.walk import Target
from halfstep.check.options import Options
from halfstep.check.rules.files import TooDeep
from halfstep.check.runner import FileResult, check_target
from halfstep.errors import HalfstepError

__all__ = ["MAX_SECONDS", "check_targets"]

# Of processor time, which a busy machine does not use up; the slowest real file seen took less than one.
MAX_SECONDS = 10.0
FEW = 48  # files that are checked sooner than workers start
CHUNK = 16


class _Late(BaseException):
    """Raised by the alarm; not an Exception, so that no rule's failure is mistaken for it, nor the reverse."""


def check_targets(targets: Sequence[Target], options: Options, *, limit: bool = False) -> Iterator[FileResult]:
    """The results of all files, in their order; `limit` also bounds the time for each one."""
    workers = min(_num_cores(), len(targets) // FEW + 1)
    if workers < 2 or threading.active_count() > 1 or not limit:
        # In a process with threads, a fork may copy a lock that is held; and a library call starts no processes.
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
    chunks = [targets[i : i + CHUNK] for i in range(0, len(targets), CHUNK)]
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_work) as pool:
        try:
            with _interrupts_held():
                futures = [pool.submit(_check_chunk, chunk, options) for chunk in chunks]
            for future in futures:
                yield from future.result()
        except BrokenProcessPool:
            raise HalfstepError(
                "A worker process died while checking, as happens when memory runs out. "
                "Check fewer files at once to find the one it dies on."
            ) from None
        except BaseException:
            # Interrupted: nobody waits for results, so the workers need not finish what they have.
            for child in multiprocessing.active_children():
                child.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold the keyboard's interrupt back: raised in the midst of starting processes, it can be lost or leave a lock held."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_work() -> None:
    # The keyboard's interrupt goes to the parent alone, which then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Syntax trees are many small objects that die together: collecting among them cost a quarter of the time.
    gc.set_threshold(200_000, 20, 20)


def _end_with_parent() -> None:
    """Do not outlive a parent that was killed: nobody else would ever tell this worker to end."""
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
    before = signal.signal(signal.SIGPROF, _ring)
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        return check_target(target, options)
    except _Late:
        message = f"Checking this file took more than {MAX_SECONDS:g} seconds, and was given up."
        finding = TooDeep.finding((target.path, 1, 1, None, None, None), message)
        wanted = options.selection(target.project, target.path).wants(finding)
        return FileResult(target.path, (finding,) if wanted else ())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _ring(_signum: int, _frame: FrameType | None) -> None:
    raise _Late
