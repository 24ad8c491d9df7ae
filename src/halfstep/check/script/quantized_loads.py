"""Which quantization configurations belong to a model that a Trainer trains, and which to one for evaluation alone."""

from __future__ import annotations

import ast

from halfstep.check.script.objects.formats import keyword_of
from halfstep.check.script.objects.trainers import is_trainer, model_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["is_of_untrained", "is_trained"]

_MAX_TRAINERS = 12


def is_of_untrained(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether no Trainer gets a model that is loaded with this configuration, while each gets one loaded with another."""
    own = _loads_with(script, call, function)
    trained = _trained_loads(script)
    return bool(own) and bool(trained) and all(loads and not own & loads for loads in trained)


def is_trained(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether a Trainer certainly gets a model that is loaded with this configuration."""
    own = _loads_with(script, call, function)
    return any(loads and loads <= own for loads in _trained_loads(script))


def _loads_with(script: Script, call: ast.Call, function: Function) -> set[ast.Call]:
    """The loads that get a configuration, by the variable that it is assigned to."""
    outline = script.outline
    loads = set()
    for load, scope in outline.calls.get("from_pretrained", ()):
        value = keyword_of(outline, load, scope, "quantization_config") if scope is function else None
        values = outline.values(key_of(value), scope) if value is not None and key_of(value) else [value]
        if any(v is call for v in values):
            loads.add(load)
    return loads


def _trained_loads(script: Script) -> list[set[ast.Call]]:
    """For each Trainer, the loads that its model comes from; an empty set where the text does not show them."""
    outline = script.outline
    trained = []
    for name, sites in outline.calls.items():
        for trainer, function in sites[:_MAX_TRAINERS] if is_trainer(outline, name) else ():
            model = model_of(outline, trainer, function)
            lineage = script.training.model(model, function) if model is not None else None
            loads = lineage.loads if lineage is not None else []
            trained.append({call for call in loads if key_of(call.func).endswith("from_pretrained")})
    return trained
