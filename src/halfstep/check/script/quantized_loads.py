"""Which quantization configurations belong to a model that a Trainer trains, and which to one for evaluation alone."""

from __future__ import annotations

import ast

from halfstep.check.script.objects.adapters import attachments
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.formats import keyword_of, returned_by
from halfstep.check.script.objects.trainers import is_trainer, model_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["is_adapted", "is_always_set", "is_of_untrained", "is_trained"]

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


def is_adapted(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether adapters are attached to a model that is loaded with this configuration, as training a quantized model needs them."""
    own = _loads_with(script, call, function)
    bases = [script.training.model(site.base, site.function) for site in attachments(script.outline)]
    return any(not own.isdisjoint(base.loads) for base in bases)


def is_always_set(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether every load that gets a configuration gets it in every run."""
    return all(_is_set(script, load, function) for load in _loads_with(script, call, function))


def _is_set(script: Script, load: ast.Call, function: Function) -> bool:
    """Whether a load has its quantization in every run: no condition puts it into `**options`."""
    value = keyword_of(script.outline, load, function, "quantization_config")
    return value is None or set(conditions_of(script.outline, value)) <= set(conditions_of(script.outline, load))


def _loads_with(script: Script, call: ast.Call, function: Function) -> set[ast.Call]:
    """The loads that get a configuration, by the variable that it is assigned to."""
    outline = script.outline
    loads = set()
    for load, scope in outline.calls.get("from_pretrained", ()):
        value = keyword_of(outline, load, scope, "quantization_config")
        if value is not None and _is_from(script, value, scope, call, function):
            loads.add(load)
    return loads


def _is_from(script: Script, value: ast.expr, scope: Function, call: ast.Call, function: Function) -> bool:
    """Whether an argument is what a call creates: directly, through a variable of the function, or as what a function returns."""
    outline = script.outline
    values = outline.values(key_of(value), scope) if key_of(value) else [value]
    if scope is function and any(v is call for v in values):
        return True
    targets = [outline.call_target(v, scope) for v in values if isinstance(v, ast.Call)]
    return (
        function in targets
        and len(values) == 1
        and function is not scope
        and any(v is call for v in returned_by(function))
    )


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
