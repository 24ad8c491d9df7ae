"""A finding, its place, and the edits that would fix it.

Findings are all that rules return and all that reports receive. Places count as editors do: the first line is 1, the
first column is 1. Edits are in characters of the text that was checked, so that applying them changes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["SEVERITIES", "Edit", "Finding", "Fix", "Place", "Severity"]

Severity = Literal["error", "warning", "advice"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "advice")


@dataclass(frozen=True)
class Place:
    """Where a finding is: by default at the start of the file."""

    path: str
    line: int = 1
    column: int = 1
    end_line: int | None = None
    end_column: int | None = None
    cell: int | None = None  # of a notebook, from 1; lines and columns then count inside it


@dataclass(frozen=True, order=True)
class Edit:
    """Replace the characters from `start` up to `end` with `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Fix:
    """A change that corrects a finding: what it does, and its edits, none overlapping another.

    A safe fix may be applied without review: a script that ran still runs, and the mistake is gone. An unsafe one is
    right if an assumption is, which the text does not decide.
    """

    title: str
    edits: tuple[Edit, ...]
    safe: bool = True


@dataclass(frozen=True)
class Finding:
    """One mistake at one place."""

    code: str
    name: str
    severity: Severity
    path: str
    line: int
    column: int
    message: str  # what happens, with the names and values of this text
    instead: str = ""  # what to write, in the user's own names
    end_line: int | None = None
    end_column: int | None = None
    cell: int | None = None  # of a notebook, from 1; line and column count inside it
    fix: Fix | None = None

    @property
    def sort_key(self) -> tuple[str, int, int, int, str]:
        """Findings are ordered by file, cell, line, column and code."""
        return (self.path, self.cell or 0, self.line, self.column, self.code)
