"""docs/rules.md is what the rules say."""

from pathlib import Path

from halfstep.check.registry import all_rules
from halfstep.report.rules_page import render_page

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_up_to_date():
    """Made anew, it is the same: python -m halfstep.report.rules_page docs/rules.md."""
    assert (DOCS / "rules.md").read_text(encoding="utf-8") == render_page()


def test_every_rule_has_its_row_and_section():
    """Code, name, severity, reason and references."""
    page = render_page()
    for rule in all_rules():
        assert f"| [{rule.code}](#{rule.code.lower()}-{rule.name}) | {rule.name} | {rule.severity} |" in page
        assert f"### {rule.code} {rule.name}\n" in page
        assert rule.reason in page
