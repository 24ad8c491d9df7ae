"""Findings as JUnit XML, which most CI servers show as test results.

A file with findings is a test suite, and each finding a failed test case. Without findings there is one suite with one case
that passed, because servers take a report without tests for a mistake.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from xml.sax.saxutils import escape, quoteattr

from halfstep.check.finding import Finding
from halfstep.check.runner import FileResult
from halfstep.check.session import Outcome
from halfstep.report.check_json import region_of

__all__ = ["as_junit"]

# Characters that XML 1.0 cannot express, not even as references.
_INVALID = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_junit(outcome: Outcome) -> str:
    """The report as one XML document."""
    num_findings = len(outcome.findings)
    suites = [_suite(result) for result in outcome.results]
    if not suites:
        suites = [
            '  <testsuite name="halfstep" tests="1" failures="0" errors="0">\n'
            '    <testcase name="No findings" classname="halfstep"/>\n  </testsuite>'
        ]
    counts = f'tests="{max(num_findings, 1)}" failures="{num_findings}" errors="0"'
    head = f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites name="halfstep" {counts}>'
    return "\n".join([head, *suites, "</testsuites>"])


def _suite(result: FileResult) -> str:
    count = len(result.findings)
    cases = [_case(finding, result) for finding in result.findings]
    head = f'  <testsuite name={_quoted(result.path)} tests="{count}" failures="{count}" errors="0" package="halfstep">'
    return "\n".join([head, *cases, "  </testsuite>"])


def _case(finding: Finding, result: FileResult) -> str:
    start = region_of(finding, result.source).start
    place = f"line {finding.line}, column {finding.column}"
    if finding.cell is not None:
        place = f"cell {finding.cell}, {place}"
    instead = f"\nInstead: {finding.instead}" if finding.instead else ""
    name = _quoted(f"halfstep.{finding.code}")
    class_name = _quoted(str(PurePath(finding.path).with_suffix("")))
    detail = escape(_INVALID.sub("?", f"{place}: {finding.message}{instead}"))
    return (
        f'    <testcase name={name} classname={class_name} file={_quoted(finding.path)} line="{start.line}" '
        f'column="{start.column}">\n'
        f"      <failure message={_quoted(finding.message)} type={_quoted(finding.severity)}>{detail}</failure>\n"
        "    </testcase>"
    )


def _quoted(text: str) -> str:
    return quoteattr(_INVALID.sub("?", text))
