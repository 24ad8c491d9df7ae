"""Findings for machines: JSON, SARIF, GitHub commands, GitLab and JUnit reports, diffs."""

import json
import subprocess
from xml.etree import ElementTree as ET

import pytest

from halfstep.check.files.document import located_source, read_document
from halfstep.check.files.source import Cell, Source
from halfstep.check.finding import Edit, Finding, Fix
from halfstep.check.fixing import Fixed
from halfstep.check.runner import FileResult
from halfstep.check.session import Outcome
from halfstep.report.check_diff import as_diff
from halfstep.report.check_github import as_github
from halfstep.report.check_gitlab import as_gitlab
from halfstep.report.check_json import as_json
from halfstep.report.check_junit import as_junit
from halfstep.report.check_sarif import as_sarif

SOURCE = Source("dir/a b.py", "x = 1\ny = '\u00e9'; z\n", "python")
FIX = Fix("write w", (Edit(15, 16, "w"),))
FINDING = Finding("HS004", "syntax-error", "error", "dir/a b.py", 2, 10, "100%: a,b\nc", "write w", 2, 11, None, FIX)
IN_CELL = Finding("HS005", "too-deep", "advice", "n.ipynb", 3, 1, "deep", cell=2)
OUTCOME = Outcome((FileResult("dir/a b.py", (FINDING,), SOURCE), FileResult("n.ipynb", (IN_CELL,))), 2)


def test_json_is_a_list_of_objects_with_the_promised_keys():
    """code, name, severity, path, line, column, message, fix, and more."""
    first, second = json.loads(as_json(OUTCOME))
    assert {"code", "name", "severity", "path", "line", "column", "message", "fix"} <= set(first)
    assert (first["code"], first["line"], first["column"], second["cell"]) == ("HS004", 2, 10, 2)
    assert first["fix"] == {
        "title": "write w",
        "safe": True,
        "edits": [{"start": 15, "end": 16, "text": "w", "line": 2, "column": 10, "end_line": 2, "end_column": 11}],
    }
    assert second["fix"] is None
    assert json.loads(as_json(Outcome((), 0))) == []


def test_json_edits_in_a_notebook_name_their_cell():
    """Lines count inside it."""
    source = Source("n.ipynb", "a\nb\n", "notebook", (Cell(1, 1, 1), Cell(2, 2, 1)))
    finding = Finding("HS004", "n", "error", "n.ipynb", 1, 1, "m", cell=1, fix=Fix("t", (Edit(2, 3, "c"),)))
    (shown,) = json.loads(as_json(Outcome((FileResult("n.ipynb", (finding,), source),), 1)))
    (edit,) = shown["fix"]["edits"]
    assert (edit["cell"], edit["line"], edit["column"]) == (2, 1, 1)


def test_sarif_has_what_its_schema_requires():
    """The required properties of SARIF 2.1.0, level by level."""
    log = json.loads(as_sarif(OUTCOME))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "halfstep"
    assert [rule["id"] for rule in driver["rules"]] == ["HS004", "HS005"]
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
        assert rule["defaultConfiguration"]["level"] in {"none", "note", "warning", "error"}
    for result in run["results"]:
        assert result["message"]["text"]
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in {"none", "note", "warning", "error"}
        assert len(result["locations"]) == 1


def test_sarif_places_and_fixes():
    """Columns count from 1, the end column is just past the end, spaces in a path are escaped."""
    first, second = json.loads(as_sarif(OUTCOME))["runs"][0]["results"]
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "dir/a%20b.py"
    assert place["region"] == {"startLine": 2, "startColumn": 10, "endLine": 2, "endColumn": 11}
    (change,) = first["fixes"][0]["artifactChanges"]
    assert first["fixes"][0]["properties"] == {"safe": True}
    assert change["artifactLocation"] == place["artifactLocation"]
    (replacement,) = change["replacements"]
    assert replacement["deletedRegion"] == place["region"]
    assert replacement["insertedContent"]["text"] == "w"
    assert second["locations"][0]["logicalLocations"][0]["name"] == "cell 2, line 3"


def test_sarif_of_nothing_is_a_run_without_results():
    """Without findings the run has an empty list, so that a service closes earlier findings."""
    (run,) = json.loads(as_sarif(Outcome((), 1)))["runs"]
    assert run["results"] == []


