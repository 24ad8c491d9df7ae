"""HS186, HS189, HS198, HS199: gradients and optimizers in loops that a framework owns."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding, Severity
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.engines import (
    ACCELERATE,
    Engine,
    engine_at,
    engines_of,
    last_name,
    loop_class,
    prepared_for,
)
from halfstep.check.script.event import Event
from halfstep.check.script.names import key_of
from halfstep.check.script.order import TraceRule, earlier
from halfstep.check.script.script import Script
from halfstep.check.script.trace import Trace
from halfstep.check.script.values import argument, constant, dtypes_of, text_of

__all__ = ["RULES"]

_ACCELERATE = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator({options})
{before}model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    accelerator.backward(loss)
{clip}    optimizer.step()
"""
_FABRIC = """\
import torch
from lightning import Fabric

fabric = Fabric(precision="16-mixed")
model, optimizer = fabric.setup(model, optimizer)
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    fabric.backward(loss)
    {clip}
    optimizer.step()
"""
_MANUAL = """\
import lightning as L
import torch

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.compute_loss(batch))
{clip}        optimizer.step()
{hook}
trainer = L.Trainer(precision="16-mixed")
"""
_CLIP = "torch.nn.utils.clip_grad_norm_({}.parameters(), 1.0)"
_HOOK = f"\n    def on_before_optimizer_step(self, optimizer):\n        {_CLIP.format('self')}\n"
_ACCUMULATE = """\
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = loss_fn(model(x), y)
        accelerator.backward(loss)
{clip}
        optimizer.step()
        optimizer.zero_grad()
"""
_OWN_CLIP = "accelerator.clip_grad_norm_(model.parameters(), 1.0)"
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
_DOCS = "https://huggingface.co/docs/accelerate/package_reference/accelerator#accelerate.Accelerator.clip_grad_norm_"
_ADAPTERS = ("peft", "bitsandbytes", "unsloth", "loralib")


def _backward_engine(script: Script, trace: Trace, index: int) -> Engine | None:
    """The Accelerator or Fabric whose backward wrote the gradients at this point."""
    for i in earlier(trace, index, "owned_backward"):
        return engine_at(script, trace[i].subject)
    return None


