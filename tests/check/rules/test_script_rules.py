"""Properties of the script rules alone: good cases are silent for all of them, and fixes survive other encodings."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from check_scripts import RULES, apply, findings

GOOD = [pytest.param(text, id=f"{rule.code}-{i}") for rule in RULES for i, text in enumerate(rule.good)]
FIXED = [
    (rule, text)
    for rule in RULES
    for text in rule.bad
    if any(finding.fix is not None for finding in findings(text, rule.code))
]


@pytest.mark.parametrize("text", GOOD)
def test_every_good_case_is_silent(text):
    """A good case of a script rule gives no finding of any script rule, except that a corrected Apex loop is still one."""
    assert [f for f in findings(text) if f.code != "HS191"] == []


@given(st.sampled_from(FIXED), st.sampled_from(["\n", "\r\n"]), st.text("\u00e9\u4e2d\U0001f600 x", max_size=6))
def test_fixes_work_with_other_line_endings_and_characters(case, newline, characters):
    """Line endings, and multi-byte characters before the finding, do not shift an edit."""
    rule, text = case
    text = newline.join([f'NOTE = "{characters}"', *text.splitlines(), ""])
    finding = next(f for f in findings(text, rule.code) if f.fix)
    fixed = apply(text, finding.fix)
    ast.parse(fixed)
    assert findings(fixed, rule.code) == []
    assert fixed.startswith(f'NOTE = "{characters}"{newline}')
    if newline == "\r\n":
        assert "\n" not in fixed.replace("\r\n", "")
