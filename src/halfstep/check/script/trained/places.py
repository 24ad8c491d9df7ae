"""Variables as Python identifies them: the scope or the class that a name belongs to, and which of them are models or their parts."""

from __future__ import annotations

import ast

from halfstep.check.script.objects.formats import base_of
from halfstep.check.script.objects.parameters import is_cast_in_place
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline, last_name_of
from halfstep.check.script.syntax.scope import Binding
from halfstep.check.script.trained.inherited import owning_class

__all__ = ["LOADS", "MAX_PLACES", "bindings_of", "is_loaded", "is_part_of_model", "passed_as", "place_of"]

LOADS = {"from_pretrained", "from_config", "_from_config", "from_single_file"}
MAX_PLACES = 40  # names of one model; generated code has more


def place_of(outline: Outline, key: str, function: Function) -> tuple[str, Function | str]:
    """A variable as Python identifies it: its name and the scope that binds it; for attributes of self, the class."""
    if key.startswith("self."):
        return key, owning_class(outline, key, function.cls)
    root = key.partition(".")[0].partition("[")[0]
    scope: Function | None = function
    while scope is not None and scope.parent is not None:
        if root in scope.params or any(b.function is scope for b in outline.bindings.get(root, ())):
            return key, scope
        scope = scope.parent
    return key, outline.module


def bindings_of(outline: Outline, key: str, function: Function) -> list[Binding]:
    """The assignments of a variable in the scope, or the class, that it belongs to."""
    place = place_of(outline, key, function)
    every = outline.bindings.get(key, ())
    return [b for b in every if place_of(outline, key, b.function) == place] if len(every) <= MAX_PLACES else []


def is_part_of_model(outline: Outline, key: str, function: Function, depth: int = 3) -> bool:
    """Whether a variable is a model, or another name of a part of one: `inner = pipeline.model`."""
    for binding in bindings_of(outline, key, function):
        if _is_model(binding.value) or (isinstance(binding.value, ast.Call) and is_cast_in_place(outline, key)):
            return True
        root = key_of(binding.value).partition(".")[0] if isinstance(binding.value, (ast.Name, ast.Attribute)) else ""
        if root not in {"", "self", key} and depth and is_part_of_model(outline, root, binding.function, depth - 1):
            return True
    return False


def _is_model(node: ast.expr | None) -> bool:
    """Whether a value is a model: loaded, or created and cast in one expression."""
    base = base_of(node) if node is not None else None
    loaded = isinstance(base, ast.Call) and text_of(base.func).rsplit(".", 1)[-1] in LOADS
    return loaded or (isinstance(node, ast.Call) and base is not node and isinstance(base, (ast.Call, ast.Name)))


def is_loaded(outline: Outline, key: str, function: Function) -> bool:
    """Whether a variable is a loaded pipeline or model, whose parts have its dtype."""
    calls = [v for v in outline.values(key, function) if isinstance(v, ast.Call)] if key.isidentifier() else []
    return any("Pipeline" in text_of(c.func) or text_of(c.func).endswith(".from_pretrained") for c in calls)


def passed_as(outline: Outline, owner: str, part: str, function: Function) -> list[tuple[ast.expr, Function]]:
    """What the constructor of a model receives under the name of a part: `lm` of `Model(encoder, lm)`, for `model.lm`."""
    calls = [(b.value, b.function) for b in bindings_of(outline, owner, function) if isinstance(b.value, ast.Call)]
    return [
        (value, scope)
        for call, scope in calls
        if isinstance(call, ast.Call) and last_name_of(call.func)[:1].isupper()
        for name, value in (*((key_of(a), a) for a in call.args), *((k.arg, k.value) for k in call.keywords))
        if name == part and key_of(value)
    ]