class ClipBehindFramework(TraceRule):
    """Gradients that a framework scaled or sharded are clipped before it has unscaled them."""

    code = "HS186"
    name = "clip-behind-framework"
    severity = "warning"
    reason = (
        "After `accelerator.backward` or `fabric.backward` in fp16 the gradients are multiplied by the loss scale (65536 at first), and "
        "only the framework's own call unscales them before it clips: torch's `clip_grad_norm_` at 1.0 clips the true gradient at "
        "1/65536, so nearly every step has the same tiny norm. With FSDP each rank sees the norm of its own shard. In a Lightning "
        "module with manual optimization the gradients are unscaled inside `optimizer.step()`, right before the hook "
        "`on_before_optimizer_step`; both torch's call and `self.clip_gradients` come too early in `training_step`."
    )
    bad = (
        _ACCELERATE.format(options='mixed_precision="fp16"', before="", clip=f"    {_CLIP.format('model')}\n"),
        _ACCELERATE.format(options="", before="", clip=f"    {_CLIP.format('model')}\n"),
        _FABRIC.format(clip=_CLIP.format("model")),
        _MANUAL.format(clip=f"        {_CLIP.format('self')}\n", hook=""),
        _MANUAL.format(clip="        self.clip_gradients(optimizer, gradient_clip_val=1.0)\n", hook=""),
    )
    good = (
        _ACCELERATE.format(options='mixed_precision="fp16"', before="", clip=f"    {_OWN_CLIP}\n"),
        _ACCELERATE.format(options="", before="", clip=f"    {_OWN_CLIP}\n"),
        _FABRIC.format(clip="fabric.clip_gradients(model, optimizer, max_norm=1.0)"),
        _MANUAL.format(clip="", hook=_HOOK),
    )
    references = (
        _DOCS,
        "https://lightning.ai/docs/fabric/stable/api/fabric_methods.html#clip-gradients",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/18089",
        "measured: source code of accelerate 1.15.0 and lightning 2.6.6",
    )
    words = ("Accelerator", "Fabric(", "automatic_optimization")
    kinds = ("clip", "owned_clip")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """torch's clipping after a framework's backward, before the framework has unscaled."""
        event = trace[index]
        call = event.node
        if not isinstance(call, ast.Call) or constant(argument(call, 1, "max_norm")) is None:
            return None
        if script.outline.calls.keys() & {"unscale_gradients", "unscale_"}:
            return None
        is_torch = script.outline.names.full(call.func).startswith("torch.nn.utils.")
        owner = loop_class(script, event.function.cls) if event.function.cls else None
        if owner is not None and owner.base == "manual":
            return self._in_manual(script, trace, index, owner.precision, is_torch=is_torch)
        engine = _backward_engine(script, trace, index) if is_torch and owner is None else None
        if engine is None:
            return None
        plugin = {"fsdp": "sharded by FSDP", "deepspeed": "sharded by DeepSpeed"}.get(engine.plugin, "")
        severity: Severity = "error" if engine.precision == "fp16" else "warning"
        if engine.precision == "fp16":
            state = f"still multiplied by the loss scale of `{engine.key}`"
        elif engine.precision == "?":
            state = plugin or "still multiplied by the loss scale in fp16, and sharded with FSDP"
        elif plugin:
            state = plugin
        elif engine.library == ACCELERATE:
            state, severity = "sharded if `accelerate launch` uses FSDP or DeepSpeed", "advice"
        else:
            return None
        own = (
            "clip_grad_norm_(...)" if engine.library == ACCELERATE else "clip_gradients(model, optimizer, max_norm=...)"
        )
        return self.finding(
            script.where(call),
            f"these gradients are {state}; torch's `{last_name(text_of(call.func))}` clips them as they are",
            instead=f"{engine.key}.{own}",
            severity=severity,
        )

    def _in_manual(self, script: Script, trace: Trace, index: int, precision: str, *, is_torch: bool) -> Finding | None:
        event = trace[index]
        before = next(earlier(trace, index, "owned_backward"), None)
        if before is None or trace[before].subject != "self" or precision not in {"fp16", "?"}:
            return None
        if not is_torch and precision != "fp16":
            return None
        if event.function.name in {"on_before_optimizer_step", "configure_gradient_clipping"}:
            return None
        state = "" if precision == "fp16" else "with precision='16-mixed' "
        return self.finding(
            script.where(event.node),
            f"{state}the gradients are still multiplied by the loss scale here; Lightning unscales inside `step()`",
            instead="clip in `on_before_optimizer_step`",
            severity="error" if precision == "fp16" else None,
        )


