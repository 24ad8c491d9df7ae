"""Findings as JSON: one list, one object for each.

`start` and `end` of an edit count characters of the text as it was checked: without a byte order mark, with plain line
feeds, and for a notebook with the code cells joined. `line` and `column` are the same positions for editors.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from halfstep.check.files.source import FilePlace, Source
from halfstep.check.finding import Edit, Finding
from halfstep.check.session import Outcome

__all__ = ["as_data", "as_json", "edit_place", "region_of"]


def as_json(outcome: Outcome) -> str:
    """The findings of all files as a JSON list."""
    return json.dumps([as_data(f, result.source) for result in outcome.results for f in result.findings], indent=2)


def as_data(finding: Finding, source: Source | None) -> dict[str, Any]:
    """One finding as plain values."""
    fix = None
    if finding.fix is not None:
        fix = {
            "title": finding.fix.title,
            "safe": finding.fix.safe,
            "edits": [_edit(edit, source) for edit in finding.fix.edits],
        }
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity,
        "path": finding.path,
        "line": finding.line,
        "column": finding.column,
        "end_line": finding.end_line,
        "end_column": finding.end_column,
        "cell": finding.cell,
        "message": finding.message,
        "instead": finding.instead,
        "fix": fix,
    }


@dataclass(frozen=True)
class Region:
    """The part of a file that a finding is about, in lines and columns of the file itself."""

    start: FilePlace
    end: FilePlace | None


def region_of(finding: Finding, source: Source | None) -> Region:
    """The region of a finding in its file; for a notebook, in the JSON of the cell."""
    source = source or Source(finding.path, "", "python")
    start = source.in_file(finding.cell, finding.line, finding.column)
    if finding.end_line is None or finding.end_column is None:
        return Region(start, None)
    return Region(start, source.in_file(finding.cell, finding.end_line, finding.end_column))


def _edit(edit: Edit, source: Source | None) -> dict[str, Any]:
    values: dict[str, Any] = {"start": edit.start, "end": edit.end, "text": edit.text}
    if source is not None:
        line, column, end_line, end_column = edit_place(edit, source)
        values |= {"line": line, "column": column, "end_line": end_line, "end_column": end_column}
        if source.cells:  # a fix may reach into other cells than the finding's
            values["cell"] = source.cell_line(bisect_right(_line_starts(source.text), edit.start)).cell
    return values


@lru_cache(maxsize=4)
def _line_starts(text: str) -> tuple[int, ...]:
    return (0, *(i + 1 for i, char in enumerate(text) if char == "\n"))


def edit_place(edit: Edit, source: Source) -> tuple[int, int, int, int]:
    """Line and column of an edit's start and end; in a notebook, lines count inside the cell."""
    starts = _line_starts(source.text)

    def place(offset: int) -> tuple[int, int]:
        line = bisect_right(starts, offset)
        return source.cell_line(line).line, offset - starts[line - 1] + 1

    return (*place(edit.start), *place(edit.end))
