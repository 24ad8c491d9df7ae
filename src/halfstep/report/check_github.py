"""Findings as GitHub workflow commands, which annotate the lines of a pull request.

GitHub splits a command at line breaks, colons and commas, so those are escaped the way its toolkit does it.
"""

from __future__ import annotations

from halfstep.check.finding import Finding
from halfstep.check.session import Outcome

__all__ = ["as_github"]

_LEVELS = {"error": "error", "warning": "warning", "advice": "notice"}


def as_github(outcome: Outcome) -> str:
    """One command for each finding."""
    return "\n".join(_command(finding) for finding in outcome.findings)


def _command(finding: Finding) -> str:
    values: dict[str, object] = {"file": finding.path}
    location = ""
    if finding.cell is None:
        values |= {"line": finding.line, "col": finding.column}
        if finding.end_line is not None:
            values["endLine"] = finding.end_line
        # GitHub accepts an end column only if the annotation is on one line.
        if finding.end_column is not None and finding.end_line in {None, finding.line}:
            values["endColumn"] = finding.end_column
    else:  # a notebook's file is JSON, so its line numbers mean nothing to the reader
        location = f"cell {finding.cell}, line {finding.line}: "
    values["title"] = f"{finding.code} {finding.name}"
    properties = ",".join(f"{key}={_escape(str(value), 'property')}" for key, value in values.items())
    instead = f"\nInstead: {finding.instead}" if finding.instead else ""
    return f"::{_LEVELS[finding.severity]} {properties}::{_escape(location + finding.message + instead, 'data')}"


def _escape(text: str, kind: str) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if kind == "property" else text