class ClipEveryMicroBatch(TraceRule):
    """Accelerate's clipping runs on every micro-batch of an accumulation window."""

    code = "HS189"
    name = "clip-every-micro-batch"
    severity = "warning"
    reason = (
        "Inside `accelerator.accumulate` every micro-batch runs the body, and only the optimizer's step waits for the last one. "
        "`accelerator.clip_grad_norm_` unscales first, so in fp16 its second call raises 'unscale_() has already been called on this "
        "optimizer since the last update()'; in other precisions it clips incomplete sums, which gives early micro-batches more weight. "
        "Guard it with `if accelerator.sync_gradients`."
    )
    bad = (_ACCUMULATE.format(clip=f"        {_OWN_CLIP}"),)
    good = (_ACCUMULATE.format(clip=f"        if accelerator.sync_gradients:\n            {_OWN_CLIP}"),)
    references = ("https://github.com/huggingface/accelerate/issues/641", _DOCS)
    words = ("Accelerator",)
    kinds = ("owned_clip",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A clip inside accumulate() that is not limited to the end of the window."""
        event = trace[index]
        func = event.node.func if isinstance(event.node, ast.Call) else None
        if not isinstance(func, ast.Attribute) or not func.attr.startswith("clip_grad_"):
            return None
        engine = engine_at(script, key_of(func.value))
        inside = any(".accumulate(" in text_of(region.node) for region in event.regions)
        if engine is None or engine.library != ACCELERATE or not inside:
            return None
        if event.accumulating or any("sync" in text for text, _ in event.guards) or engine.plugin == "deepspeed":
            return None
        steps = constant(engine.steps) if engine.steps is not None else None
        if steps in {None, 1}:
            return None  # without accumulation every micro-batch is the last one
        condition = "" if isinstance(steps, int) else f"if `{text_of(engine.steps)}` is above 1, "
        effect = "raises in fp16 and clips incomplete sums otherwise"
        severity: Severity = "warning"
        if engine.precision == "fp16":
            effect, severity = "raises RuntimeError on the second one", "warning" if condition else "error"
        elif engine.precision in {"bf16", "fp32"}:
            effect, severity = "clips incomplete sums", "advice" if condition else "warning"
        return self.finding(
            script.where(event.node),
            f"{condition}this clips on every micro-batch inside `accumulate`, which {effect}",
            instead=f"if {engine.key}.sync_gradients: {engine.key}.{func.attr}(...)",
            severity=severity,
        )


class OptimizerNotPrepared(TraceRule):
    """An optimizer steps without the framework that scaled the gradients."""

    code = "HS198"
    name = "optimizer-not-prepared"
    severity = "warning"
    reason = (
        "`accelerator.backward` and `fabric.backward` scale the loss in fp16; only an optimizer that went through `prepare` or `setup` "
        "unscales the gradients and skips the step when they overflow. A plain optimizer applies gradients that are 65536 times too "
        "large, infinite ones included. Plain Adam hides the factor in its ratio but not the overflow. With DeepSpeed or FSDP the plain "
        "optimizer has parameters that are not trained."
    )
    bad = (_UNPREPARED.format(prepare="model, loader = accelerator.prepare(model, loader)"),)
    good = (_UNPREPARED.format(prepare="model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"),)
    references = ("https://huggingface.co/docs/accelerate/basic_tutorials/migration",)
    words = ("Accelerator", "Fabric(")
    kinds = ("opt_step",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A step of an optimizer that this script creates and does not prepare."""
        event = trace[index]
        engine = _backward_engine(script, trace, index)
        if engine is None or not engine.is_created or engine.precision not in {"fp16", "?"} or engine.plugin:
            return None
        prepared = prepared_for(script, engine.library, event)
        if not prepared.is_complete or not prepared.names or last_name(event.optimizer) in prepared.names:
            return None
        values = script.outline.values(event.optimizer, event.function)
        made = [v for v in values if isinstance(v, ast.Call) and _is_torch_optimizer(script, v)]
        if not made or len(made) != len(values):
            return None
        call = "prepare" if engine.library == ACCELERATE else "setup"
        state = "" if engine.precision == "fp16" else "in fp16 "
        return self.finding(
            script.where(event.node),
            f"`{event.optimizer}` is not passed to `{engine.key}.{call}`: {state}it steps with gradients that are still scaled",
            instead=f"pass `{event.optimizer}` to `{engine.key}.{call}`",
            severity="error" if engine.precision == "fp16" else None,
        )


def _is_torch_optimizer(script: Script, call: ast.Call) -> bool:
    full = script.outline.names.full(call.func)
    return full.startswith("torch.optim.") and "lr_scheduler" not in full


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
        _ACCELERATE.format(
            options='mixed_precision="fp16"',
            before="model = Net().half()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
            clip="",
        ),
    )
    good = (
        _HALF.format(dtype=""),
        _ACCELERATE.format(
            options='mixed_precision="fp16"',
            before="model = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
            clip="",
        ),
    )
    references = (
        "https://github.com/huggingface/accelerate/issues/1778",
        "https://github.com/huggingface/diffusers/issues/1246",
    )
    words = ("Accelerator", "Fabric(")

    def check(self, script: Script) -> Iterator[Finding]:
        """float16 models whose parameters a prepared optimizer trains in fp16."""
        # `_unscale_grads_` is what scripts replace to let the scaler accept float16 gradients.
        patched = "_unscale_grads_" in script.source.text or "patch_accelerator" in script.source.text
        if patched or script.outline.names.uses(*_ADAPTERS) or "requires_grad_" in script.outline.calls:
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
        reported: set[ast.AST] = set()
        for model, node in _half_models(script):
            if model in trained and node not in reported:
                reported.add(node)
                yield self.finding(
                    script.where(node),
                    f"`{model}` has float16 weights, so the scaler of `{engines[0].key}` raises ValueError: Attempting "
                    "to unscale FP16 gradients",
                    instead=f"keep `{model}` in float32; `{engines[0].key}` runs it under autocast",
                )


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


RULES: tuple[type[Rule], ...] = (ClipBehindFramework, ClipEveryMicroBatch, OptimizerNotPrepared, HalfWeightsInFramework)
