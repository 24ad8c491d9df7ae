"""HS161: float16 weights that are trained without float32 master weights."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.casts import trained_casts
from halfstep.check.rules.weights.masters import is_stepped, remedy, subject, when
from halfstep.check.script.exercise import is_exercise
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import is_amp, scalers_at
from halfstep.check.script.objects.adapters import upcasts_parameters
from halfstep.check.script.objects.engines import ACCELERATE, engines_of, loop_class
from halfstep.check.script.objects.training import Trained
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.objects.weights import conditions_of
from halfstep.check.script.pairing.scaler_condition import spares_half_weights
from halfstep.check.script.scaling.stepped import steps_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES", "models_kept_half"]

_PLAIN = """\
import torch
model = Net().cuda()
{cast}optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-3)
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x.half()), y)
    loss.backward()
    optimizer.step()
"""
_CLIP = """\
import clip, torch
model, preprocess = clip.load("ViT-B/32", device="cuda", jit=False)
{cast}optimizer = torch.optim.Adam(model.parameters(), lr=5e-6)
for images, texts in loader:
    optimizer.zero_grad()
    logits, _ = model(images, texts)
    loss_fn(logits, labels).backward()
    optimizer.step()
"""
_LIFTED = regex(r"'fp32'.*'amp'|'amp'.*'fp32'")
_TYPED = regex(r"dtype ?= ?\w+\.dtype|\.(to|type)\(\w+\.dtype\)|\.half\(\)")  # new parameters have the model's dtype


class HalfWeightsPlainOptimizer(ScriptRule):
    """float16 weights are trained without float32 master weights."""

    code = "HS161"
    name = "half-weights-plain-optimizer"
    severity = "warning"
    reason = (
        "Around 1, float16 values are 0.001 apart, so updates below 0.0005 are rounded away and the weight does not change. Without a "
        "loss scale, gradients below 6e-8 become zero, and Adam's eps of 1e-8 is zero in float16, so Adam divides by zero."
    )
    bad = (
        _PLAIN.format(cast="model.half()\n", optimizer="Adam"),
        _PLAIN.format(cast="model = model.half()\n", optimizer="SGD"),
        _PLAIN.format(cast="if args.fp16:\n    model.half()\n", optimizer="SGD"),
        _CLIP.format(cast=""),
    )
    good = (
        _PLAIN.format(cast="", optimizer="Adam").replace(".half()", ""),
        _PLAIN.format(cast="if args.fp16:\n    export(model.half())\n    raise SystemExit\n", optimizer="SGD"),
        _CLIP.format(cast="model = model.float()\n"),
    )
    references = (
        "https://arxiv.org/abs/1710.03740",
        "https://github.com/pytorch/pytorch/issues/147437",
        "https://github.com/openai/CLIP/issues/83",
    )
    words = ("clip.load(", "from clip import", "get_rudalle_model")  # whose weights are float16

    def check(self, script: Script) -> Iterator[Finding]:
        """float16 casts of trained models in scripts that step a torch optimizer directly."""
        for half in models_kept_half(script):
            yield self.finding(
                script.where(half.step),
                f"with 'fp16' `{half.model}` and the parameters that share its dtype stay float16 ({script.at(half.cast)} casts it for 'fp32' and 'amp' "
                "only), and this branch trains them without float32 master weights or a loss scale: small updates are lost",
                instead=f"keep `{half.model}` in float32 for training, and use 'amp' to compute in float16",
            )
        for call, _ in script.outline.library_calls.get("apex.amp.initialize", ()):
            if constant(argument(call, 3, "opt_level")) == "O3" and argument(call, None, "master_weights") is None:
                yield self.finding(
                    script.where(call),
                    "opt_level O3 makes all weights float16, without float32 master weights and with a loss scale of 1: small updates are lost",
                    instead="opt_level O1 or O2, or train under torch.autocast with a GradScaler",
                )
        if script.has("apex_initialize") or script.training.has_masters:
            return
        reported: set[ast.AST] = set()
        for event in _stepped_casts(script):
            reported.add(event.node)
            flags = " and ".join(f"`{text}`" for text, value in event.guards if value and is_amp((text, value)))
            yield self.finding(
                script.where(event.node),
                f"{f'when {flags}, ' if flags else ''}`{event.subject}` is trained in float16 without float32 master weights or a loss scale: small updates are lost",
                instead=f"keep `{event.subject}` in float32 and train under autocast with a GradScaler, or under bfloat16 autocast",
            )
        for tie in () if is_exercise(script) else script.training.by_optimizers:
            cast = tie.cast
            if cast.low != {"float16"} or cast.node in reported or not is_stepped(script, tie):
                continue
            if _is_stepped_plainly(script, tie):
                is_scaled = any(e.scaled != "no" for e in script.events("backward")) or script.has("owned_backward")
                unless = "without DeepSpeed or FSDP, " if script.has("owned_backward") else ""
                yield self.finding(
                    script.where(cast.node),
                    f"{when(script, cast, tie.lineage)}{unless}{subject(cast)} is trained in float16 by `{text_of(tie.by.func)}` ({script.at(tie.by)}) without "
                    f"float32 master weights{'' if is_scaled else ' or a loss scale'}: small updates are lost",
                    instead=f"{remedy(script, cast)} and train under autocast with a GradScaler, or under bfloat16 autocast",
                    severity=None if cast.is_certain else "advice",
                )


def _stepped_casts(script: Script) -> Iterator[Event]:
    """float16 casts of models in scripts without a scaler or an engine."""
    backs = list(script.events("backward"))
    if script.scalers or script.has("scaler_step", "owned_backward", "owned_step"):
        return
    if backs and all(b.scaled == "no" for b in backs) and not upcasts_parameters(script.outline):
        yield from trained_casts(script, "float16", "opt_step")


def _is_stepped_plainly(script: Script, tie: Trained) -> bool:
    """Whether the optimizer of a tie steps by itself, not through a scaler or an engine that may keep master weights."""
    loop = loop_class(script, tie.function.cls) if tie.function.cls else None
    if loop is not None and loop.precision == "fp16":
        return False  # through the scaler of Lightning: HS199
    steps = steps_of(script, tie.by, "scaler_step")
    if not all(spares_half_weights(script, e, scalers_at(script, e)) for e in steps):
        return False
    stepped = bool(steps_of(script, tie.by, "opt_step"))
    backs = list(script.events("backward"))
    if any(b.scaled == "maybe" for b in backs):
        return False  # a loss that is scaled by hand often comes with copies of the weights
    is_scaled = bool(script.scalers) or script.has("scaler_step") or any(b.scaled == "yes" for b in backs)
    if (is_scaled and not stepped) or ((is_scaled or not backs) and script.has("handed")):
        return False
    owned = list(script.events("owned_backward", "owned_step"))
    if not backs and not owned and any(e.is_created for e in engines_of(script)):
        return False  # `accelerator.prepare(model, optimizer)` in a script that only runs the model
    return _is_beside(script, tie.cast.node, owned) or (stepped and _accelerates(script, tie))


def _accelerates(script: Script, tie: Trained) -> bool:
    """Whether an Accelerator of this script trains the weights as they are: neither fp16, which HS199 reports, nor a plugin."""
    engines = engines_of(script)
    text = script.source.text.lower()
    is_open = "deepspeed" in text or "fsdp" in text or any(map(is_amp, conditions_of(script.outline, tie.cast.node)))
    is_other = any(e.library != ACCELERATE or e.plugin or e.precision == "fp16" or not e.is_created for e in engines)
    return bool(engines) and not is_open and not is_other


class KeptHalf(NamedTuple):
    """A branch that trains float16 parameters, and the cast that the option skips."""

    step: ast.Call
    cast: ast.Call
    model: str
    body: list[ast.stmt]  # of the branch


def models_kept_half(script: Script) -> Iterator[KeptHalf]:
    """Branches without a scaler that run with an option of "fp16", next to `if option in ("fp32", "amp"): model.float()`.

    CLIP's checkpoints are float16, and prompt learning code gives new parameters the dtype of the model.
    """
    outline = script.outline
    if "fp16" not in outline.strings or not _TYPED.search(script.source.text):
        return
    for cast, function in outline.calls.get("float", ()):
        model = key_of(cast.func.value) if isinstance(cast.func, ast.Attribute) else ""
        guards = conditions_of(outline, cast)
        if (
            not _is_clip(script, model, function)
            or cast.args
            or not guards
            or not guards[-1].is_true
            or not _LIFTED.search(guards[-1].text)
        ):
            continue
        for scaled, _ in outline.calls.get("scale", ()):
            branch = _branch_of(script, scaled)
            step = _unscaled_step(branch.orelse) if branch is not None else None
            if branch is not None and step is not None:
                yield KeptHalf(step, cast, model, branch.orelse)


def _is_clip(script: Script, model: str, function: Function) -> bool:
    """Whether a variable is a model that a function for CLIP makes: other models are float32 unless something casts them."""
    made = [b.value for b in script.outline.bindings.get(model, ()) if b.function is function]
    return any(isinstance(value, ast.Call) and "clip" in text_of(value.func).lower() for value in made)


def _branch_of(script: Script, node: ast.AST) -> ast.If | None:
    """The `if option == "amp":` around a node."""
    for parent in script.above(node):
        if isinstance(parent, ast.If) and re.fullmatch(r"[\w.]+ == 'amp'", text_of(parent.test)):
            return parent
    return None


def _unscaled_step(body: list[ast.stmt]) -> ast.Call | None:
    """The call in a branch that trains without a scaler: `loss.backward()`, or a method of that name."""
    calls = [n for statement in body for n in ast.walk(statement) if isinstance(n, ast.Call)]
    names = {call: text_of(call.func).rsplit(".", 1)[-1] for call in calls}
    if any("scal" in text_of(call.func) for call in calls):
        return None
    return next((call for call, name in names.items() if "backward" in name), None)


def _is_beside(script: Script, cast: ast.AST, owned: list[Event]) -> bool:
    """Whether a cast excludes every backward and step of an engine: `if not use_deepspeed: model.half()`."""
    events = [e for e in script.events("cast") if e.node is cast]
    return not owned or (bool(events) and not any(compatible(e, o) for e in events for o in owned))


RULES: tuple[type[Rule], ...] = (HalfWeightsPlainOptimizer,)
