"""Modules of a model that a script casts to 16 bits and trains: the projector of LLaVA's code, a head that is trained again.

Or the adapters that a model is created with, cast as part of it: `mark_only_lora_as_trainable(model)`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from halfstep.check.regex import regex
from halfstep.check.script.objects.formats import SIXTEEN_BIT, VariableCast, base_of, cast_formats
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.objects.weights import Cast, Lineage
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline, last_name_of
from halfstep.check.script.trained.enabling import enabled_parts, full_path
from halfstep.check.script.trained.getters import path_of

__all__ = ["lowered_parts", "marked_adapters"]

# Of loralib, lit-llama and their descendants: freezes all but the adapters that are already layers of the model.
_MARKS = regex(r"^mark_only_(lora|adapter)\w*_as_trainable$")
# Calls that attach nothing to a model.
_PLAIN = regex(
    r"^(load_state_dict|to|cuda|cpu|train|eval|print|len|count_\w+|num_\w+|compile|resize_token_embeddings)$"
)
_CASTS = ("half", "bfloat16", "to", "float")


def lowered_parts(lineage: Lineage, casts: Iterable[VariableCast]) -> Iterator[Cast]:
    """Casts to 16 bits of modules of a model that are trained: `model.head.requires_grad_(True)`, then `model.head.half()`."""
    outline = lineage.outline
    enabled = {full_path(outline, text, function) for text, function in enabled_parts(outline)}
    enabled |= set(_chosen_parts(outline))
    if not enabled:
        return
    casts = [*casts, *_through_getters(outline)]
    lifted = {path for cast in casts if cast.formats == {"float32"} for path in _paths(outline, cast)}
    for cast in casts:
        paths = _paths(outline, cast) if cast.formats & SIXTEEN_BIT else set()
        trained = [{part for part in enabled if f"{part}.".startswith(f"{path}.")} - lifted for path in paths]
        is_part = bool(paths) and all("." in path and _is_part(lineage, path, cast.function) for path in paths)
        if is_part and all(trained) and not paths & lifted:
            yield Cast(cast.call, cast.function, cast.key, cast.formats, "cast")


def _paths(outline: Outline, cast: VariableCast) -> set[str]:
    """The modules that a cast variable may be, as paths from their model."""
    values = [b.value for b in outline.bindings.get(cast.key, ()) if b.function is cast.function]
    if values:
        return {full_path(outline, path_of(value), cast.function) for value in values}
    owner = base_of(cast.call)
    return {full_path(outline, path_of(owner) if not key_of(owner) else cast.key, cast.function)}


def _is_part(lineage: Lineage, path: str, function: Function) -> bool:
    """Whether a path leads to a module of a model: `model.visual.merger`."""
    names = path.split(".")
    return any(lineage.has(".".join(names[:count]), function) for count in range(1, len(names)))


def _through_getters(outline: Outline) -> Iterator[VariableCast]:
    """Casts of modules that getters return: `model.get_model().mm_projector.to(torch.float16)`."""
    for name in _CASTS:
        for call, function in outline.calls.get(name, ()):
            owner = base_of(call)
            if not key_of(owner) and path_of(owner) and (formats := cast_formats(outline, call, function)):
                yield VariableCast(call, function, text_of(owner), formats)


def _chosen_parts(outline: Outline) -> Iterator[str]:
    """The modules that a loop trains in part, or if an option asks for it: `p.requires_grad = args.tune_mlp_adapter`."""
    for name in ("parameters", "named_parameters"):
        for call, function in outline.calls.get(name, ()):
            loop = outline.parents.get(call)
            owner = path_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            if not owner or not isinstance(loop, ast.For) or loop.iter is not call:
                continue
            enables = [statement for statement in ast.walk(loop) if _may_enable(statement)]
            if not enables:
                continue
            whole = full_path(outline, owner, function)
            if "." in whole:
                yield whole
            for test in (n for n in loop.body if isinstance(n, ast.If) and any(e in n.body for e in enables)):
                yield from (f"{whole}.{word.strip('.')}" for word in _named(test.test))


def _may_enable(node: ast.AST) -> bool:
    """Whether a statement trains a parameter, in every run or as an option of the command line says."""
    if isinstance(node, ast.Assign) and text_of(node.targets[0]).endswith(".requires_grad"):
        return _is_on(node.value)
    call = node.value if isinstance(node, ast.Expr) else None
    is_switch = isinstance(call, ast.Call) and text_of(call.func).endswith(".requires_grad_")
    return isinstance(call, ast.Call) and is_switch and (not call.args or _is_on(call.args[0])) and not call.keywords


def _is_on(value: ast.expr) -> bool:
    return constant(value) is True or (isinstance(value, ast.Attribute) and bool(key_of(value)))


def _named(test: ast.expr) -> list[str]:
    """The words of `"projector" in name or "connector" in name`; none of any other condition."""
    terms = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]
    words = []
    for term in terms:
        is_found = isinstance(term, ast.Compare) and len(term.ops) == 1 and isinstance(term.ops[0], ast.In)
        word = constant(term.left) if isinstance(term, ast.Compare) and is_found else None
        if not isinstance(word, str):
            return []
        words.append(word)
    return words


def marked_adapters(outline: Outline, model: Callable[[ast.expr, Function], Lineage]) -> Iterator[Cast]:
    """The 16-bit casts of models that have adapters as layers of their own: PEFT is not there to keep those in float32."""
    for name, sites in outline.calls.items():
        for call, function in sites if _MARKS.search(name) else ():
            if not call.args or not key_of(call.args[0]):
                continue
            lineage = model(call.args[0], function)
            for cast in lineage.casts if not lineage.is_restored and not lineage.is_adapted else ():
                is_own = cast.form == "cast" and cast.function is function and cast.is_certain
                if is_own and not _may_gain_layers(lineage, cast, call):
                    yield replace(cast, key=key_of(call.args[0]))


def _may_gain_layers(lineage: Lineage, cast: Cast, mark: ast.Call) -> bool:
    """Whether something may attach layers to a model, in float32, after it is cast and before all but them is frozen."""
    lines = range(cast.node.lineno + 1, mark.lineno)
    roots = {key for key, _ in lineage.places}
    for key, bindings in lineage.outline.bindings.items():
        if "." in key and key.partition(".")[0] in roots and any(isinstance(b.value, ast.Call) for b in bindings):
            return True  # `model.head = lora.Linear(64, 10)`
    for name, sites in lineage.outline.calls.items():
        for call, function in sites if not _PLAIN.search(name) else ():
            if function is not cast.function or call.lineno not in lines or last_name_of(call.func) in _CASTS:
                continue
            receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
            keys = [path_of(receiver), *map(key_of, call.args), *(key_of(k.value) for k in call.keywords)]
            if any(lineage.has(key.partition(".")[0], function) for key in keys if key):
                return True
    return False
