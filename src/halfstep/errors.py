"""Errors whose message has what happened, the values involved, and what to do.

    HalfstepError
    |-- SettingError      (also a ValueError)      a setting, name or file that cannot be used
    |-- MissingError      (also an ImportError)    something that has to be installed first
    |-- OverflowStop      (also a RuntimeError)    training stopped: no usable gradient for many steps
    |-- ExpectationError  (also an AssertionError) a run stores or computes in other formats than expected
    `-- RankError         (also a RuntimeError)    another rank of the run died, hangs or differs

Commands turn any of them into one message on stderr and an exit code; a traceback at the command
line means a bug in Halfstep.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ExpectationError",
    "HalfstepError",
    "MissingError",
    "OverflowStop",
    "RankError",
    "SettingError",
    "nearest",
    "unknown",
]


_MOST_LISTED = 30  # a longer list of names would hide the message
_NUM_SIMILAR = 5


class HalfstepError(Exception):
    """Any error that Halfstep raises on purpose; its message has the remedy."""


class SettingError(HalfstepError, ValueError):
    """A setting, a name or a file that cannot be used."""


class MissingError(HalfstepError, ImportError):
    """Something this feature needs is not installed."""


class OverflowStop(HalfstepError, RuntimeError):
    """Training stopped because too many steps in a row had no usable gradient."""


class ExpectationError(HalfstepError, AssertionError):
    """A run does not store or compute what `expect` asked for, or that was not observed."""


class RankError(HalfstepError, RuntimeError):
    """Another rank of the run died or did not answer in time."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most similar to `name`, or None if none is close."""
    folded = {k.casefold(): k for k in known}
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)
    return folded[close[0]] if close else None


def unknown(kind: str, name: object, known: Iterable[str], advice: str = "") -> SettingError:
    """The error for an unknown name: the nearest known one, and the known names, or of a long list the similar ones."""
    known = list(known)
    close = nearest(str(name), known)
    hint = f" Did you mean {close!r}?" if close else ""
    tail = f" {advice}" if advice else ""
    if len(known) <= _MOST_LISTED:
        return SettingError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.{tail}")
    folded = {each.casefold(): each for each in known}
    similar = difflib.get_close_matches(str(name).casefold(), folded, n=_NUM_SIMILAR, cutoff=0.5)
    others = [folded[each] for each in similar if folded[each] != close]
    listed = f" Also similar: {', '.join(others)}." if others else ""
    return SettingError(f"Unknown {kind} {name!r}.{hint}{listed}{tail}")
