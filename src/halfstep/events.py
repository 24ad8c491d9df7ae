"""The one logger of Halfstep.

Below `report/` nothing prints. A choice made for the user, a name that was mapped, a setting that a
checkpoint replaced: each is logged through the logger `halfstep`, at INFO, and anything that will not be as the
user requested at WARNING. Messages go to the program's own logging if it has configured any, and to stderr otherwise. A
level that the program set is never changed. What a set-up reports is logged once per process: a program that builds ten
Engines of the same kind reads it once. On a terminal a message is folded at words; in a file it stays one line.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import TextIO

__all__ = [
    "fold",
    "fold_lines",
    "log_info",
    "log_once",
    "log_warning",
    "logger",
    "message_text",
    "quiet",
    "terminal_width",
]

_NARROWEST = 40  # columns; text folded more narrowly is unreadable, so the terminal breaks it instead


def terminal_width(stream: TextIO) -> int | None:
    """The number of columns of the terminal that a stream writes to; None if it writes to a file or a pipe."""
    if not stream.isatty():
        return None
    import shutil  # it loads every compression module

    return max(_NARROWEST, shutil.get_terminal_size().columns)


def fold(text: str, width: int | None, hang: int = 0, first: str = "") -> str:
    """The text after `first`, folded at blanks so that names and options can be copied; following lines are indented by `hang`."""
    if width is None or not text.strip():
        return first + text
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * hang,
        break_on_hyphens=False,
        break_long_words=False,
    )


def message_text(message: str) -> str:
    """A message as stderr shows it, with the name of the program in front."""
    width = terminal_width(sys.stderr)
    first, *rest = message.split("\n")
    return (
        "\n".join([fold(first, width, 2, "halfstep: "), *([fold_lines("\n".join(rest), width)] if rest else [])]) + "\n"
    )


def fold_lines(text: str, width: int | None) -> str:
    """Each line folded; a row of a table continues below its second column."""
    return "\n".join(fold(line, width, _hang(line)) for line in text.split("\n"))


def _hang(line: str) -> int:
    """Where the rest of a line continues: below the second column of a table, else two columns in."""
    first_cell = re.match(r"\s*\S+(?: \S+)*\s{2,}(?=\S)", line)
    return first_cell.end() if first_cell and first_cell.end() < _NARROWEST else 2


class _Fallback(logging.Handler):
    """Writes to stderr, but only while the program has not configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and logger.handlers == [self]:
            sys.stderr.write(message_text(record.getMessage()))


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
