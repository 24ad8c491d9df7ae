"""Renders an explanation, of an idea or of a rule, as text."""

from __future__ import annotations

import textwrap
from typing import Any

from halfstep.check.rule import Rule
from halfstep.report.topics import Topic

__all__ = ["render_rule", "render_topic", "rule_data"]


def render_topic(topic: Topic, width: int = 88) -> str:
    """The topic as wrapped paragraphs; tables, which have line breaks of their own, stay as they are."""
    parts = [topic.title, "=" * len(topic.title)]
    parts += [p if "\n" in p else textwrap.fill(p, width) for p in topic.paragraphs]
    parts.append(textwrap.fill("See also: " + "; ".join(topic.see), width))
    return parts[0] + "\n" + "\n\n".join(parts[1:])


def render_rule(rule: type[Rule], width: int = 88) -> str:
    """A rule: what it finds, why that matters, how it looks and what to write, and where to read on."""
    head = f"{rule.code} {rule.name} ({rule.severity})"
    parts = [head + "\n" + "=" * len(head), textwrap.fill(rule.title(), width), textwrap.fill(rule.reason, width)]
    for word, cases in (("Wrong:", rule.bad), ("Right:", rule.good)):
        if cases and len(cases[0]) < 4000:
            parts.append(word + "\n\n" + textwrap.indent(cases[0].strip("\n"), "    "))
    parts.append("\n".join(["References:", *(f"  {reference}" for reference in rule.references)]))
    parts.append(f"To silence it in one place: # halfstep: ignore[{rule.code}] and the reason")
    return "\n\n".join(parts)


def rule_data(rule: type[Rule]) -> dict[str, Any]:
    """The same as values that JSON can hold."""
    return {
        "code": rule.code,
        "name": rule.name,
        "severity": rule.severity,
        "title": rule.title(),
        "reason": rule.reason,
        "bad": list(rule.bad),
        "good": list(rule.good),
        "references": list(rule.references),
    }
