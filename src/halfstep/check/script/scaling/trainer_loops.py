"""What a transformers Trainer that replaces part of its training loop does after `training_step`, which scales the loss in fp16."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.flow.guard import Guard
from halfstep.check.script.objects.engines import LoopClass, loop_class
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import nodes_in
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["clips_after_steps", "steps_of_own_loops"]

_CLIPS = ("clip_grad_norm_", "clip_grad_value_")
_UNSCALES = {"unscale_", "unscale_gradients", "unscale"}
_OTHER = regex(r"apex|bf16|bfloat16|deepspeed|fsdp|sharded")
_ABSENT = regex(r"scaler is None|(not in|!=) .*fp16")
_SCALED = regex(r"fp16|scaler|half|amp\b")


def clips_after_steps(script: Script) -> Iterator[tuple[ast.Call, LoopClass]]:
    """torch's clips of gradients that the `training_step` of the library, called above in the same function, has scaled."""
    calls = script.outline.calls
    if "training_step" not in calls or not calls.keys().isdisjoint(_UNSCALES):
        return
    for name in _CLIPS:
        for call, function in calls.get(name, ()):
            owner = _trainer(script, function)
            is_torch = script.outline.names.full(call.func).startswith("torch.nn.utils.")
            if owner is None or not is_torch or not _clips(call) or not _may_be_scaled(script, call):
                continue
            if any(site.lineno < call.lineno for site in _library_steps(script, function)):
                yield call, owner


def steps_of_own_loops(script: Script) -> Iterator[tuple[ast.Call, LoopClass]]:
    """The steps of `self.optimizer` in an `_inner_training_loop` of its own that neither prepares the optimizer nor has a scaler."""
    outline = script.outline
    if "training_step" not in outline.calls or "prepare" in outline.calls or "scaler" in outline.loads:
        return
    for call, function in outline.calls.get("step", ()):
        owner = _trainer(script, function) if function.name == "_inner_training_loop" else None
        is_plain = isinstance(call.func, ast.Attribute) and key_of(call.func.value) == "self.optimizer"
        if owner is None or not is_plain or call.args or "_inner_training_loop" in outline.calls:
            continue
        if (
            "self.optimizer" not in outline.bindings
            and any(_library_steps(script, function))
            and _may_be_scaled(script, call)
        ):
            yield call, owner


def _trainer(script: Script, function: Function) -> LoopClass | None:
    """The Trainer whose method a function is, if it may run in fp16."""
    owner = loop_class(script, function.cls) if function.cls else None
    return owner if owner is not None and owner.base == "trainer" and owner.precision in {"fp16", "?"} else None


def _library_steps(script: Script, function: Function) -> Iterator[ast.Call]:
    """The calls of a function that run the library's `training_step`: the inherited one, or one that ends in it."""
    own = script.outline.classes.get(function.cls, {}).get("training_step")
    for call, caller in script.outline.calls.get("training_step", ()):
        owner = text_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if caller is function and (
            owner.startswith("super(") or (owner == "self" and (own is None or _delegates(own)))
        ):
            yield call


def _delegates(step: Function) -> bool:
    """Whether a `training_step` goes through the library: its base class, or the accelerator's backward."""
    texts = [text_of(n.func) for n in nodes_in(step.node) if isinstance(n, ast.Call)]
    return any(text.startswith("super(") and text.endswith(".training_step") for text in texts) or (
        "self.accelerator.backward" in texts
    )


def _clips(call: ast.Call) -> bool:
    """Whether a call clips at a limit, other than the parameters of Apex, which are unscaled."""
    source, limit = argument(call, 0, "parameters"), argument(call, 1, "max_norm")
    arms = [source.body, source.orelse] if isinstance(source, ast.IfExp) else [source]
    is_clip = constant(limit) is not None and "inf" not in text_of(limit)
    return is_clip and any("master_params" not in text_of(arm) for arm in arms if arm is not None)


def _may_be_scaled(script: Script, call: ast.Call) -> bool:
    """Whether no condition around a call leaves fp16 out."""
    return not any(map(_excludes_scale, conditions_of(script.outline, call)))


def _excludes_scale(guard: Guard) -> bool:
    if guard.is_true:
        parts = [part.lstrip("(") for part in guard.text.split(" and ")]
        return any(_OTHER.search(part) or _ABSENT.search(part) for part in parts if not part.startswith("not ")) or any(
            _SCALED.search(part) for part in parts if part.startswith("not ")
        )
    return bool(_SCALED.search(guard.text)) and " and " not in guard.text
