"""Tables of `halfstep check`: how often each rule has findings, and the list of all rules."""

from __future__ import annotations

import json
from collections import Counter

from halfstep.check.registry import FIXABLE, all_rules
from halfstep.check.rule import Rule
from halfstep.check.session import Outcome
from halfstep.events import fold

__all__ = ["rules_as_json", "rules_as_text", "statistics_as_json", "statistics_as_text"]


def statistics_as_text(outcome: Outcome) -> str:
    """One line for each rule with findings, most frequent first; [*] marks those with a fix. Empty if there are none."""
    rows = _statistics(outcome)
    width = len(str(rows[0]["count"])) if rows else 0
    return "\n".join(
        f"{row['count']:>{width}}  {row['code']}  {row['severity']:<7}  [{'*' if row['fixable'] else ' '}] {row['name']}"
        for row in rows
    )


def statistics_as_json(outcome: Outcome) -> str:
    """The same as a list of objects."""
    return json.dumps(_statistics(outcome), indent=2)


def _statistics(outcome: Outcome) -> list[dict[str, object]]:
    findings = outcome.findings
    counts = Counter((f.code, f.name, f.severity) for f in findings)
    fixable = {(f.code, f.severity) for f in findings if f.fix is not None}
    order = sorted(counts, key=lambda row: (-counts[row], row))
    return [
        {"code": c, "name": n, "severity": s, "count": counts[c, n, s], "fixable": (c, s) in fixable}
        for c, n, s in order
    ]


def rules_as_text(width: int | None = None) -> str:
    """Every rule with its severity, whether a fix exists, and whether it is in preview: a table where it fits, else folded."""
    rules = all_rules()
    longest = max(len(rule.name) for rule in rules)
    lines = [f"{'code':<6} {'name':<{longest}} {'severity':<8} fixable preview title"]
    for rule in rules:
        fixable, preview = "yes" if rule.code in FIXABLE else "", "yes" if rule.preview else ""
        lines.append(
            f"{rule.code:<6} {rule.name:<{longest}} {rule.severity:<8} {fixable:<7} {preview:<7} {rule.title()}"
        )
    if width is None or max(map(len, lines)) <= width:
        return "\n".join(lines)
    return "\n".join(line for rule in rules for line in _folded_rule(rule, width))


def _folded_rule(rule: type[Rule], width: int) -> list[str]:
    """Code, name and kind of a rule, and its title on the lines below."""
    kinds = [rule.severity, *(["fixable"] if rule.code in FIXABLE else []), *(["preview"] if rule.preview else [])]
    return [f"{rule.code} {rule.name} ({', '.join(kinds)})", fold(rule.title(), width, 6, " " * 6)]


def rules_as_json() -> str:
    """The same as a list of objects."""
    rows = [
        {
            "code": rule.code,
            "name": rule.name,
            "severity": rule.severity,
            "fixable": rule.code in FIXABLE,
            "preview": rule.preview,
            "title": rule.title(),
        }
        for rule in all_rules()
    ]
    return json.dumps(rows, indent=2)
