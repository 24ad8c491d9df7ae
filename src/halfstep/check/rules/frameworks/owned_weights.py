"""HS199: float16 weights under a framework that scales the loss."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.masters import anchor, subject, when
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.guard import Guard
from halfstep.check.script.objects.chosen import chosen_when, condition_text, float16_ways, is_on_gpu
from halfstep.check.script.objects.engines import (
    ACCELERATE,
    FABRIC,
    engines_of,
    loop_class,
    trains_in_fp16,
)
from halfstep.check.script.objects.expressions import may_be_none
from halfstep.check.script.objects.training import Trained
from halfstep.check.script.objects.values import argument, constant, dtypes_of, text_of
from halfstep.check.script.objects.weights import Cast, conditions_of
from halfstep.check.script.scaling.prepared import prepared_for
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["RULES"]

_HALF = """\
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

accelerator = Accelerator(mixed_precision="fp16")
model = AutoModelForCausalLM.from_pretrained("gpt2"{dtype})
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    optimizer.zero_grad()
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
"""
_CAST = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
model = Net(){cast}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(loss_fn(model(x), y))
    optimizer.step()
"""
_OTHER_RUNS = regex(r"strateg|deepspeed|fsdp|lora|adapter|precision|infer|eval|test|export", re.IGNORECASE)
# Another run than the one of a flag: `cfg.precision` alone is not among them, which a comparison would follow.
_OTHER_MODES = regex(r"strateg|deepspeed|fsdp|lora|adapter|infer|eval|test|export", re.IGNORECASE)
_OPTION = regex(r"(self\.)?_?(args|opts?|cfgs?|config|hparams|flags)(\.\w+)+")
_ADAPTERS = ("peft", "bitsandbytes", "unsloth", "loralib")


class HalfWeightsInFramework(ScriptRule):
    """float16 weights are trained by a framework that scales the loss."""

    code = "HS199"
    name = "half-weights-in-framework"
    severity = "error"
    reason = (
        "mixed_precision='fp16' of Accelerate and precision='16-mixed' of Fabric mean float32 weights under float16 autocast with a "
        "GradScaler. float16 weights have float16 gradients, and the first clip or step raises ValueError: Attempting to unscale FP16 "
        "gradients."
    )
    bad = (
        _HALF.format(dtype=", torch_dtype=torch.float16"),
        _CAST.format(cast=".half()"),
    )
    good = (_HALF.format(dtype=""), _CAST.format(cast=""))
    references = (
        "https://github.com/huggingface/accelerate/issues/1778",
        "https://github.com/huggingface/diffusers/issues/1246",
    )
    words = ("Accelerator", "Fabric(")

    def check(self, script: Script) -> Iterator[Finding]:
        """float16 models whose parameters a prepared optimizer, or the one of a Lightning module, trains in fp16."""
        # `_unscale_grads_` is what scripts replace to let the scaler accept float16 gradients.
        if "_unscale_grads_" in script.source.text or "patch_accelerator" in script.source.text:
            return
        reported: set[int] = set()  # lines: an event may be another node of the same cast
        for tie in script.training.by_optimizers:
            if "float16" in tie.cast.formats and (test := _chosen_by_engine(script, tie.cast)):
                reported.add(tie.cast.node.lineno)
                yield self._report(script, anchor(script, tie.cast), f"when `{test[0]}`, ", subject(tie.cast), test[1])
            ways = float16_ways(script.outline, tie.cast) if tie.cast.formats != {"float16"} else [()]
            owner = _scaling_owner(script, tie) if ways and tie.cast.node.lineno not in reported else ""
            if owner:
                reported.add(tie.cast.node.lineno)
                condition = when(script, tie.cast) if tie.cast.formats == {"float16"} else condition_text(ways[0])
                yield self._report(script, anchor(script, tie.cast), condition, subject(tie.cast), owner)
            elif tie.cast.node.lineno not in reported and (chosen := _chosen_alike(script, tie.cast)):
                reported.add(tie.cast.node.lineno)
                yield self._report(script, anchor(script, tie.cast), chosen[0], subject(tie.cast), chosen[1])
        for model, node in _fitted_models(script):
            if script.where(node).line not in reported:
                reported.add(script.where(node).line)
                guards = conditions_of(script.outline, node)
                condition = condition_text(guards) if guards else ""
                yield self._report(script, node, condition, f"`{model}`", "Lightning")
        for model, node, owner in _loose_models(script):
            if script.where(node).line not in reported:
                yield self._report(script, node, "", f"`{model}`", owner)

    def _report(self, script: Script, node: ast.AST, condition: str, model: str, owner: str) -> Finding:
        return self.finding(
            script.where(node),
            f"{condition}{model} has float16 weights, so the scaler of {owner} raises ValueError: Attempting to unscale FP16 gradients",
            instead=f"keep {model} in float32; {owner} runs it under autocast",
        )


