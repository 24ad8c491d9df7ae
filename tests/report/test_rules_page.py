"""The reference of the rules is generated from the rule classes."""

import subprocess
import sys
from pathlib import Path

from halfstep.check.registry import all_rules
from halfstep.report.rules_page import render_index, render_rule, write_pages

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_committed_index_is_up_to_date():
    """docs/rules.md is the generated index: python -m halfstep.report.rules_page > docs/rules.md."""
    assert (DOCS / "rules.md").read_text(encoding="utf-8") == render_index()


def test_index_is_short_and_has_a_row_per_rule():
    """Every rule has one row with its code, name, severity and title, and the index stays below 300 lines."""
    lines = render_index().splitlines()
    assert len(lines) < 300
    for rule in all_rules():
        (row,) = [line for line in lines if line.startswith(f"| {rule.code} |")]
        assert row.startswith(f"| {rule.code} | {rule.name} | {rule.severity} | ")
        assert row.endswith(f"| {rule.title().replace('|', chr(92) + '|')} |")


def test_pages_are_written_for_every_rule(tmp_path):
    """The directory gets an index that links to one page per rule, with its reason and references."""
    write_pages(tmp_path / "rules")
    index = (tmp_path / "rules" / "index.md").read_text()
    for rule in all_rules():
        page = (tmp_path / "rules" / f"{rule.code}.md").read_text()
        assert f"[{rule.code}]({rule.code}.md)" in index
        assert page == render_rule(rule)
        assert rule.reason in page
        assert all(reference in page for reference in rule.references)


def test_module_prints_the_index():
    """Run without arguments, the module prints the index."""
    command = [sys.executable, "-m", "halfstep.report.rules_page"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == render_index()
