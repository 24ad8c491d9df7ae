"""Every rule is tested against its own examples, and its texts against the format of the documentation."""

import ast
import functools
import re
from collections import Counter
from itertools import pairwise

import pytest

from check_scripts import apply
from halfstep.check.cases import check_case, is_fixable, settings_of_case, source_of_case
from halfstep.check.files.document import read_document
from halfstep.check.finding import SEVERITIES
from halfstep.check.fixing import fix_document
from halfstep.check.registry import FIXABLE, all_rules, rules_of
from halfstep.check.rule import ConfigRule, Rule, ScriptRule
from halfstep.check.runner import check_document
from halfstep.check.select import Selection

RULES = all_rules()
findings_of = functools.cache(check_case)  # several tests look at the same cases
BAD = [(rule, i) for rule in RULES for i in range(len(rule.bad))]
GOOD = [(rule, i) for rule in RULES for i in range(len(rule.good))]
# (rule, index of the bad case, index of the finding) of every finding that comes with a fix.
FIXED = [
    (rule, i, j)
    for rule, i in BAD
    for j, finding in enumerate(findings_of(rule, rule.bad[i]))
    if finding.code == rule.code and finding.fix is not None
]


def ids(value):
    return value.code if isinstance(value, type) else str(value)


@pytest.mark.parametrize(("rule", "i"), BAD, ids=ids)
def test_each_bad_case_gives_the_finding(rule, i):
    """The rule reports each of its own bad cases, at a place inside the text."""
    text = rule.bad[i]
    findings = [finding for finding in findings_of(rule, text) if finding.code == rule.code]
    assert findings
    for finding in findings:
        lines = text.split("\n")
        assert 1 <= finding.line <= len(lines)
        assert 1 <= finding.column <= len(lines[finding.line - 1]) + 1
        assert finding.name == rule.name
        assert finding.severity in SEVERITIES
        assert finding.message.strip()


@pytest.mark.parametrize(("rule", "i"), GOOD, ids=ids)
def test_each_good_case_gives_no_finding(rule, i):
    """A good case gives no finding of its rule, and no error or warning of any other."""
    findings = check_case(rule, rule.good[i])
    assert [f for f in findings if f.code == rule.code or f.severity != "advice"] == []


@pytest.mark.parametrize(("rule", "i", "j"), FIXED, ids=ids)
def test_each_fix_removes_its_finding(rule, i, j):
    """After a fix the text parses, its rule reports nothing, and no other finding has appeared."""
    text = rule.bad[i]
    before = findings_of(rule, text)
    fix = before[j].fix
    edits = sorted(fix.edits)
    assert fix.title.strip()
    assert edits
    assert 0 <= edits[0].start <= edits[-1].end <= len(text)
    assert all(edit.start <= edit.end for edit in edits)
    assert all(a.end <= b.start for a, b in pairwise(edits)), "edits overlap"
    fixed = apply(text, fix)
    assert fixed != text
    if source_of_case(rule, text).language == "python":
        ast.parse(fixed)
    after = Counter(f.code for f in check_case(rule, fixed))  # HS004 among them if the text no longer parses
    assert rule.code not in after
    assert not after - Counter(f.code for f in before)


def test_every_promised_fix_has_a_case():
    """The rules with at least one fixed case are those that promise a fix."""
    assert {rule.code for rule, _, _ in FIXED} == FIXABLE
    assert {rule.code for rule in RULES if is_fixable(rule)} == FIXABLE


@pytest.mark.no_cover
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.bad], ids=ids)
def test_fix_document_applies_the_fixes_of_each_case(rule):
    """`--fix --unsafe-fixes` applies a fix if and only if the case has one, and leaves no more findings than before."""
    settings = settings_of_case(rule)

    def check(document):
        return check_document(document, settings, Selection())

    for text in rule.bad:
        source = source_of_case(rule, text)
        document = read_document(source.path, text.encode(), source.language)
        findings = check(document) if rule.preview else findings_of(rule, text)
        result = fix_document(document, findings, check, unsafe=True)
        assert bool(result.applied) == any(f.fix is not None for f in findings)
        assert len(result.findings) <= len(findings)


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_each_rule_is_documented(rule):
    """Code, name, severity, title, reason and references are present and in the documented format."""
    assert re.fullmatch(r"HS[0-6]\d\d", rule.code)
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
    """Rules over scripts and configurations have bad and good cases; those of script rules parse."""
    assert rule.bad
    assert rule.good
    assert issubclass(rule, ScriptRule | ConfigRule)
    for text in (*rule.bad, *rule.good) if issubclass(rule, ScriptRule) else ():
        ast.parse(text)


def test_codes_and_names_are_unique_and_codes_match_the_group():
    """No two rules share a code or a name, and the first digit of a code is that of its group."""
    assert len({rule.code for rule in RULES}) == len({rule.name for rule in RULES}) == len(RULES)
    for group, first in (
        ("files", "HS0"),
        ("script", "HS1"),
        ("config", "HS2"),
        ("hardware", "HS3"),
        ("advisories", "HS4"),
    ):
        # These read scripts, mostly for arguments of Hugging Face and MMEngine; HS1xx has no number left, and HS6xx continues it.
        # HS5xx are recipes of other trainers.
        others = {"HS200", "HS267", "HS268", "HS269", "HS270", "HS277", "HS287", "HS289"}
        codes = {rule.code[:3] for rule in rules_of(group) if rule.code not in others}
        assert codes <= {first, {"config": "HS5", "script": "HS6"}.get(group, first)}


def test_there_are_enough_rules():
    """There are at least 30 rules over scripts and 30 over configurations."""
    assert sum(rule.code.startswith("HS1") for rule in RULES) >= 30
    assert sum(rule.code.startswith("HS2") for rule in RULES) >= 30


def test_every_rule_is_registered():
    """A rule class that its module's RULES lacks would never run."""

    def subclasses(cls):
        return {cls}.union(*(subclasses(child) for child in cls.__subclasses__()))

    defined = {cls for cls in subclasses(Rule) if cls.__module__.startswith("halfstep.") and "code" in cls.__dict__}
    assert defined == set(RULES)
