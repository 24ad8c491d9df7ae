"""Trained weights that are cast back to float32 in a float16 run and left as they are in a bfloat16 run.

Scripts made from the examples of diffusers cast a model to `weight_dtype`, and then its trained weights to float32 where
`mixed_precision` is "fp16": a GradScaler rejects float16 gradients. In bfloat16 nothing raises, and the weights, or the
adapters that `add_adapter` creates in the dtype of their layers, are trained in 16 bits.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.check.regex import regex
from halfstep.check.script.flow.guard import Guard
from halfstep.check.script.objects.adapters import attachments, may_attach
from halfstep.check.script.objects.expressions import is_after_training
from halfstep.check.script.objects.trainers import has_plugin
from halfstep.check.script.objects.values import argument, text_of
from halfstep.check.script.objects.weights import VariableCast, cast_formats, casts_in, conditions_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline, last_name_of

__all__ = ["Lift", "lifted_in_float16", "listed_models"]

_FLOAT16 = regex(r"^[\w.\[\]'\"]+ == ('fp16'|torch\.float16|torch\.half)$")
_EVALUATES = regex(r"eval|valid|test|sampl|infer|log_")


class Lift(NamedTuple):
    """A cast to bfloat16 whose trained weights return to float32 only in a float16 run."""

    cast: VariableCast
    back: ast.AST  # where they return to float32
    condition: str
    optimizer: ast.Call

    def describe(self, script: Script) -> str:
        """What happens in a bfloat16 run."""
        return (
            f"with bf16 `{self.cast.key}` is trained in bfloat16 by `{text_of(self.optimizer.func)}` ({script.at(self.optimizer)}), as "
            f"{script.at(self.back)} casts its trained weights to float32 only when `{self.condition}`"
        )


class _Back(NamedTuple):
    node: ast.AST
    function: Function
    models: set[str]


def lifted_in_float16(script: Script) -> Iterator[Lift]:
    """The first cast of a model for each place where trained weights return to float32, if all of these ask for float16."""
    outline = script.outline
    backs = [*_by_function(outline), *_by_loops(script)]
    conditions = [_asks_for_float16(conditions_of(outline, back.node)) for back in backs]
    if not backs or not all(conditions) or has_plugin(outline) or outline.names.uses("deepspeed", "unsloth"):
        return
    # PEFT itself casts the adapters of these calls to float32.
    wrapped = {key_of(a.base) for a in attachments(outline) if last_name_of(a.call.func) != "add_adapter"}
    casts = sorted(casts_in(outline), key=lambda cast: cast.call.lineno)
    lifts = [cast for cast in casts if cast.formats == {"float32"}]
    restored = {cast.key for cast in lifts if not is_after_training(outline, cast.call, cast.function)}
    reported: set[ast.AST] = set()
    for back, condition in zip(backs, conditions, strict=True):
        for cast in casts:
            is_own = cast.key in back.models - wrapped - restored and cast.function is back.function
            if not is_own or "bfloat16" not in cast.formats or cast.call.lineno > getattr(back.node, "lineno", 0):
                continue
            is_other = _asks_for_float16(conditions_of(outline, cast.call)) or _is_adapted_elsewhere(
                outline, cast, back
            )
            optimizer = None if is_other or cast.call in reported else _optimizer_of(script, cast)
            if optimizer is not None:
                reported.add(cast.call)
                yield Lift(cast, back.node, condition, optimizer)
                break


def _is_adapted_elsewhere(outline: Outline, cast: VariableCast, back: _Back) -> bool:
    """Whether another function gets the model in between and may attach adapters in any dtype: `unet = inject_lora(unet, args)`."""
    names = [name for name in outline.calls if may_attach(name)]
    bound = [b.value for b in outline.bindings.get(cast.key, ()) if b.function is cast.function]
    calls = [call for name in names for call, _ in outline.calls[name]]
    calls += [v for v in bound if isinstance(v, ast.Call) and last_name_of(v.func) != "prepare"]
    calls = [call for call in calls if call.lineno < getattr(back.node, "lineno", 0)]
    return any(cast.key in map(key_of, (*call.args, *(k.value for k in call.keywords))) for call in calls)


def _optimizer_of(script: Script, cast: VariableCast) -> ast.Call | None:
    """The optimizer without master weights that gets the parameters of a model, or of a part of it."""
    for call, function in script.training.optimizers:
        keys = [key_of(owner) for owner, _ in script.training.owners(call, function)]
        if any(key == cast.key or key.startswith(f"{cast.key}.") for key in keys):
            return call
    return None


def _asks_for_float16(guards: tuple[Guard, ...]) -> str:
    """The condition by which a branch is for float16; "" if there is none."""
    return next((text for text, is_true in guards if is_true and _FLOAT16.search(text)), "")


def _by_function(outline: Outline) -> Iterator[_Back]:
    """`cast_training_params([unet], dtype=torch.float32)` of diffusers, other than after an evaluation."""
    for call, function in outline.calls.get("cast_training_params", ()):
        if not _EVALUATES.search(function.name):
            first = argument(call, 0, "model")
            yield _Back(call, function, listed_models(outline, first, function) if first is not None else set())


def _by_loops(script: Script) -> Iterator[_Back]:
    """`for p in unet.parameters(): if p.requires_grad: p.data = p.to(torch.float32)`, also of every model of a list."""
    outline = script.outline
    for call, function in (site for name in ("float", "to") for site in outline.calls.get(name, ())):
        parent = outline.parents.get(call)
        target = parent.targets[0] if isinstance(parent, ast.Assign) else None
        is_data = isinstance(target, ast.Attribute) and target.attr == "data"
        if is_data and "float32" in cast_formats(outline, call, function):
            loops = [node for node in script.above(call) if isinstance(node, ast.For)]
            yield _Back(call, function, _models_of(outline, loops, function))


def _models_of(outline: Outline, loops: list[ast.For], function: Function) -> set[str]:
    """The models whose parameters a loop goes through, perhaps inside a loop through the models."""
    names = ("parameters", "named_parameters")
    calls = [n.func for loop in loops[:1] for n in ast.walk(loop.iter) if isinstance(n, ast.Call)]
    owners = [f.value for f in calls if isinstance(f, ast.Attribute) and f.attr in names]
    models = {key_of(owner) for owner in owners}
    for outer in loops[1:]:
        if key_of(outer.target) in models:
            models |= listed_models(outline, outer.iter, function)
    return models


def listed_models(outline: Outline, node: ast.expr, function: Function) -> set[str]:
    """The models of `[unet, text_encoder]`, of a variable with such a list and what is added to it, or of one model."""
    values = [node, *(outline.values(key_of(node), function) if key_of(node) else ())]
    for name in ("extend", "append"):
        for call, scope in outline.calls.get(name, ()):
            if scope is function and text_of(call.func) == f"{key_of(node)}.{name}":
                values += call.args
    lists = [v.elts if isinstance(v, (ast.List, ast.Tuple)) else [v] for v in values]
    return {key_of(element) for elements in lists for element in elements} - {""}
