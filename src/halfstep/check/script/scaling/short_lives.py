"""Scalers that are created again for each epoch, in the function that trains one (HS121)."""

from __future__ import annotations

import ast

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.script import Script

__all__ = ["lives_one_epoch"]

_ONE_EPOCH = regex(r"(^|_)epoch$|(^|_)(one|single)_epoch(_|$)")
_EPOCH = regex(r"^(epoch|cur_epoch|current_epoch|epoch_(idx|index|num|i))$")


def lives_one_epoch(script: Script, step: Event) -> bool:
    """Whether a scaler is created again for each epoch (HS121), so that no checkpoint between two of them has a scale to restore."""
    function = step.function
    created = [s for s in script.scalers if s.function is function and s.key == step.local.scaler and "." not in s.key]
    is_epoch = bool(_ONE_EPOCH.search(function.name)) or any(map(_EPOCH.search, function.params))
    return bool(created) and not isinstance(function.node, ast.Module) and is_epoch