def test_github_commands_are_escaped():
    """Line breaks, percent signs, and in properties colons and commas."""
    first, second = as_github(OUTCOME).split("\n")
    assert first == (
        "::error file=dir/a b.py,line=2,col=10,endLine=2,endColumn=11,title=HS004 syntax-error"
        "::100%25: a,b%0Ac%0AInstead: write w"
    )
    assert second == "::notice file=n.ipynb,line=1,col=1,title=HS005 too-deep::cell 2, line 3: deep"
    odd = Finding("HS004", "n", "warning", "a,b:c.py", 1, 1, "m")
    assert as_github(Outcome((FileResult("a", (odd,)),), 1)).startswith("::warning file=a%2Cb%3Ac.py,line=1")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"a\nBAD\nc\n", b"a\nFINE\nc\n"),
        (b"a\r\nBAD\r\n", b"a\r\nFINE\r\n"),
        (b"BAD", b"FINE"),
        (b"a\nBAD", b"a\nBAD\nx\n"),
    ],
)
def test_a_diff_is_one_that_patch_takes(tmp_path, before, after):
    """Applied to the file before, it gives the file after, byte for byte."""
    documents = [read_document("a.py", data, "python") for data in (before, after)]
    text = as_diff(Outcome((), 1, (Fixed(*documents, (), (FINDING,)),)))
    assert text.startswith("--- a.py\n+++ a.py\n")
    (tmp_path / "a.py").write_bytes(before)
    try:
        done = subprocess.run(
            ["patch", "-p0", "--binary"], cwd=tmp_path, input=text.encode(), capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("Requires: [patch]")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "a.py").read_bytes() == after


@pytest.mark.parametrize(
    "cells",
    [
        [["import torch\n", "\n", "x = '\u00e9\\t\"q\"'; BAD\n", "y"], ["z = 1\n", "'\U0001f600'; BAD"]],
        ["import torch\n\nx = BAD\n", "# two lines\nBAD"],
    ],
)
@pytest.mark.parametrize("style", [{"indent": 1}, {}, {"indent": 2, "ensure_ascii": False}])
def test_sarif_regions_of_a_notebook_are_in_its_json(cells, style):
    """The characters of the file at the region are those of the finding, whatever the file's layout."""
    notebook = {"cells": [{"cell_type": "code", "source": cell} for cell in cells], "metadata": {}, "nbformat": 4}
    raw = json.dumps(notebook, **style)
    document = read_document("n.ipynb", raw.encode(), "notebook")
    findings = []
    for number, line in enumerate(document.source.text.split("\n"), 1):
        if "BAD" in line:
            column = line.index("BAD") + 1
            place = document.source.place(number, column, number, column + 3)
            findings.append(Finding("HS004", "n", "error", *_fields(place)))
    assert len(findings) == 2
    outcome = Outcome((FileResult("n.ipynb", tuple(findings), located_source(document)),), 1)
    lines = raw.split("\n")
    for result in json.loads(as_sarif(outcome))["runs"][0]["results"]:
        region = result["locations"][0]["physicalLocation"]["region"]
        assert region["startLine"] == region["endLine"]
        assert lines[region["startLine"] - 1][region["startColumn"] - 1 : region["endColumn"] - 1] == "BAD"


def _fields(place):
    return (place.path, place.line, place.column, "m", "", place.end_line, place.end_column, place.cell)


def test_gitlab_issues_have_what_code_quality_requires():
    """description, check_name, a unique fingerprint, a known severity, and a path and line."""
    twice = FileResult("dir/a b.py", (FINDING, FINDING), SOURCE)
    issues = json.loads(as_gitlab(Outcome((twice, *OUTCOME.results[1:]), 2)))
    for issue in issues:
        assert set(issue) == {"description", "check_name", "fingerprint", "severity", "location"}
        assert issue["severity"] in {"info", "minor", "major", "critical", "blocker"}
    assert len({issue["fingerprint"] for issue in issues}) == 3
    assert issues[0]["location"] == {"path": "dir/a b.py", "lines": {"begin": 2, "end": 2}}
    assert json.loads(as_gitlab(Outcome((), 1))) == []


def test_gitlab_fingerprints_do_not_change_when_lines_move():
    """GitLab takes a changed fingerprint for a new issue."""
    before = json.loads(as_gitlab(OUTCOME))[0]
    moved = Source(SOURCE.path, "# new\n" + SOURCE.text, "python")
    lower = Finding("HS004", "syntax-error", "error", "dir/a b.py", 3, 10, "100%: a,b\nc", "write w", 3, 11)
    after = json.loads(as_gitlab(Outcome((FileResult("dir/a b.py", (lower,), moved),), 1)))[0]
    assert (after["fingerprint"], after["location"]["lines"]["begin"]) == (before["fingerprint"], 3)


def test_junit_is_xml_with_a_failure_for_each_finding():
    """Counts agree, attributes are escaped, and characters that XML does not know are replaced."""
    odd = Finding("HS004", "n", "warning", 'a"<&.py', 1, 1, "a\x00b\x1b<&>\ud800")
    root = ET.fromstring(as_junit(Outcome((*OUTCOME.results, FileResult('a"<&.py', (odd,))), 3)).encode())
    assert (root.tag, root.get("tests"), root.get("failures")) == ("testsuites", "3", "3")
    assert [suite.get("name") for suite in root] == ["dir/a b.py", "n.ipynb", 'a"<&.py']
    failures = list(root.iter("failure"))
    assert len(failures) == 3
    assert "line 2, column 10: 100%" in failures[0].text
    assert failures[2].get("message") == "a?b?<&>?"


def test_junit_of_nothing_is_one_case_that_passed():
    """Servers take a report without tests for a broken one."""
    root = ET.fromstring(as_junit(Outcome((), 1)).encode())
    assert (root.get("tests"), root.get("failures"), len(list(root.iter("testcase")))) == ("1", "0", 1)
