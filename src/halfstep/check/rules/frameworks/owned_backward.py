"""HS185, HS187: backward passes in loops that a framework owns."""

from __future__ import annotations

import ast

from halfstep.check.finding import Finding, Severity
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event, Region
from halfstep.check.script.flow.order import TraceRule, later
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.engines import (
    ACCELERATE,
    FABRIC,
    Engine,
    LoopClass,
    engine_at,
    engines_of,
    has_alternative,
    loop_class,
)
from halfstep.check.script.objects.expressions import options_of
from halfstep.check.script.scaling.prepared import prepared_for
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["RULES", "entered_engine"]

_ACCELERATE = """\
from accelerate import Accelerator

accelerator = Accelerator({options})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    {backward}
    optimizer.step()
"""
_FABRIC = """\
from lightning import Fabric

fabric = Fabric(precision="16-mixed")
model, optimizer = fabric.setup(model, optimizer)
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    {backward}
    optimizer.step()
"""
_MANUAL = """\
import lightning as L

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.compute_loss(batch)
        {backward}
        optimizer.step()
"""
_AUTOMATIC = """\
import lightning as L

class Net(L.LightningModule):
    def training_step(self, batch, batch_idx):
        loss = self.compute_loss(batch)
{backward}        return loss
"""
_TRAINER = """\
from transformers import Trainer

class WeightedTrainer(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        {backward}
        return loss.detach()
"""
_INSIDE = """\
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    with accelerator.autocast():
        loss = loss_fn(model(x), y)
{indent}    accelerator.backward(loss)
    optimizer.step()
"""
_INHERITED = """\
from base import Base

class Loop(Base):
    def fit(self, loader):
        for batch in loader:
            with self.accelerator.accumulate(self.net):
                loss = self.loss(batch)
                {backward}
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.accelerator.wait_for_everyone()
"""
_ACCELERATE_DOCS = "https://huggingface.co/docs/accelerate/package_reference/accelerator"


