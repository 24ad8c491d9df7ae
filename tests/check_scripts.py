"""Reading and checking small scripts in tests."""

from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings, Source
from halfstep.check.registry import rules_of, words_of_rules
from halfstep.check.runner import check_document, with_usable_fix
from halfstep.check.script.script import Script, read_script
from halfstep.check.select import Selection

RULES = rules_of("script")


def script(text: str) -> Script:
    """The facts of a script."""
    return read_script(Source("train.py", text, "python"), Settings(), words_of_rules("script"))


def findings(text: str, *codes: str):
    """The findings of every script rule, or of the rules with these codes."""
    facts = script(text)
    rules = [rule for rule in RULES if not codes or rule.code in codes]
    return [with_usable_fix(f, facts.source) for rule in rules for f in rule().check(facts)]


def checked(text: str, code: str) -> list[int]:
    """The lines of one rule, also in single values of a precision setting and in simulated runs."""
    document = read_document("train.py", text.encode(), "python")
    return [f.line for f in check_document(document, Settings(), Selection()) if f.code == code]


def codes(text: str) -> list[str]:
    """The codes of the findings, with their lines."""
    return [f"{f.code}:{f.line}" for f in findings(text)]


def reported(text: str) -> set[str]:
    """The codes of the rules that report something."""
    return {f.code for f in findings(text)}


def trace_of(text: str, root: str = "<module>"):
    """The events of one root, without the regions' entries."""
    return next((t for t in script(text).traces if t and (t[0].roots or True) and _root(t) == root), ())


def _root(trace):
    first = next((e for e in trace if not e.roots), None)
    return first.function.name if first else "<module>"


def apply(text: str, fix) -> str:
    """A script with a fix applied."""
    for edit in sorted(fix.edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text
