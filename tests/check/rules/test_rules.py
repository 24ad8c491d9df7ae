"""Every rule keeps its word: generated from its own cases, names, reasons and references."""

import ast
import re
from itertools import pairwise

import pytest

from halfstep.check.cases import check_case, settings_of_case, source_of_case
from halfstep.check.files.document import read_document
from halfstep.check.finding import SEVERITIES
from halfstep.check.fixing import fix_document
from halfstep.check.registry import all_rules, rules_of
from halfstep.check.rule import ConfigRule, Rule, ScriptRule
from halfstep.check.runner import check_document
from halfstep.check.select import Selection

RULES = all_rules()
BAD = [(rule, i) for rule in RULES for i in range(len(rule.bad))]
GOOD = [(rule, i) for rule in RULES for i in range(len(rule.good))]


def ids(value):
    return value.code if isinstance(value, type) else str(value)


@pytest.mark.parametrize(("rule", "i"), BAD, ids=ids)
def test_each_bad_case_gives_the_finding(rule, i):
    """The rule recognises its own examples, at a place inside them."""
    text = rule.bad[i]
    found = [finding for finding in check_case(rule, text) if finding.code == rule.code]
    assert found
    for finding in found:
        lines = text.split("\n")
        assert 1 <= finding.line <= len(lines)
        assert 1 <= finding.column <= len(lines[finding.line - 1]) + 1
        assert finding.name == rule.name
        assert finding.severity in SEVERITIES
        assert finding.message.strip()


@pytest.mark.parametrize(("rule", "i"), GOOD, ids=ids)
def test_each_good_case_gives_no_finding(rule, i):
    """The right form is silent: nothing of this rule, and no error or warning of any other."""
    found = check_case(rule, rule.good[i])
    assert [f for f in found if f.code == rule.code or f.severity != "advice"] == []


@pytest.mark.parametrize(("rule", "i"), BAD, ids=ids)
def test_each_fix_mends_its_finding_and_touches_nothing_else(rule, i):
    """Applied alone, the edits change just their spans, the text is still read, and the finding is gone."""
    text = rule.bad[i]
    found = check_case(rule, text)
    for finding in found:
        if finding.code != rule.code or finding.fix is None:
            continue
        edits = sorted(finding.fix.edits)
        assert edits
        assert finding.fix.title.strip()
        assert all(a.end <= b.start for a, b in pairwise(edits)), "edits overlap"
        changed, done = [], 0
        for edit in edits:
            assert 0 <= done <= edit.start <= edit.end <= len(text)
            changed += [text[done : edit.start], edit.text]
            done = edit.end
        after = "".join([*changed, text[done:]])
        assert after != text
        if source_of_case(rule, text).language == "python":
            ast.parse(after)
        left = check_case(rule, after)
        same = [f for f in left if f.code == rule.code]
        assert len(same) < len([f for f in found if f.code == rule.code])
        assert not [f for f in left if f.code in {"HS004", "HS005", "HS006"}]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.bad], ids=ids)
def test_all_fixes_of_a_case_hold_together(rule):
    """As `--fix` makes them: what had a fix is mended, or said to be left."""
    settings = settings_of_case(rule)

    def check(document):
        return check_document(document, settings, Selection())

    for text in rule.bad:
        source = source_of_case(rule, text)
        document = read_document(source.path, text.encode(), source.language)
        done = fix_document(document, check(document), check)
        fixable = [f for f in check(document) if f.fix is not None]
        assert bool(done.applied) == bool(fixable)
        assert len(done.findings) <= len(check(document))


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_each_rule_says_what_it_is(rule):
    """Code, name, severity, title, reason and references are all there, in the house's form."""
    assert re.fullmatch(r"HS[0-3]\d\d", rule.code)
    assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)+", rule.name)
    assert not rule.name.startswith(("no-", "use-", "avoid-", "missing-rule"))
    assert rule.severity in SEVERITIES
    assert rule.title().endswith(".")
    assert len(rule.title()) <= 120
    assert len(rule.reason.split()) >= 12
    assert rule.references
    for reference in rule.references:
        assert reference.startswith(("https://", "measured:")), reference


@pytest.mark.parametrize("rule", [r for r in RULES if not r.code.startswith("HS0")], ids=ids)
def test_each_rule_has_cases(rule):
    """Rules over scripts and configurations show the wrong and the right form."""
    assert rule.bad
    assert rule.good
    assert issubclass(rule, ScriptRule | ConfigRule)


def test_codes_and_names_are_unique_and_codes_tell_the_family():
    """One code, one name, one rule."""
    assert len({rule.code for rule in RULES}) == len({rule.name for rule in RULES}) == len(RULES)
    for group, first in (("files", "HS0"), ("script", "HS1"), ("config", "HS2"), ("hardware", "HS3")):
        assert {rule.code[:3] for rule in rules_of(group)} <= {first}


def test_there_are_enough_of_them():
    """At least 30 over scripts and 30 over configurations."""
    assert sum(rule.code.startswith("HS1") for rule in RULES) >= 30
    assert sum(rule.code.startswith("HS2") for rule in RULES) >= 30


def test_every_rule_that_exists_is_registered():
    """A class left out of its module's RULES would never run."""

    def below(cls):
        return {cls}.union(*(below(child) for child in cls.__subclasses__()))

    made = {cls for cls in below(Rule) if cls.__module__.startswith("halfstep.") and "code" in cls.__dict__}
    assert made == set(RULES)