def _scaling_owner(script: Script, tie: Trained) -> str:
    """The framework whose scaler unscales the gradients of a tie: an Accelerator, or the Trainer of a Lightning module."""
    owner = loop_class(script, tie.function.cls) if tie.function.cls else None
    if owner is not None:
        is_lightning = owner.base in {"manual", "automatic"} and owner.precision == "fp16"
        return "Lightning" if is_lightning and not conditions_of(script.outline, tie.cast.node) else ""
    engine = next((e for e in engines_of(script) if not e.plugin), None)
    if engine is None:
        return ""
    is_scaled = _fabric_scales(script, tie.cast) if engine.library == FABRIC else _accelerate_scales(script, tie.cast)
    return f"`{engine.key}`" if is_scaled else ""


def _fabric_scales(script: Script, cast: Cast) -> bool:
    """Whether Fabric steps float16 weights through a scaler: `Fabric(precision="16-mixed")` and its own backward, in every run."""
    engines = engines_of(script)
    is_scaled = all(e.library == FABRIC and e.is_created and e.precision == "fp16" for e in engines)
    here = conditions_of(script.outline, cast.node)
    return is_scaled and script.has("owned_backward") and not any(_OTHER_RUNS.search(text) for text, _ in here)


def _accelerate_scales(script: Script, cast: Cast) -> bool:
    """Whether Accelerate steps float16 weights through a scaler: `Accelerator(mixed_precision="fp16")` and its own backward.

    Where an option decides, `if config.mixed_precision == "fp16": model.half()`, it decides both.
    """
    calls = script.outline.calls.get("Accelerator", ())
    values = [argument(call, None, "mixed_precision") for call, _ in calls]
    if not values or not script.has("owned_backward"):
        return False
    conditions = conditions_of(script.outline, cast.node)
    if {constant(value) for value in values} == {"fp16"}:
        return all(is_on_gpu(guard) or _is_option(guard) for guard in conditions)
    return all(
        is_true and value is not None and text == f"{text_of(value)} == 'fp16'"
        for value in values
        for text, is_true in conditions[-1:] or ((text_of(value), False),)
    )


def _is_option(guard: Guard) -> bool:
    """Whether a condition is one option of a run that trains, whatever the precision: `args.half_weights`."""
    return guard.is_true and bool(_OPTION.fullmatch(guard.text)) and not _OTHER_MODES.search(guard.text)


def _chosen_alike(script: Script, cast: Cast) -> tuple[str, str] | None:
    """The options that choose float16 weights and the precision of an Accelerator in the same way, and its name."""
    engines = [e for e in engines_of(script) if e.library == ACCELERATE]
    sites = script.outline.calls.get("Accelerator", ())
    if len(engines) != 1 or len(sites) != 1 or not script.has("owned_backward"):
        return None
    call, function = sites[0]
    precision = argument(call, 2, "mixed_precision")
    plugins = [argument(call, None, name) for name in ("deepspeed_plugin", "fsdp_plugin")]
    if any(p is not None and not may_be_none(script.outline, p, function) for p in plugins) or precision is None:
        return None
    scaled = chosen_when(script.outline, precision, function, "fp16")
    pairs = [(way, other) for way in float16_ways(script.outline, cast) for other in scaled if way and other]
    # One option decides both; another one may be needed in addition.
    shared = [(*way, *other) for way, other in pairs if {*way} <= {*other} or {*other} <= {*way}]
    unless = "without a plugin, " if any(plugins) else ""
    return (f"{condition_text(shared[0])}{unless}", f"`{engines[0].key}`") if shared else None


