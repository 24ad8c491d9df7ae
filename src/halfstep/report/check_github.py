"""Findings as GitHub workflow commands, which annotate the lines of a pull request.

GitHub splits a command at line breaks, colons and commas, so those are escaped the way its toolkit does it.
"""

from __future__ import annotations

from halfstep.check.files.source import Source
from halfstep.check.finding import Finding
from halfstep.check.session import Outcome
from halfstep.report.check_json import region_of

__all__ = ["as_github"]

_LEVELS = {"error": "error", "warning": "warning", "advice": "notice"}


def as_github(outcome: Outcome) -> str:
    """One command for each finding."""
    return "\n".join(_command(finding, result.source) for result in outcome.results for finding in result.findings)


def _command(finding: Finding, source: Source | None) -> str:
    region = region_of(finding, source)
    values: dict[str, object] = {"file": finding.path, "line": region.start.line, "col": region.start.column}
    if region.end is not None:
        values["endLine"] = region.end.line
        # GitHub accepts an end column only if the annotation is on one line.
        if region.end.line == region.start.line:
            values["endColumn"] = region.end.column
    # A notebook's line numbers are those of its JSON, which mean little to the reader.
    location = f"cell {finding.cell}, line {finding.line}: " if finding.cell is not None else ""
    values["title"] = f"{finding.code} {finding.name}"
    properties = ",".join(f"{key}={_escape(str(value), 'property')}" for key, value in values.items())
    instead = f"\nInstead: {finding.instead}" if finding.instead else ""
    return f"::{_LEVELS[finding.severity]} {properties}::{_escape(location + finding.message + instead, 'data')}"


def _escape(text: str, kind: str) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if kind == "property" else text
