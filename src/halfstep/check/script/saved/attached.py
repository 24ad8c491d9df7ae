"""Scalers that a handler of ignite saves, in a file whose `Checkpoint.load_objects` restores the optimizer without them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.script.flow.recognise import Recogniser
from halfstep.check.script.objects.saving import is_setting, passed_objects
from halfstep.check.script.script import Script

__all__ = ["unrestored_attached"]

_HANDLERS = ("Checkpoint", "ModelCheckpoint", "setup_common_training_handlers")
_RESTORES = ("load_objects", "reload_objects")


def unrestored_attached(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """The calls that restore the objects of a checkpoint and leave the scaler out, each with the scaler."""
    if not script.outline.names.uses("ignite") or not any(name in script.outline.calls for name in _RESTORES):
        return
    recogniser = Recogniser(script.outline)
    saved = [
        kinds["scaler"] for name in _HANDLERS for _, kinds in _passed(script, recogniser, name) if "scaler" in kinds
    ]
    restored = [site for name in _RESTORES for site in _passed(script, recogniser, name)]
    if saved and not any("scaler" in kinds for _, kinds in restored):
        yield from ((call, saved[0]) for call, kinds in restored if "optimizer" in kinds)


def _passed(script: Script, recogniser: Recogniser, name: str) -> Iterator[tuple[ast.Call, dict[str, str]]]:
    """The calls of a function, each with the objects that it receives by what they are."""
    for call, function in script.outline.calls.get(name, ()):
        keys = [key for key in passed_objects(script.outline, call, function) if not is_setting(key)]
        yield call, {recogniser.kind_of(key, function): key for key in keys}
