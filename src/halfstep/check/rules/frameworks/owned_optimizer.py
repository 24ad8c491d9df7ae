"""HS198, HS199: optimizers and weights that a framework does not unscale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import TraceRule, earlier
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.engines import ACCELERATE, engine_at, engines_of, last_name, prepared_for
from halfstep.check.script.objects.values import argument, dtypes_of, text_of
from halfstep.check.script.script import Script

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
_ADAPTERS = ("peft", "bitsandbytes", "unsloth", "loralib")


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
        engine = next(
            (engine_at(script, trace[i].subject, trace[i].function) for i in earlier(trace, index, "owned_backward")),
            None,
        )
        if engine is None or not engine.is_created or engine.precision not in {"fp16", "?"} or engine.plugin:
            return None
        prepared = prepared_for(script, engine.library, event)
        # A file that prepares nothing may leave that to another one, which the fp16 of this file does not excuse.
        decided = prepared.is_complete and (prepared.names or engine.precision == "fp16")
        if not decided or last_name(event.optimizer) in prepared.names:
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
        _CAST.format(cast=".half()"),
    )
    good = (_HALF.format(dtype=""), _CAST.format(cast=""))
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


RULES: tuple[type[Rule], ...] = (OptimizerNotPrepared, HalfWeightsInFramework)
