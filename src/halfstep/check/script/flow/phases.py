"""Autocast regions that a function for training and validation leaves out of validation."""

from __future__ import annotations

import ast

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.formats import formats_of
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["only_in_training"]

# A flag that is true only in training: `train`, `self.is_training`, `phase == 'train'`, `not is_eval`.
_TRAINS = regex(
    r"([\w.]+\.)?(is_)?train(ing)?(_mode)?|[\w.]+ == '[Tt]rain(ing)?'|not ([\w.]+\.)?(is_)?(val|valid|validation|eval|test)(_mode)?"
)


def only_in_training(script: Script, event: Event) -> tuple[ast.AST | None, str]:
    """What turns the region of a forward off for validation, `enabled=use_amp and train`, and the flag that decides it."""
    region = event.autocast()
    for autocast in region.autocasts if region is not None else ():
        flags = [autocast.enabled]
        if autocast.enabled.isidentifier():
            flags += map(text_of, script.outline.values(autocast.enabled, event.function))
        for flag in (part.strip("()") for text in flags for part in text.split(" and ")):
            if _TRAINS.fullmatch(flag) and not any(g.text == flag for g in event.guards):
                return autocast.node, flag
        if autocast.dtype_node is not None:
            place, flag = _full_in_validation(script, autocast.dtype_node, event)
            if place is not None:
                return place, flag
    return None, ""


def _full_in_validation(script: Script, dtype: ast.expr, event: Event) -> tuple[ast.AST | None, str]:
    """Where the dtype of a region is float32 unless the model trains: `dtype = low if train else torch.float32`."""
    outline = script.outline
    for binding in outline.lookup(key_of(dtype), event.function) if key_of(dtype) else ():
        value = binding.value
        if value is None or binding.function is not event.function:
            continue
        options = [(value, "")]
        if isinstance(value, ast.IfExp):
            options = [(value.orelse, text_of(value.test))]
        elif guards := conditions_of(outline, value):
            options = [(value, guards[-1].text if not guards[-1].is_true else f"not {guards[-1].text}")]
        for option, flag in options:
            is_full = formats_of(outline, option, event.function) == {"float32"}
            if is_full and _TRAINS.fullmatch(flag) and not any(g.text == flag for g in event.guards):
                return option, flag
    return None, ""