class BareBackwardInFramework(TraceRule):
    """`loss.backward()` bypasses the framework that steps the optimizer."""

    code = "HS185"
    name = "bare-backward-in-framework"
    severity = "warning"
    reason = (
        "Accelerate, Fabric, Lightning and the Trainer of transformers scale the loss in their own backward and unscale the gradients "
        "when the optimizer steps. In fp16 a bare `loss.backward()` skips the scaling: the step raises 'AssertionError: Attempted step "
        "but _scale is None', or, if another loss was scaled, divides these gradients by 65536. `accelerator.backward` also divides by "
        "gradient_accumulation_steps, and with DeepSpeed it is the only call that steps the engine. Fabric 2.3 and later raises "
        "RuntimeError in every mixed precision. A Lightning module with automatic optimization runs backward itself on the loss that "
        "`training_step` returns; a second backward raises."
    )
    bad = (
        _ACCELERATE.format(options='mixed_precision="fp16"', backward="loss.backward()"),
        _ACCELERATE.format(options="", backward="loss.backward()"),
        _FABRIC.format(backward="loss.backward()"),
        _MANUAL.format(backward="loss.backward()"),
        _AUTOMATIC.format(backward="        loss.backward()\n"),
        _TRAINER.format(backward="loss.backward()"),
        _INHERITED.format(backward="loss.backward()"),
    )
    good = (
        _ACCELERATE.format(options='mixed_precision="fp16"', backward="accelerator.backward(loss)"),
        _ACCELERATE.format(options="", backward="accelerator.backward(loss)"),
        _FABRIC.format(backward="fabric.backward(loss)"),
        _MANUAL.format(backward="self.manual_backward(loss)"),
        _AUTOMATIC.format(backward=""),
        _TRAINER.format(backward="self.accelerator.backward(loss)"),
        _INHERITED.format(backward="self.accelerator.backward(loss)"),
    )
    references = (
        _ACCELERATE_DOCS,
        "https://github.com/starrytong/SCNet/issues/7",
        "https://github.com/Lightning-AI/pytorch-lightning/pull/19447",
        "https://lightning.ai/docs/pytorch/stable/model/manual_optimization.html",
        "measured: source code of accelerate 1.15.0 and lightning 2.6.6",
    )
    words = ("Accelerator", "Fabric(", "LightningModule", "def training_step", "accelerator.accumulate")
    kinds = ("backward",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A backward without a loss scale whose gradients a framework's optimizer uses."""
        event = trace[index]
        if event.scaled != "no" or has_alternative(trace, event):
            return None
        owner = loop_class(script, event.function.cls) if event.function.cls else None
        own = [e for e in engines_of(script) if e.function is not None and e.function.cls == event.function.cls]
        if owner is not None and not (owner.base == "trainer" and own):
            return self._in_class(script, trace, index, owner)
        engine = _stepping_engine(script, trace, index)
        # In full precision and without a strategy of its own, `fabric.backward` is the plain backward.
        is_plain = engine is not None and engine.precision in {"fp32", "half"} and engine.plugin != "deepspeed"
        if engine is None or (engine.library == FABRIC and is_plain):
            return None
        return self._with_engine(script, event, engine)

    def _with_engine(self, script: Script, event: Event, engine: Engine) -> Finding:
        loss, key = _loss(event), engine.key
        severity: Severity = "advice" if engine.precision in {"fp32", "half"} else "warning"
        if engine.plugin == "deepspeed" and engine.library == ACCELERATE:
            effect, severity = "DeepSpeed's engine never steps", "error"
        elif engine.library == ACCELERATE and engine.precision == "fp16":
            effect, severity = f"the loss is not scaled, but the step unscales with the scaler of `{key}`", "error"
        elif engine.library == FABRIC and (engine.precision in {"fp16", "bf16"} or engine.plugin == "deepspeed"):
            effect, severity = "Fabric raises RuntimeError in mixed precision and with DeepSpeed", "error"
        elif engine.library == FABRIC and engine.precision == "not fp16":
            effect = "Fabric raises RuntimeError in mixed precision"
        elif engine.library == FABRIC:
            effect = "in fp16 the loss is not scaled, and a strategy with its own backward is skipped"
        elif engine.precision == "?":
            effect = "in fp16 the loss is not scaled, with DeepSpeed nothing steps, and accumulation does not divide it"
        else:
            effect = "with DeepSpeed nothing steps, and the loss is not divided by gradient_accumulation_steps"
        return self.finding(
            script.where(event.node),
            f"`{f'({loss})' if ' ' in loss else loss}.backward()` bypasses `{key}`: {effect}",
            instead=f"{key}.backward({loss})",
            severity=severity,
        )

    def _in_class(self, script: Script, trace: Trace, index: int, owner: LoopClass) -> Finding | None:
        event = trace[index]
        loss, method = _loss(event), event.function.name
        where = script.where(event.node)
        if owner.base == "automatic":
            if method != "training_step" or not _returns(event, loss):
                return None
            message = f"Lightning runs backward on the `{loss}` that `training_step` returns; this call is a second one"
            return self.finding(where, message, instead="remove it, or set automatic_optimization", severity="error")
        if owner.base == "trainer":
            if method not in {"training_step", "compute_loss"} or owner.precision == "not fp16":
                return None  # the Trainer has no scaler to bypass
            severity: Severity = "error" if owner.precision == "fp16" else "warning"
            state = "" if owner.precision == "fp16" else "with fp16=True "
            message = f"`{loss}.backward()` bypasses the Trainer's accelerator: {state}the loss is not scaled"
            return self.finding(where, message, instead=f"self.accelerator.backward({loss})", severity=severity)
        if owner.base != "manual" or method == "backward" or next(later(trace, index, "opt_step"), None) is None:
            return None
        severity = {"fp16": "error", "?": "warning"}.get(owner.precision, "advice")  # type: ignore[assignment]
        state = "" if owner.precision == "fp16" else "with precision='16-mixed' "
        message = f"`{loss}.backward()` bypasses Lightning: {state}the loss is not scaled, but the step unscales"
        return self.finding(where, message, instead=f"self.manual_backward({loss})", severity=severity)


def _loss(event: Event) -> str:
    """The loss of a backward as the line has it; "loss" for a long expression."""
    func = event.node.func if isinstance(event.node, ast.Call) else None
    text = ast.unparse(func.value) if isinstance(func, ast.Attribute) else ""
    return text if text and len(text) <= 40 and not text.startswith("torch.") else "loss"


def _stepping_engine(script: Script, trace: Trace, index: int) -> Engine | None:
    """The Accelerator or Fabric whose optimizer steps after a backward."""
    event = trace[index]
    steps = [trace[i] for i in later(trace, index, "opt_step")]
    for engine in engines_of(script):
        prepared = prepared_for(script, engine.library, event).names
        if any(last_name(step.optimizer) in prepared for step in steps):
            return engine_at(script, engine.key, event.function)
        # Everything is prepared in another file: a training function that is passed the engine and uses it.
        passed = engine.key in event.function.params and any(
            isinstance(n, ast.Attribute) and key_of(n.value) == engine.key for n in ast.walk(event.function.node)
        )
        if not prepared and passed and any(step.optimizer in event.function.params for step in steps):
            return engine
        if not prepared and steps and _is_accumulated(event, engine):
            return engine
    return None


def _is_accumulated(event: Event, engine: Engine) -> bool:
    """Whether a backward is in the `accumulate` block of an engine that a base class or another file creates."""
    entered = [key_of(r.node.func) for r in event.regions if isinstance(r.node, ast.Call)]
    owners = [last_name(key.removesuffix(".accumulate")) for key in entered if key.endswith(".accumulate")]
    return not engine.is_created and engine.name in owners


def _returns(event: Event, loss: str) -> bool:
    """Whether the function of an event returns the loss, alone or in a dictionary."""
    for node in ast.walk(event.function.node):
        if isinstance(node, ast.Return) and node.value is not None:
            values = node.value.values if isinstance(node.value, ast.Dict) else [node.value]
            if any(key_of(value) == loss for value in values):
                return True
    return False


def entered_engine(script: Script, event: Event) -> tuple[Region, Engine, ast.expr] | None:
    """The region around an event that an engine opens in 16 bits, with the engine and the function that is called for it."""
    region = event.inside("owned")
    func = region.node.func if region is not None and isinstance(region.node, ast.Call) else None
    if region is None or func is None:
        return None
    values = script.outline.values(key_of(func), event.function)  # `self.autocast = self.accelerator.autocast`
    options = [func, *(option for value in values for option in options_of(value))]
    owners = [key_of(o.value) for o in options if isinstance(o, ast.Attribute) and o.attr == "autocast"]
    engine = next((e for key in owners if (e := engine_at(script, key, event.function)) is not None), None)
    return (region, engine, func) if engine is not None and engine.precision not in {"fp32", "half"} else None


class BackwardInsideOwnedAutocast(TraceRule):
    """Backward or the optimizer's step runs inside `accelerator.autocast()` or `fabric.autocast()`."""

    code = "HS187"
    name = "backward-inside-owned-autocast"
    severity = "warning"
    reason = (
        "The context is torch's autocast with the framework's precision. Backward already runs each operation in the dtype that "
        "autocast chose for its forward; inside the region custom functions and gradient hooks compute in 16 bits, and the cached "
        "weight casts stay in memory longer. PyTorch's documentation advises against it. The prepared model already runs its forward "
        "under autocast; the context is needed only for what is computed outside the model, such as the loss."
    )
    bad = (_INSIDE.format(indent="    "),)
    good = (_INSIDE.format(indent=""),)
    references = (
        "https://docs.pytorch.org/docs/stable/amp.html#torch.autocast",
        _ACCELERATE_DOCS + "#accelerate.Accelerator.autocast",
    )
    words = ("Accelerator", "Fabric(")
    kinds = ("owned_backward", "opt_step")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An engine's backward in its own region, or a step there if backward is outside."""
        event = trace[index]
        entered = entered_engine(script, event)
        if entered is None:
            return None
        region, _, func = entered
        around = [e.inside("owned") for e in trace if "backward" in e.kind] if event.kind == "opt_step" else []
        if any(other is not None and other.node is region.node for other in around):
            return None
        what = "backward" if event.kind == "owned_backward" else f"`{event.optimizer}.step()`"
        return self.finding(
            script.where(event.node),
            f"{what} runs inside `{key_of(func)}()`, opened at {script.at(func)}",
            instead="end the `with` block after the loss",
        )


RULES: tuple[type[Rule], ...] = (BareBackwardInFramework, BackwardInsideOwnedAutocast)