def _chosen_by_engine(script: Script, cast: Cast) -> tuple[str, str] | None:
    """The test of an Accelerator's own precision that chooses float16 weights, `accelerator.mixed_precision == "fp16"`, and its name."""
    engines = [e for e in engines_of(script) if e.library == ACCELERATE and not e.plugin]
    if not script.has("owned_backward") or len(engines) != 1:
        return None
    passed = [argument(call, None, "mixed_precision") for call, _ in script.outline.calls.get("Accelerator", ())]
    own = {f"{engines[0].key}.mixed_precision", *(text_of(value) for value in passed if value is not None)}
    tests = {f"{text} == 'fp16'" for text in own}
    for way in float16_ways(script.outline, cast):
        for text, is_true in way[-1:]:
            if is_true and text in tests:
                return text, f"`{engines[0].key}`"
    return None


def _loose_models(script: Script) -> Iterator[tuple[str, ast.AST, str]]:
    """float16 models that a prepared optimizer trains, where only the names tie them together."""
    if script.outline.names.uses(*_ADAPTERS) or "requires_grad_" in script.outline.calls:
        return
    engines = [e for e in engines_of(script) if e.precision == "fp16" and not e.plugin]
    if not engines or len(engines) != len(engines_of(script)):
        return
    trained = {
        name
        for event in script.events("make_optimizer")
        for name in event.subject.split("|")
        if any(last_name(name) in prepared_for(script, engine.library, event).names for engine in engines)
    }
    yield from ((model, node, f"`{engines[0].key}`") for model, node in _half_models(script) if model in trained)


def _fitted_models(script: Script) -> Iterator[tuple[str, ast.AST]]:
    """Modules of another file that are cast to float16, and that a Trainer of Lightning then trains with a scaler."""
    outline = script.outline
    for call, function in outline.calls.get("fit", ()) if trains_in_fp16(script) else ():
        model = argument(call, 0, "model")
        lineage = script.training.model(model, function) if model is not None and key_of(model) else None
        if (
            lineage is None
            or lineage.is_restored
            or any(last_name(key_of(c.node.func)) in outline.classes for c in lineage.creations)
        ):
            continue
        for cast in lineage.casts:
            guards = conditions_of(outline, cast.node)
            is_whole = cast.form == "cast" and cast.formats == {"float16"} and cast.key in {key_of(model), ""}
            if is_whole and not any(_OTHER_RUNS.search(text) for text, _ in guards) and cast.node.lineno < call.lineno:
                yield key_of(model), cast.node


def _half_models(script: Script) -> Iterator[tuple[str, ast.AST]]:
    """The variables that are cast to float16, or loaded in it, before any training loop."""
    casts = [e for e in script.events("cast") if not e.loops and not e.guards and not e.inside("no_grad")]
    undone = {e.subject for e in script.events("cast") if e.scaled == "float32"}
    first = min((_line(e) for e in script.events("owned_backward", "backward")), default=0)
    yield from (
        (e.subject, e.node) for e in casts if e.scaled == "float16" and e.subject not in undone and _line(e) < first
    )
    for key, bindings in script.outline.bindings.items():
        for b in bindings:
            loads = isinstance(b.value, ast.Call) and last_name(text_of(b.value.func)) == "from_pretrained"
            if loads and isinstance(b.value, ast.Call) and len(bindings) <= 2 and key not in undone:
                dtype = argument(b.value, None, "torch_dtype") or argument(b.value, None, "dtype")
                if dtype is not None and dtypes_of(script.outline, dtype, b.function) == {"float16"}:
                    yield key, b.value


def _line(event: Event) -> int:
    return getattr(event.node, "lineno", 0)


RULES: tuple[type[Rule], ...] = (HalfWeightsInFramework,)
