"""docs/rules.md, made from the rules themselves: `python -m halfstep.report.rules_page docs/rules.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from halfstep.check.cases import is_fixable, source_of_case
from halfstep.check.registry import all_rules
from halfstep.check.rule import Rule

__all__ = ["render_page"]

_FAMILIES = {
    "HS0": ("Files", "What stands in the way of checking a file."),
    "HS1": ("Scripts", "Training code in Python files and notebooks."),
    "HS2": (
        "Configurations",
        "DeepSpeed, Accelerate, Transformers, Lightning and Halfstep settings, in files and in scripts.",
    ),
    "HS3": ("Hardware", "Settings that a GPU cannot honour; applied only when one is named with `--gpu`."),
}


def render_page() -> str:
    """The page: a table of all rules, then each with its reason, a wrong and a right case, and its sources."""
    rules = all_rules()
    parts = [
        "<!-- Made by `python -m halfstep.report.rules_page docs/rules.md` from the rules in src/halfstep/check/rules. "
        "Do not edit by hand. -->",
        "# Rules of `halfstep check`",
        f"{len(rules)} rules. An *error* fails or trains wrongly, a *warning* is a surprise that goes unsaid, *advice* is what to "
        "look at once. [check.md](check.md) says how to run, select and silence them; `halfstep explain HS104` shows one.",
    ]
    for prefix, (title, about) in _FAMILIES.items():
        mine = [rule for rule in rules if rule.code.startswith(prefix)]
        if mine:
            rows = "\n".join(_row(rule) for rule in mine)
            parts += [
                f"## {title}",
                about,
                f"| code | name | severity | fix | what it finds |\n|---|---|---|---|---|\n{rows}",
            ]
            parts += [_section(rule) for rule in mine]
    return "\n\n".join(parts) + "\n"


def _row(rule: type[Rule]) -> str:
    fix = "yes" if is_fixable(rule) else ""
    title = rule.title().replace("|", "\\|")
    return f"| [{rule.code}](#{_anchor(rule)}) | {rule.name} | {rule.severity} | {fix} | {title} |"


def _anchor(rule: type[Rule]) -> str:
    return f"{rule.code.lower()}-{rule.name}"


def _section(rule: type[Rule]) -> str:
    parts = [f"### {rule.code} {rule.name}", f"**{rule.title()}**", rule.reason]
    for word, cases in (("Wrong:", rule.bad), ("Right:", rule.good)):
        if cases and len(cases[0]) < 4000:
            language = source_of_case(rule, cases[0]).language
            parts += [word, f"```{language}\n" + cases[0].strip("\n") + "\n```"]
    parts.append("\n".join(f"- {_link(reference)}" for reference in rule.references))
    return "\n\n".join(parts)


def _link(reference: str) -> str:
    return f"<{reference}>" if reference.startswith("https://") and " " not in reference else reference


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render_page(), encoding="utf-8")
