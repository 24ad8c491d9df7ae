"""Every rule by group, loaded when its group is first needed.

The list is written out, so that a check of scripts never loads the configuration rules, nor the reverse, and so that
nothing is found by accident. A test compares it with the files under rules/.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Literal

from halfstep.check.rule import Rule

__all__ = ["GROUPS", "Group", "all_rules", "find_rule", "rules_of"]

Group = Literal["files", "script", "config", "hardware"]

# group -> modules under halfstep.check.rules
GROUPS: dict[Group, tuple[str, ...]] = {
    "files": ("files",),
    "script": (
        "script.accumulation",
        "script.apex",
        "script.autocast",
        "script.autograd",
        "script.casts",
        "script.checkpoint",
        "script.context",
        "script.deprecated",
        "script.numbers",
        "script.order",
        "script.scaler",
        "script.scaler_calls",
        "script.schedule",
        "script.sharded",
        "script.skip",
        "script.validation",
        "script.window",
    ),
    "config": (
        "config.accelerate",
        "config.deepspeed_dtypes",
        "config.deepspeed_keys",
        "config.deepspeed_optimizer",
        "config.deepspeed_precision",
        "config.deepspeed_scale",
        "config.deepspeed_values",
        "config.deepspeed_zero",
        "config.halfstep",
        "config.joint",
        "config.lightning",
        "config.transformers",
    ),
    "hardware": ("hardware",),
}


@cache
def rules_of(group: Group) -> tuple[type[Rule], ...]:
    """The rules of one group, by code."""
    found: list[type[Rule]] = []
    for module in GROUPS[group]:
        found += importlib.import_module(f"halfstep.check.rules.{module}").RULES
    return tuple(sorted(found, key=lambda rule: rule.code))


def all_rules() -> tuple[type[Rule], ...]:
    """Every rule, by code."""
    return tuple(sorted((rule for group in GROUPS for rule in rules_of(group)), key=lambda rule: rule.code))


def find_rule(text: str) -> type[Rule] | None:
    """The rule with this code or name, in any case; None where there is none."""
    asked = text.strip().casefold()
    return next((rule for rule in all_rules() if asked in {rule.code.casefold(), rule.name}), None)
