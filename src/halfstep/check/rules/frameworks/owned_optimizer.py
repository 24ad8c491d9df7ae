"""HS198, HS199: optimizers and weights that a framework does not unscale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.masters import anchor, subject, when
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import TraceRule, earlier
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.chosen import chosen_when, condition_text, float16_ways, is_on_gpu
from halfstep.check.script.objects.engines import (
    ACCELERATE,
    Engine,
    engine_at,
    engines_of,
    loop_class,
    prepared_for,
    scaling_accelerator,
)
from halfstep.check.script.objects.expressions import arguments_of, may_be_none
from halfstep.check.script.objects.owners import created_here, list_of, prepared_if
from halfstep.check.script.objects.training import Trained
from halfstep.check.script.objects.values import argument, constant, dtypes_of, text_of
from halfstep.check.script.objects.weights import Cast, conditions_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["RULES"]

_UNPREPARED = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
optimizer = torch.optim.AdamW(model.parameters())
{prepare}
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
"""
_LISTED = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
optimizers = [torch.optim.AdamW(part.parameters()) for part in parts]
model, loader, {star}optimizers = accelerator.prepare(model, loader, {star}optimizers)
for x, y in loader:
    accelerator.backward(loss_fn(model(x), y))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""
_MODULE = """\
import lightning as L

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers({option})
        optimizer.zero_grad()
        self.manual_backward(self.compute_loss(batch))
        optimizer.step()
"""
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
_FACTORY = regex(r"^_?(get|make|build|create|init)_\w*optim(izer)?$|^\w*(Adam|AdamW|SGD|Adafactor|Lion)(8bit)?$")
_ADAPTERS = ("peft", "bitsandbytes", "unsloth", "loralib")


