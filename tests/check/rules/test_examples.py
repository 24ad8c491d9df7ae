"""The documentation shows `bad[0]` as Wrong and `good[0]` as Right: Right is Wrong with the correction and nothing else."""

import re
from collections import Counter
from difflib import SequenceMatcher

import pytest

from check_scripts import apply
from halfstep.check.cases import check_case
from halfstep.check.registry import all_rules

SHOWN = [rule for rule in all_rules() if rule.bad and rule.good]
FORMATS = re.compile(r"float16|bfloat16|float32|fp16|bf16|fp32|half|16-mixed")
LEAST_ALIKE = 0.65  # of the words of Wrong and Right; a correction of a short example may replace a third of it


def ids(rule):
    return rule.code


def fixes(rule):
    return [f.fix for f in check_case(rule, rule.bad[0]) if f.code == rule.code and f.fix is not None]


def words(text):
    return re.findall(r"\w+|[^\w\s]", text)


@pytest.mark.parametrize("rule", SHOWN, ids=ids)
def test_right_is_wrong_plus_the_fix(rule):
    """Where a fix exists, Right is what it writes."""
    for fix in fixes(rule)[:1]:
        assert rule.good[0] == apply(rule.bad[0], fix)


# The correction replaces most of these: another library, another file, or another way to train.
REWRITTEN = {
    "HS007": "the correction is to remove the comment",
    "HS008": "the correction is to remove the comment",
    "HS155": "the correction is a filter function",
    "HS191": "Apex is replaced with torch.amp",
    "HS193": "Apex is replaced with torch.amp",
}


@pytest.mark.parametrize("rule", [r for r in SHOWN if r.code not in REWRITTEN], ids=ids)
def test_right_changes_nothing_unrelated(rule):
    """Wrong and Right share most of their words."""
    alike = SequenceMatcher(None, words(rule.bad[0]), words(rule.good[0]), autojunk=False).ratio()
    assert alike >= LEAST_ALIKE, f"{rule.bad[0]}\n{rule.good[0]}"


@pytest.mark.parametrize(
    "code", ["HS101", "HS102", "HS103", "HS104", "HS120", "HS121", "HS122", "HS140", "HS141", "HS195"]
)
def test_right_keeps_the_number_format(code):
    """Rules that are not about a format do not change it."""
    (rule,) = [rule for rule in SHOWN if rule.code == code]
    assert Counter(FORMATS.findall(rule.bad[0])) == Counter(FORMATS.findall(rule.good[0]))
