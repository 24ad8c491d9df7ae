"""A user's DeepSpeed configuration, checked with the HS2xx rules and merged with Halfstep's decisions.

The file is first checked as `halfstep check` would check it. Errors stop, all of them in one message, with code and
remedy; warnings become notes. Three groups are treated differently:

    stop as well     warnings about a setting that DeepSpeed would ignore although its meaning is clear (HS252, HS253)
    handled          what Halfstep corrects itself and returns as a decision, or rejects with its own reason
    unused           rules about the optimizer block, where the program passes its own optimizer

Advice is not repeated: it is about defaults, which Halfstep writes explicitly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeedRule
from halfstep.check.files.source import Source
from halfstep.check.finding import Finding
from halfstep.check.registry import rules_of
from halfstep.check.settings import Settings
from halfstep.errors import SettingError
from halfstep.precision.deepspeed_merge import Choices, Merged, merge_config
from halfstep.precision.deepspeed_setup import parse_version
from halfstep.precision.deepspeed_write import Driver
from halfstep.precision.json_tree import load_json, parse_json, read_text
from halfstep.precision.node import Block
from halfstep.precision.policy import Policy

__all__ = ["TESTED_VERSION", "check_deepspeed", "merge_deepspeed"]

TESTED_VERSION = "0.19.8"
_NAME = "The DeepSpeed configuration"
_STOPS = frozenset({"HS252", "HS253"})
_HANDLED = {
    "HS204": "to_deepspeed rejects fp16 autocast under ZeRO, unless Halfstep drives",
    "HS206": "merging removes a disabled amp block and rejects an enabled one",
    "HS205": "merging rejects any enabled amp block",
    "HS208": "to_deepspeed rejects fp16 at stage 0, unless Halfstep drives",
    "HS209": "Halfstep decides itself whether a step is applied",
    "HS215": "merging caps the initial scale",
    "HS241": "merging moves max_grad_norm",
    "HS242": "merging reports untested optimizers, those passed as objects included",
    "HS240": "the same",
    "HS244": "merging rejects 1-bit optimizers and reports that DeepSpeed removed them",
    "HS245": "the same",
    "HS246": "the same",
    "HS250": "merging removes unknown keys",
    "HS260": "Halfstep's reader allows comments and trailing commas",
}
_OPTIMIZER_RULES = frozenset({"HS243", "HS247", "HS248", "HS249"})


def merge_deepspeed(
    config: Mapping[str, Any] | str | Path,
    *,
    policy: Policy | None = None,
    max_norm: float | Literal["file"] | None = "file",
    accumulate: int | None = None,
    batch_size: int | None = None,
    world_size: int | None = None,
    optimizer: str | None = None,
    driver: Driver = "deepspeed",
    version: str = TESTED_VERSION,
) -> Merged:
    """The configuration to pass to DeepSpeed, and everything that Halfstep decides instead of the file.

    `config` is a dictionary, JSON text or a path. `optimizer` is the dotted class name of the optimizer object that the
    program passes to DeepSpeed; without it the file's block creates one. `driver="halfstep"` is for Halfstep's own backend,
    which scales, clips, accumulates and casts. What cannot be used raises `SettingError`.
    """
    values = load_json(config) if isinstance(config, str | Path) else config
    if not isinstance(values, Mapping):
        kind = type(values).__name__
        raise SettingError(f"A DeepSpeed configuration is a JSON object, not a {kind}; pass a dictionary or its file.")
    errors, notes = [], []
    for finding in check_deepspeed(config, version=version):
        if finding.code in _HANDLED or (finding.code == "HS256" and finding.fix is not None):
            continue  # HS256 has a fix only for a disabled block, which merging removes
        if optimizer is not None and _is_about_optimizer(finding):
            continue
        if finding.severity == "error" or finding.code in _STOPS:
            errors.append(finding)
        elif finding.severity == "warning":
            notes.append(_text(finding))
    if errors:
        raise SettingError(_stopped(config, errors))
    choices = Choices(policy, max_norm, accumulate, batch_size, world_size, optimizer, driver)
    merged = merge_config(values, choices, parse_version(version))
    return replace(merged, notes=(*notes, *merged.notes))


def _is_about_optimizer(finding: Finding) -> bool:
    """Whether a finding is about the optimizer or scheduler block, which an optimizer object replaces."""
    misplaced = finding.code == "HS253" and ("`optimizer." in finding.message or "`scheduler." in finding.message)
    return finding.code in _OPTIMIZER_RULES or misplaced


def check_deepspeed(config: Mapping[str, Any] | str | Path, *, version: str = TESTED_VERSION) -> tuple[Finding, ...]:
    """The findings of the HS2xx rules in one DeepSpeed configuration, whatever its keys look like, by position."""
    text, path = _text_of(config)
    root = parse_json(text, path)
    if not isinstance(root, Block):
        raise SettingError(f"{path} is not a DeepSpeed configuration, which is a JSON object; pass its file.")
    facts = Config("deepspeed", root, Source(path, text, "json"), Settings(deepspeed=parse_version(version)))
    rules = [rule for rule in rules_of("config") if issubclass(rule, DeepSpeedRule)]
    findings = [finding for rule in rules for finding in rule().check(facts)]
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: finding.sort_key))


def _text_of(config: Mapping[str, Any] | str | Path) -> tuple[str, str]:
    """The JSON text of a configuration, and a name for it."""
    if isinstance(config, Mapping):
        try:
            return json.dumps(config), _NAME
        except (TypeError, ValueError) as error:
            raise SettingError(
                f"The DeepSpeed configuration has a value that JSON cannot express: {error}. Write dtypes as text."
            ) from None
    return read_text(config)


def _stopped(config: Mapping[str, Any] | str | Path, errors: list[Finding]) -> str:
    """One message with all errors; a dictionary has no lines."""
    name = errors[0].path
    has_lines = not isinstance(config, Mapping)
    lines = [f"  {f'line {finding.line}: ' if has_lines else ''}{_text(finding)}" for finding in errors]
    count = "1 mistake" if len(errors) == 1 else f"{len(errors)} mistakes"
    return "\n".join([f"{name} has {count} that DeepSpeed would reject or silently train with:", *lines])


def _text(finding: Finding) -> str:
    return f"{finding.code} ({finding.name}): {finding.message} {finding.instead}".strip()
