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
        "script_accumulation",
        "script_apex",
        "script_autocast",
        "script_autograd",
        "script_casts",
        "script_checkpoint",
        "script_context",
        "script_deprecated",
        "script_numbers",
        "script_order",
        "script_scaler",
        "script_scaler_calls",
        "script_schedule",
        "script_sharded",
        "script_skip",
        "script_validation",
        "script_window",
    ),
    "config": (
        "config_accelerate",
        "config_deepspeed_dtypes",
        "config_deepspeed_keys",
        "config_deepspeed_optimizer",
        "config_deepspeed_precision",
        "config_deepspeed_scale",
        "config_deepspeed_values",
        "config_deepspeed_zero",
        "config_halfstep",
        "config_joint",
        "config_lightning",
        "config_transformers",
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
