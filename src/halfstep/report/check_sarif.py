"""Findings as SARIF 2.1.0, the format of code-scanning services.

Advice is a "note". The region of a finding in a notebook is that of the cell's line in the JSON of the file; the cell and the
line inside it are a logical location.
"""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from halfstep import __version__
from halfstep.check.files.source import Source
from halfstep.check.finding import Edit, Finding
from halfstep.check.registry import all_rules
from halfstep.check.rule import Rule
from halfstep.check.session import Outcome
from halfstep.report.check_json import edit_place, region_of

__all__ = ["as_sarif"]

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "advice": "note"}


def as_sarif(outcome: Outcome) -> str:
    """One SARIF run with the rules that have findings, and their results."""
    codes = {finding.code for finding in outcome.findings}
    rules = [rule for rule in all_rules() if rule.code in codes]
    index = {rule.code: i for i, rule in enumerate(rules)}
    results = [_result(f, result.source, index) for result in outcome.results for f in result.findings]
    driver = {
        "name": "halfstep",
        "version": __version__,
        "semanticVersion": __version__,
        "rules": [_rule(rule) for rule in rules],
    }
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _rule(rule: type[Rule]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.title()},
        "fullDescription": {"text": rule.reason},
        "help": {"text": "\n".join([rule.reason, "", *rule.references])},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }
    links = [link for link in rule.references if link.startswith("https://")]
    return values | ({"helpUri": links[0].split()[0]} if links else {})


def _result(finding: Finding, source: Source | None, index: dict[str, int]) -> dict[str, Any]:
    text = finding.message + (f"\nInstead: {finding.instead}" if finding.instead else "")
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": index[finding.code],
        "level": _LEVELS[finding.severity],
        "message": {"text": text},
        "locations": [_location(finding, source)],
    }
    if finding.fix is not None and source is not None and finding.cell is None:
        replacements = [_replacement(edit, source) for edit in finding.fix.edits]
        change = {"artifactLocation": {"uri": _uri(finding.path)}, "replacements": replacements}
        properties = {"safe": finding.fix.safe}
        fix = {"description": {"text": finding.fix.title}, "artifactChanges": [change], "properties": properties}
        result["fixes"] = [fix]
    return result


def _location(finding: Finding, source: Source | None) -> dict[str, Any]:
    region = region_of(finding, source)
    values = {"startLine": region.start.line, "startColumn": region.start.column}
    if region.end is not None:
        values |= {"endLine": region.end.line, "endColumn": region.end.column}
    physical = {"artifactLocation": {"uri": _uri(finding.path)}, "region": values}
    if finding.cell is None:
        return {"physicalLocation": physical}
    name = f"cell {finding.cell}, line {finding.line}"
    return {"physicalLocation": physical, "logicalLocations": [{"name": name, "kind": "module"}]}


def _replacement(edit: Edit, source: Source) -> dict[str, Any]:
    line, column, end_line, end_column = edit_place(edit, source)
    region = {"startLine": line, "startColumn": column, "endLine": end_line, "endColumn": end_column}
    return {"deletedRegion": region, "insertedContent": {"text": edit.text}}


def _uri(path: str) -> str:
    place = PurePath(path)
    text = quote(place.as_posix(), errors="replace")
    return f"file://{text}" if place.is_absolute() else text
