"""Findings as a GitLab Code Quality report: a list of issues for `artifacts: reports: codequality`.

GitLab follows an issue between pipelines by its fingerprint, and shows only one issue per fingerprint. So it is made of the
file, the rule, the text of the line and a running number for equal ones, and does not change when lines move.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import PurePath
from typing import Any

from halfstep.check.files.source import Source
from halfstep.check.finding import Finding
from halfstep.check.session import Outcome
from halfstep.report.check_json import region_of

__all__ = ["as_gitlab"]

_SEVERITIES = {"error": "critical", "warning": "major", "advice": "info"}


def as_gitlab(outcome: Outcome) -> str:
    """All findings as a JSON list."""
    occurrences: Counter[str] = Counter()
    issues = []
    for result in outcome.results:
        for finding in result.findings:
            identity = _identity(finding, result.source)
            occurrences[identity] += 1
            issues.append(_issue(finding, result.source, f"{identity}\0{occurrences[identity]}"))
    return json.dumps(issues, indent=2)


def _identity(finding: Finding, source: Source | None) -> str:
    line = source.line_of(finding.cell, finding.line) if source is not None else None
    return "\0".join((_path(finding), finding.code, (line or finding.message).strip()))


def _issue(finding: Finding, source: Source | None, identity: str) -> dict[str, Any]:
    region = region_of(finding, source)
    end = region.end or region.start
    cell = f"cell {finding.cell}, line {finding.line}: " if finding.cell is not None else ""
    instead = f" Instead: {finding.instead}" if finding.instead else ""
    return {
        "description": f"{finding.code} {cell}{finding.message}{instead}",
        "check_name": finding.name,
        "fingerprint": hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest(),
        "severity": _SEVERITIES[finding.severity],
        "location": {
            "path": _path(finding),
            "lines": {"begin": region.start.line, "end": max(end.line, region.start.line)},
        },
    }


def _path(finding: Finding) -> str:
    return PurePath(finding.path).as_posix()
