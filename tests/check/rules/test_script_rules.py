"""Laws that every script rule keeps: its cases, its words, its fixes."""

import ast
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from check_scripts import RULES, apply, findings

BAD = [pytest.param(rule, text, id=f"{rule.code}-{i}") for rule in RULES for i, text in enumerate(rule.bad)]
GOOD = [pytest.param(rule, text, id=f"{rule.code}-{i}") for rule in RULES for i, text in enumerate(rule.good)]
FIXED = [
    (rule, text, found)
    for rule in RULES
    for text in rule.bad
    for found in findings(text, rule.code)
    if found.fix is not None
]


@pytest.mark.parametrize(("rule", "text"), BAD)
def test_every_bad_case_is_found(rule, text):
    """Each bad case of a rule gives a finding of that rule, at a place inside the text."""
    found = findings(text, rule.code)
    assert found
    lines = text.splitlines()
    for finding in found:
        assert 1 <= finding.line <= len(lines)
        assert 1 <= finding.column <= len(lines[finding.line - 1]) + 1


@pytest.mark.parametrize(("rule", "text"), GOOD)
def test_every_good_case_is_left_alone(rule, text):
    """The right form of a rule's case gives no finding of any rule."""
    assert findings(text) == []


def test_codes_and_names_are_unique():
    """No two rules share a code or a name, and there are enough of them."""
    assert len({r.code for r in RULES}) == len({r.name for r in RULES}) == len(RULES) >= 30


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.code)
def test_every_rule_says_what_it_is_about(rule):
    """A rule has a code of the HS1xx kind, a name for the fault, a sentence, a reason and a public reference."""
    assert re.fullmatch(r"HS1\d\d", rule.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.name)
    assert rule.title().endswith(".")
    assert len(rule.reason) > 60
    assert rule.bad
    assert rule.good
    assert rule.references
    assert all(link.startswith(("https://", "measured: ")) for link in rule.references)
    for text in (*rule.bad, *rule.good):
        ast.parse(text)


@pytest.mark.parametrize(("rule", "text", "found"), FIXED, ids=lambda v: getattr(v, "code", ""))
def test_a_fix_mends_what_was_found_and_nothing_else(rule, text, found):
    """A fixed text parses, the finding is gone, and no other rule finds anything new."""
    fixed = apply(text, found.fix)
    ast.parse(fixed)
    before, after = findings(text), findings(fixed)
    assert len([f for f in after if f.code == rule.code]) < len([f for f in before if f.code == rule.code])
    assert {f.code for f in after} <= {f.code for f in before}
    changed = sum(e.end - e.start for e in found.fix.edits)
    assert len(fixed) == len(text) - changed + sum(len(e.text) for e in found.fix.edits)


def test_the_promised_fixes_exist():
    """What can be mended mechanically has a fix: missing update, unscaled backward, clip, checkpoint, deprecated names."""
    assert {rule.code for rule, _, _ in FIXED} >= {"HS101", "HS102", "HS104", "HS170", "HS190"}


@given(st.sampled_from(FIXED), st.sampled_from(["\n", "\r\n"]), st.text("\u00e9\u4e2d\U0001f600 x", max_size=6))
def test_fixes_hold_under_other_line_ends_and_letters(case, newline, letters):
    """Line ends, and letters of several bytes before the place, do not move an edit."""
    rule, text, _ = case
    text = newline.join([f'NOTE = "{letters}"', *text.splitlines(), ""])
    found = next(f for f in findings(text, rule.code) if f.fix)
    fixed = apply(text, found.fix)
    ast.parse(fixed)
    assert len(findings(fixed, rule.code)) < len(findings(text, rule.code))
    assert fixed.startswith(f'NOTE = "{letters}"{newline}')
    if newline == "\r\n":
        assert "\n" not in fixed.replace("\r\n", "")
