"""The one logger of Halfstep.

Below `report/` nothing prints. A choice made for the user, a name that was mapped, a setting that a
checkpoint replaced: each is logged through the logger `halfstep`, at INFO, and anything that will not be as the
user requested at WARNING. Messages go to the program's own logging if it has configured any, and to stderr otherwise. A
level that the program set is never changed. What a set-up reports is logged once per process: a program that builds ten
Engines of the same kind reads it once.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

__all__ = ["log_info", "log_once", "log_warning", "logger", "quiet"]


class _Fallback(logging.Handler):
    """Writes to stderr, but only while the program has not configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and logger.handlers == [self]:
            sys.stderr.write(f"halfstep: {record.getMessage()}\n")


logger = logging.getLogger("halfstep")
logger.addHandler(_Fallback())
if logger.level == logging.NOTSET:
    # This module is imported at the first use, which may be after the program set a level.
    logger.setLevel(logging.INFO)
_logged: set[str] = set()  # messages of `log_once`


def log_info(message: str) -> None:
    """Log a choice that was made for the user."""
    logger.info(message)


def log_once(message: str) -> None:
    """Log a choice that was made for the user, unless the same message was logged in this process before."""
    if logger.isEnabledFor(logging.INFO) and message not in _logged:
        _logged.add(message)
        logger.info(message)


def log_warning(message: str) -> None:
    """Log that something the user requested will not be as they expect."""
    logger.warning(message)


@contextlib.contextmanager
def quiet(*, unless: bool = False) -> Iterator[None]:
    """Log errors only inside this block: rank 0 logs for all ranks of a run."""
    level = logger.level
    if not unless:
        logger.setLevel(max(level, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(level)
