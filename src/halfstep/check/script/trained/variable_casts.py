"""The casts of variables in a script: one after another, in loops over models, and of all layers of a model.

for layer in net.modules():                     a cast of `net`: what keeps float32 are the norms
if not isinstance(layer, nn.BatchNorm2d):
layer.half()
net.apply(lower)                                the same, where `lower` casts its argument
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.guard import Guard
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.formats import SIXTEEN_BIT, VariableCast, base_of, cast_formats
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["casts_in", "conditions_of_cast", "swept_model"]

_SWEEPS = {"modules", "named_modules", "children", "named_children"}
_NORMS = regex(r"norm|bn\b|_bn|bn_|\bBN", re.IGNORECASE)
_MATRICES = regex(r"Linear|Conv|Embed|Attention|Block")
_NEGATED = regex(r"^not |\bis not\b|\bnot in\b|!=")


def casts_in(outline: Outline) -> Iterator[VariableCast]:
    """Every call of a file that casts a variable in place, or the layers of a model."""
    for name in ("half", "bfloat16", "to", "float", "type"):
        for call, function in outline.calls.get(name, ()):
            key = key_of(base_of(call))
            formats = cast_formats(outline, call, function) if key else frozenset()
            for variable in _iterated(outline, call, function, key) if formats else ():
                yield VariableCast(call, function, variable, formats)
            if formats & SIXTEEN_BIT:
                yield from _swept(outline, VariableCast(call, function, key, formats))
    yield from _assigned_states(outline)


def _swept(outline: Outline, cast: VariableCast) -> Iterator[VariableCast]:
    """The casts of models that the cast of a layer is: in a loop over all of them, or in a function that is applied to them."""
    call, function, key, formats = cast
    model = swept_model(outline, call)
    if model:
        yield VariableCast(call, function, model, formats)
        for site in outline.calls.get(function.name, ()) if model == "self" and function.name != "__init__" else ():
            if owner := key_of(base_of(site.call.func.value)) if isinstance(site.call.func, ast.Attribute) else "":
                yield VariableCast(site.call, site.function, owner, formats)
    is_applied = function.params[:1] == (key,) and "apply" in outline.calls and not function.method
    if is_applied and _leaves_norms(conditions_of(outline, call), {key}):
        for site in outline.calls["apply"]:
            func, applied = site.call.func, [key_of(a) for a in site.call.args]
            if isinstance(func, ast.Attribute) and applied == [function.name] and key_of(func.value):
                yield VariableCast(site.call, site.function, key_of(func.value), formats)


def swept_model(outline: Outline, call: ast.Call) -> str:
    """The model all of whose layers, or all but the norms, a loop casts; "" if it is none."""
    loop = next(_loops_around(outline, call), None)
    names = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)} if loop is not None else set()
    if key_of(base_of(call)) not in names or not _leaves_norms(conditions_of(outline, call), names):
        return ""
    return key_of(loop.iter.func.value)  # type: ignore[union-attr]


def conditions_of_cast(outline: Outline, call: ast.Call) -> tuple[Guard, ...]:
    """The conditions under which a model is cast; which of its layers keep float32 is none."""
    guards = conditions_of(outline, call)
    names = {n.id for loop in _loops_around(outline, call) for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    return tuple(g for g in guards if not names & set(re.findall(r"\w+", g.text))) if names else guards


def _loops_around(outline: Outline, call: ast.Call) -> Iterator[ast.For]:
    """The loop over the layers of a model around a cast."""
    loop: ast.AST | None = outline.parents.get(call)
    while loop is not None and not isinstance(loop, (ast.For, ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
        loop = outline.parents.get(loop)
    func = loop.iter.func if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) else None
    if isinstance(loop, ast.For) and isinstance(func, ast.Attribute) and func.attr in _SWEEPS:
        yield loop


def _leaves_norms(guards: Iterable[tuple[str, bool]], names: set[str]) -> bool:
    """Whether conditions on a layer with one of these names leave out nothing but norms."""
    own = [(text, is_true) for text, is_true in guards if names & set(re.findall(r"\w+", text))]
    return all(_asks_for_norm(text) and is_true is bool(_NEGATED.search(text)) for text, is_true in own)


def _asks_for_norm(text: str) -> bool:
    return bool(_NORMS.search(text)) and not _MATRICES.search(text)


def _iterated(outline: Outline, call: ast.Call, function: Function, key: str) -> list[str]:
    """The variables of `for m in (encoder, decoder): m.half()`, also of a list or dictionary; `key` itself without such a loop."""
    loop, tests = outline.parents.get(call), set()
    while isinstance(loop, (ast.Expr, ast.Assign, ast.If)):
        tests |= {text_of(loop.test)} if isinstance(loop, ast.If) else set()
        loop = outline.parents.get(loop)
    names = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)} if isinstance(loop, ast.For) else set()
    chosen = [t for t in tests - {key, f"{key} is not None"} if names & set(re.findall(r"\w+", t))]
    if not isinstance(loop, ast.For) or chosen:  # `if name != "unet":` leaves some out
        return [key]
    target, source = loop.target, loop.iter
    if isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and not source.args:
        target = target.elts[-1] if source.func.attr == "items" and isinstance(target, ast.Tuple) else target
        source = source.func.value if source.func.attr in {"items", "values"} else source
    values = outline.values(key_of(source), function) if key_of(source) else [source]
    models = values[0] if len(values) == 1 and key_of(target) == key else None
    if isinstance(models, (ast.Tuple, ast.List)):
        return [name for name in map(key_of, models.elts) if name]
    if isinstance(models, ast.Dict) and source is not loop.iter:
        entries = [f"{key_of(source)}[{constant(k)!r}]" for k in models.keys if isinstance(constant(k), str)]
        return [*filter(None, map(key_of, models.values)), *entries]
    return [key]


def _assigned_states(outline: Outline) -> Iterator[VariableCast]:
    """Casts of the values of a state dict, `state[k] = v.half()`, that `load_state_dict(state, assign=True)` makes the weights."""
    for load, function in outline.calls.get("load_state_dict", ()):
        owner = key_of(load.func.value) if isinstance(load.func, ast.Attribute) else ""
        if not owner or constant(argument(load, 2, "assign")) is not True:
            continue
        for name in ("half", "bfloat16", "to"):
            for call, scope in outline.calls.get(name, ()):
                parent = outline.parents.get(call)
                is_item = isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Subscript)
                formats = cast_formats(outline, call, scope)
                if (is_item or isinstance(parent, ast.DictComp)) and formats & SIXTEEN_BIT:
                    yield VariableCast(call, function, owner, formats)
