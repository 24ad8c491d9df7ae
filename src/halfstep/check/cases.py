"""The bad and good cases of the rules, checked like files: for the tests, the documentation and fuzzing."""

from __future__ import annotations

import functools

from halfstep.check.config.config import case_source
from halfstep.check.files.document import read_document
from halfstep.check.files.source import Source
from halfstep.check.finding import Finding, Fix
from halfstep.check.registry import rules_of
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.runner import check_document
from halfstep.check.select import Selection
from halfstep.check.settings import Settings

__all__ = ["check_case", "is_fixable", "is_safely_fixable", "settings_of_case", "source_of_case"]


def source_of_case(rule: type[Rule], text: str) -> Source:
    """A case as a source: a script for rules over scripts and files, else the language it looks like."""
    if issubclass(rule, ScriptRule) or rule in rules_of("files"):
        return Source("train.py", text, "python")
    return case_source(text)


def settings_of_case(rule: type[Rule]) -> Settings:
    """The settings for a rule's cases: a rule may need a DeepSpeed version, or a GPU that has the problem."""
    settings: Settings = getattr(rule, "settings", None) or Settings()
    return settings


def check_case(rule: type[Rule], text: str) -> tuple[Finding, ...]:
    """Every finding in a case."""
    source = source_of_case(rule, text)
    document = read_document(source.path, text.encode(), source.language)
    return check_document(document, settings_of_case(rule), Selection(preview=rule.preview))


def is_fixable(rule: type[Rule]) -> bool:
    """Whether any of the rule's bad cases comes with a fix."""
    return bool(_fixes(rule))  # type: ignore[arg-type] # a class is hashable


def is_safely_fixable(rule: type[Rule]) -> bool:
    """Whether any of those fixes is safe; the others need --unsafe-fixes."""
    return any(fix.safe for fix in _fixes(rule))  # type: ignore[arg-type]


@functools.cache
def _fixes(rule: type[Rule]) -> tuple[Fix, ...]:
    return tuple(
        f.fix for text in rule.bad for f in check_case(rule, text) if f.code == rule.code and f.fix is not None
    )
