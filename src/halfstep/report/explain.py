"""Renders the explanation of a topic or of a check rule as text."""

from __future__ import annotations

import textwrap
from typing import Any

from halfstep.check.rule import Rule
from halfstep.events import fold
from halfstep.report.topics import Topic

__all__ = ["render_rule", "render_topic", "rule_data"]


def render_topic(topic: Topic, width: int = 88) -> str:
    """The topic as wrapped paragraphs; tables, which contain line breaks, are left as they are."""
    parts = [topic.title, "=" * len(topic.title)]
    parts += [p if "\n" in p else _fill(p, width) for p in topic.paragraphs]
    parts.append(_fill("See also: " + "; ".join(topic.see), width))
    return parts[0] + "\n" + "\n\n".join(parts[1:])


def render_rule(rule: type[Rule], width: int = 88) -> str:
    """A rule: its title, the reason, a bad and a good example, references and how to suppress it."""
    head = f"{rule.code} {rule.name} ({rule.severity})"
    parts = [head + "\n" + "=" * len(head), _fill(rule.title(), width), _fill(rule.reason, width)]
    for label, cases in (("Wrong:", rule.bad), ("Right:", rule.good)):
        if cases and len(cases[0]) < 4000:
            parts.append(label + "\n\n" + textwrap.indent(cases[0].strip("\n"), "    "))
    parts.append("\n".join(["References:", *(fold(reference, width, 4, "  ") for reference in rule.references)]))
    parts.append(f"To suppress a finding, add a comment on its line:\n\n    # halfstep: ignore[{rule.code}] reason")
    return "\n\n".join(parts)


def rule_data(rule: type[Rule]) -> dict[str, Any]:
    """The rule as JSON-serializable values."""
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


def _fill(text: str, width: int) -> str:
    """Wrap at spaces only, so that commands and key names can be copied."""
    return textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)
