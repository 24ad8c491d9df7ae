"""One logger for everything Halfstep says while it works.

Below `report/` nothing prints. A choice made for the user, a name that was mapped, a setting that a
checkpoint replaced: each is said once through the logger `halfstep`, at INFO, and a loss of something
the user asked for at WARNING. Where the program has set up logging of its own, the lines go there; where
it has not, they go to stderr, because a message that nobody sees has not been said.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["logger", "say", "warn"]


class _Fallback(logging.Handler):
    """Writes to stderr, but only while nobody has configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            sys.stderr.write(f"halfstep: {record.getMessage()}\n")


logger = logging.getLogger("halfstep")
if not logger.handlers:
    logger.addHandler(_Fallback())
    logger.setLevel(logging.INFO)


def say(message: str) -> None:
    """Tell the user about a choice that was made for them."""
    logger.info(message)


def warn(message: str) -> None:
    """Tell the user that something they asked for will not be as they expect."""
    logger.warning(message)
