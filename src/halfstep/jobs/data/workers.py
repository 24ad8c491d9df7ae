"""Worker processes of a DataLoader at the end of a program.

With `persistent_workers` and `pin_memory` on a GPU, torch waits at exit up to five seconds for each worker, one after the
other, and tells none of them to stop: with 16 workers for training and 16 for validation, up to 160 seconds after the last line
of a run. Functions that are registered later run earlier, so one registered after the workers have started stops them
before torch waits.
"""

from __future__ import annotations

import atexit
import weakref
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["stop_workers_at_exit"]

_stopped_at_exit: weakref.WeakSet[Any] = weakref.WeakSet()


def stop_workers_at_exit(loader: Any) -> None:
    """Stop the persistent workers of a DataLoader, if it is one and they have started, before the process ends."""
    iterator = getattr(loader, "_iterator", None) if isinstance(loader, DataLoader) else None
    if iterator is not None and iterator not in _stopped_at_exit:
        _stopped_at_exit.add(iterator)
        atexit.register(_stop, weakref.ref(iterator))


def _stop(reference: weakref.ref[Any]) -> None:
    stop = getattr(reference(), "_shutdown_workers", None)  # what torch itself calls where the loader is dropped
    if stop is not None:
        stop()