class OptimizerNotPrepared(TraceRule):
    """An optimizer steps without the framework that scaled the gradients."""

    code = "HS198"
    name = "optimizer-not-prepared"
    severity = "warning"
    reason = (
        "`accelerator.backward` and `fabric.backward` scale the loss in fp16; only an optimizer that went through `prepare` or `setup` "
        "unscales the gradients and skips the step when they overflow. A plain optimizer applies gradients that are 65536 times too "
        "large, infinite ones included. `prepare` wraps an optimizer that is passed by itself, not those in a list. Plain Adam hides the factor in its ratio but not the overflow. With DeepSpeed or FSDP the plain "
        "optimizer has parameters that are not trained. A Lightning module with manual optimization steps what `self.optimizers()` returns; "
        "the torch optimizer itself, or `self.optimizers(use_pl_optimizer=False)`, is not unscaled either."
    )
    bad = (
        _UNPREPARED.format(prepare="model, loader = accelerator.prepare(model, loader)"),
        _MODULE.format(option="use_pl_optimizer=False"),
        _LISTED.format(star=""),
        _UNPREPARED.format(
            prepare="if args.use_audio:\n    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
        ),
    )
    good = (
        _UNPREPARED.format(prepare="model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),
        _MODULE.format(option=""),
        _LISTED.format(star="*"),
    )
    references = ("https://huggingface.co/docs/accelerate/basic_tutorials/migration",)
    words = ("Accelerator", "Fabric(", "automatic_optimization")
    kinds = ("opt_step",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A step of an optimizer that this script creates and does not prepare."""
        event = trace[index]
        owner = loop_class(script, event.function.cls) if event.function.cls else None
        if owner is not None:
            return self._in_module(script, trace, index, owner.precision) if owner.base == "manual" else None
        engine = next(
            (engine_at(script, trace[i].subject, trace[i].function) for i in earlier(trace, index, "owned_backward")),
            None,
        )
        if engine is None or not engine.is_created or engine.precision not in {"fp16", "?"} or engine.plugin:
            return None
        prepared = prepared_for(script, engine.library, event)
        if engine.library == ACCELERATE and (collection := list_of(script, event)) in prepared.names:
            return self._report(
                script, event, engine, f"`prepare` leaves the list `{collection}` as it is", f"pass `*{collection}`"
            )
        if last_name(event.optimizer) in prepared.names and (condition := prepared_if(script, event, engine.name)):
            return self._report(
                script,
                event,
                engine,
                f"unless `{condition}`, nothing prepares `{event.optimizer}`",
                "prepare it in every run",
            )
        # A file that prepares nothing may leave that to another one; neither fp16 here nor a local optimizer excuses it.
        decided = prepared.is_complete and (
            prepared.names or engine.precision == "fp16" or _is_local(script, event, engine)
        )
        if not decided or last_name(event.optimizer) in prepared.names:
            return None
        values = [v for v in script.outline.values(event.optimizer, event.function) if constant(v) is not None]
        if not values or not all(_is_unprepared(script, value, engine) for value in values):
            return None
        call = "prepare" if engine.library == ACCELERATE else "setup"
        passed = [text_of(part) for site, _ in script.outline.calls.get(call, ()) for part in site.args]
        if any(text.startswith((f"{event.optimizer}.", f"{event.optimizer}[")) for text in passed):
            return None  # an object of several optimizers, which are prepared one by one
        cause = f"`{event.optimizer}` is not passed to `{engine.key}.{call}`"
        return self._report(script, event, engine, cause, f"pass `{event.optimizer}` to `{engine.key}.{call}`")

    def _report(self, script: Script, event: Event, engine: Engine, cause: str, instead: str) -> Finding:
        state = "" if engine.precision == "fp16" else "in fp16 "
        return self.finding(
            script.where(event.node),
            f"{cause}: {state}`{event.local.optimizer or event.optimizer}` steps with gradients that are still scaled",
            instead=instead,
            severity="error" if engine.precision == "fp16" else None,
        )

    def _in_module(self, script: Script, trace: Trace, index: int, precision: str) -> Finding | None:
        """A Lightning module that steps a torch optimizer, not what `self.optimizers()` returns."""
        event = trace[index]
        before = next(earlier(trace, index, "owned_backward"), None)
        if precision not in {"fp16", "?"} or before is None or trace[before].subject != "self":
            return None
        values = [b.value for b in script.outline.lookup(event.optimizer, event.function)]
        if not values or not all(_is_raw(script, value) for value in values):
            return None
        state = "" if precision == "fp16" else "with precision='16-mixed' "
        name = event.local.optimizer or event.optimizer
        return self.finding(
            script.where(event.node),
            f"`{name}` is the torch optimizer, not Lightning's: {state}it steps with gradients that are still scaled",
            instead="step what `self.optimizers()` returns",
            severity="error" if precision == "fp16" else None,
        )


def _is_local(script: Script, event: Event, engine: Engine) -> bool:
    """Whether a script with an option for fp16 prepares nothing, and no other file can."""
    if scaling_accelerator(script) is None or {"prepare", "setup"} & script.outline.calls.keys():
        return False
    return created_here(script, event, engine.key, engine.function)


def _is_raw(script: Script, value: ast.expr | None) -> bool:
    """Whether a value is an optimizer that Lightning does not wrap."""
    if not isinstance(value, ast.Call):
        return text_of(value).startswith("self.trainer.optimizers")
    raw = text_of(value.func) == "self.optimizers" and constant(argument(value, 0, "use_pl_optimizer")) is False
    return raw or _is_torch_optimizer(script, value)


def _is_unprepared(script: Script, value: ast.expr, engine: Engine) -> bool:
    """Whether a value is an optimizer of a library, also of a class that was chosen, or of a factory without the engine."""
    if not isinstance(value, ast.Call):
        return False
    if _is_torch_optimizer(script, value) or any(value is call for call, _ in script.training.optimizers):
        return True
    passed = {last_name(key_of(part)) for part in arguments_of(value)}
    is_other = script.outline.names.full(value.func).startswith("accelerate.")  # a DummyOptim
    return bool(_FACTORY.search(last_name(key_of(value.func)))) and engine.name not in passed and not is_other


def _is_torch_optimizer(script: Script, call: ast.Call) -> bool:
    full = script.outline.names.full(call.func)
    return full.startswith("torch.optim.") and not {"lr_scheduler", "swa_utils"} & set(full.split("."))


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
    engine = next((e for e in engines_of(script) if e.library == ACCELERATE and not e.plugin), None)
    return f"`{engine.key}`" if engine is not None and _accelerate_scales(script, tie.cast) else ""


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
        return all(map(is_on_gpu, conditions))
    return all(
        is_true and value is not None and text == f"{text_of(value)} == 'fp16'"
        for value in values
        for text, is_true in conditions[-1:] or ((text_of(value), False),)
    )


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


RULES: tuple[type[Rule], ...] = (OptimizerNotPrepared, HalfWeightsInFramework)
