"""Errors that are not Halfstep's own, as one message: exhausted memory, files that cannot be written.

The library passes them on, because a program wants to catch them by their type. At the command line a traceback would
hide what to do about them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path

from halfstep.errors import HalfstepError

__all__ = ["explain_error", "report_to_launcher"]


def explain_error(error: BaseException) -> HalfstepError | None:
    """The error with a remedy for one that is not Halfstep's; None for what must pass unchanged."""
    from halfstep.jobs.failures import error_text, is_out_of_memory, user_line

    first_line = (str(error).strip().splitlines() or [""])[0]
    if is_out_of_memory(error):
        device = "main memory" if isinstance(error, MemoryError) else "GPU memory"
        detail = f": {first_line}" if first_line else ""
        return HalfstepError(
            f"Out of {device}{user_line(error)}{detail}. Pass a smaller --batch, with --set accumulate=N for the same batch in N "
            "parts, or a lean precision; `halfstep plan` predicts what fits."
        )
    if isinstance(error, OSError) and error.errno is not None and error.errno != errno.EPIPE:
        name = error.filename if error.filename is not None else "A file"
        return HalfstepError(
            f"{name} cannot be read or written: {error.strerror or first_line}. Check its path and permissions, and the free "
            "disk space."
        )
    if isinstance(error, RecursionError):
        return HalfstepError(f"{error_text(error)}{user_line(error)}.")
    return None


def report_to_launcher(error: BaseException) -> str:
    """Write the error to the file in which torchrun expects it; returns "[rank N] " for one of several ranks."""
    from halfstep.backends.launch import read_launch

    try:
        launch = read_launch()
    except HalfstepError:  # the error may be that the environment cannot be read
        return ""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
        if isinstance(error, HalfstepError):
            _shorten_record(Path(os.environ["TORCHELASTIC_ERROR_FILE"]), str(error))
    return f"[rank {launch.rank}] " if launch.world_size > 1 else ""


def _shorten_record(file: Path, message: str) -> None:
    """Put the message in place of the traceback, which torchrun's summary prints and which hides what to do."""
    with contextlib.suppress(
        OSError, ValueError, KeyError, TypeError
    ):  # another version of torch may write it differently
        record = json.loads(file.read_text(encoding="utf-8"))
        record["message"]["extraInfo"]["py_callstack"] = message
        file.write_text(json.dumps(record), encoding="utf-8")
