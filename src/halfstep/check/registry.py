"""Every rule by group, loaded when its group is first needed.

A group is a module with a list `RULES`, or packages of such modules. Checking a script never loads the rules of
configurations, nor the reverse.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache, lru_cache
from typing import Literal

from halfstep.check.rule import Rule
from halfstep.check.script.syntax.relevant import RuleWords

__all__ = [
    "FIXABLE",
    "GROUPS",
    "PER_VALUE",
    "Group",
    "all_rules",
    "find_rule",
    "modules_of",
    "rules_of",
    "words_of_rules",
]

Group = Literal["files", "script", "config", "hardware", "advisories"]

GROUPS: dict[Group, tuple[str, ...]] = {
    "files": ("halfstep.check.files.problems",),
    "script": (
        "halfstep.check.rules.script",
        "halfstep.check.rules.scaler",
        "halfstep.check.rules.weights",
        "halfstep.check.rules.frameworks",
    ),
    "config": ("halfstep.check.rules.config",),
    "hardware": ("halfstep.check.rules.hardware",),
    "advisories": ("halfstep.check.rules.advisories",),
}

# The rules that fix at least one of their own cases. Checking all cases to find that out takes a second.
FIXABLE = frozenset({
    "HS101", "HS102", "HS104", "HS170", "HS190", "HS206", "HS211", "HS218", "HS221", "HS241", "HS242", "HS251",
    "HS252", "HS253", "HS255", "HS257", "HS258", "HS260", "HS261", "HS264", "HS281", "HS285", "HS290",
})  # fmt: skip
# The rules that are also checked in the script for each value of its precision settings (`script.assumed`): what they report
# there happens in a run with this value. Others look at what a script offers: a flag with one value looks unused, for example.
PER_VALUE = frozenset({
    "HS101", "HS102", "HS103", "HS104", "HS105", "HS106", "HS107", "HS108", "HS109", "HS110", "HS111", "HS112", "HS114", "HS115",
    "HS116", "HS118", "HS120", "HS123", "HS136", "HS145", "HS151", "HS154", "HS156", "HS157", "HS158", "HS160", "HS161", "HS164", "HS166", "HS168", "HS175", "HS185", "HS186",
    "HS196", "HS198", "HS199", "HS277", "HS611", "HS612",
})  # fmt: skip


def modules_of(group: Group) -> tuple[str, ...]:
    """The modules of one group, by name; listing them imports the package and none of its modules."""
    modules: list[str] = []
    for name in GROUPS[group]:
        package_path = getattr(importlib.import_module(name), "__path__", None)
        inside = pkgutil.iter_modules(package_path) if package_path is not None else ()
        modules += sorted(f"{name}.{module.name}" for module in inside) or [name]
    return tuple(modules)


@cache
def rules_of(group: Group) -> tuple[type[Rule], ...]:
    """The rules of one group, by code."""
    rules: list[type[Rule]] = []
    for module in modules_of(group):
        rules += importlib.import_module(module).RULES
    return tuple(sorted(rules, key=lambda rule: rule.code))


@cache
def words_of_rules(group: Group) -> RuleWords:
    """The words that rules of one group declare in addition to the common ones."""
    rules = rules_of(group)
    return RuleWords(
        tuple(sorted({word for rule in rules for word in rule.words})),
        tuple(sorted({word for rule in rules for word in rule.lines})),
    )


def all_rules() -> tuple[type[Rule], ...]:
    """Every rule, by code."""
    return tuple(sorted((rule for group in GROUPS for rule in rules_of(group)), key=lambda rule: rule.code))


def find_rule(text: str) -> type[Rule] | None:
    """The rule with this code or name, case-insensitively; None if there is none."""
    return _by_word(tuple(map(rules_of, GROUPS))).get(text.strip().casefold())


@lru_cache(maxsize=2)
def _by_word(groups: tuple[tuple[type[Rule], ...], ...]) -> dict[str, type[Rule]]:
    """Rules by code and by name."""
    return {word: rule for rules in groups for rule in rules for word in (rule.code.casefold(), rule.name)}
