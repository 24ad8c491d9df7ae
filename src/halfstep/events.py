"""The one logger of Halfstep.

Below `report/` nothing prints. A choice made for the user, a name that was mapped, a setting that a
checkpoint replaced: each is logged once through the logger `halfstep`, at INFO, and anything that will not be as the
user requested at WARNING. Messages go to the program's own logging if it has configured any, and to stderr otherwise.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["log_info", "log_warning", "logger"]


class _Fallback(logging.Handler):
    """Writes to stderr, but only while the program has not configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            sys.stderr.write(f"halfstep: {record.getMessage()}\n")


logger = logging.getLogger("halfstep")
if not logger.handlers:
    logger.addHandler(_Fallback())
    logger.setLevel(logging.INFO)


def log_info(message: str) -> None:
    """Log a choice that was made for the user."""
    logger.info(message)


def log_warning(message: str) -> None:
    """Log that something the user requested will not be as they expect."""
    logger.warning(message)
