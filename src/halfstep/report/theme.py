"""The colours of the terminal, in one place: readable on black and on white.

Yellow and white vanish on a white background, blue and dim on some black ones, cyan on many light ones. That leaves red,
green, magenta and bold. A colour is never the only sign: the word next to it has the same meaning.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "BAD",
    "BAR",
    "CAUTION",
    "GOOD",
    "STRONG",
    "console_options",
    "make_progress_console",
    "paint",
    "uses_colour",
]

# Names that rich knows; `paint` writes their codes.
BAD, CAUTION, GOOD, STRONG = "red", "bold magenta", "green", "bold"
_CODES = {BAD: "31", CAUTION: "1;35", GOOD: "32", STRONG: "1"}
# rich's own are cyan, yellow and fixed colours.
BAR = {
    "bar.complete": GOOD,
    "bar.finished": GOOD,
    "bar.pulse": CAUTION,
    "bar.back": "default",
    "progress.download": "default",
    "progress.remaining": "default",
    "progress.elapsed": "default",
    "progress.percentage": "default",
}


def uses_colour(stream: TextIO) -> bool:
    """Whether to write escape codes: to a terminal that knows them, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in {"dumb", "unknown"}


def paint(text: str, style: str, *, colour: bool) -> str:
    """The text in a style, where `colour` is on."""
    return f"\033[{_CODES[style]}m{text}\033[0m" if colour else text


def make_progress_console() -> Console:
    """The console of a progress bar, on stderr."""
    from rich.console import Console
    from rich.theme import Theme

    return Console(stderr=True, theme=Theme(BAR), **console_options(sys.stderr))


def console_options(stream: TextIO) -> dict[str, Any]:
    """Options of a rich console on a stream; with NO_COLOR rich would still write bold."""
    return {"highlight": False, "color_system": "auto" if uses_colour(stream) else None}
