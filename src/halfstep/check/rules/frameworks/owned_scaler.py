"""HS288: a GradScaler next to the scaler of a framework."""

from __future__ import annotations

from halfstep.check.finding import Finding, Severity
from halfstep.check.rule import Rule
from halfstep.check.script.flow.order import TraceRule
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.engines import ACCELERATE, Engine, engine_at, engines_of, last_name, prepared_for
from halfstep.check.script.objects.values import argument
from halfstep.check.script.script import Script

__all__ = ["RULES"]

_ACCELERATE = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
{create}for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    {backward}
    {step}
"""
_WRONG = {
    "create": 'scaler = torch.amp.GradScaler("cuda")\n',
    "backward": "scaler.scale(loss).backward()",
    "step": "scaler.step(optimizer)\n    scaler.update()",
}
_RIGHT = {"create": "", "backward": "accelerator.backward(loss)", "step": "optimizer.step()"}


class ScalerNextToFramework(TraceRule):
    """A GradScaler steps an optimizer that a framework with its own scaler prepared."""

    code = "HS288"
    name = "scaler-next-to-framework"
    severity = "warning"
    reason = (
        "In fp16 an Accelerator and a Fabric have their own scaler, and the optimizer that `prepare` or `setup` returns steps with it. "
        "A second GradScaler unscales the gradients and then calls that step, which unscales again: it raises 'AssertionError: "
        "Attempted step but _scale is None', or divides by both scales if the loss also went through the framework's backward. With "
        "DeepSpeed the engine runs backward and step itself, so a GradScaler trains nothing."
    )
    bad = (_ACCELERATE.format(**_WRONG),)
    good = (_ACCELERATE.format(**_RIGHT),)
    references = (
        "https://huggingface.co/docs/accelerate/basic_tutorials/migration",
        "https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling",
        "measured: source code of accelerate 1.15.0 and lightning 2.6.6",
    )
    words = ("Accelerator", "Fabric(")
    kinds = ("scaler_step",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """`scaler.step(optimizer)` of a GradScaler that may be enabled, where `optimizer` was prepared."""
        event = trace[index]
        scalers = script.scalers_named(event.scaler)
        if not scalers or all(scaler.enabled == "no" for scaler in scalers):
            return None
        engine = next(
            (
                engine_at(script, engine.key, event.function)
                for engine in engines_of(script)
                if last_name(event.optimizer) in prepared_for(script, engine.library, event).names
            ),
            None,
        )
        severity, effect = _effect(script, engine) if engine is not None else (None, "")
        if engine is None or severity is None:
            return None
        scaler, optimizer = event.local.scaler or event.scaler, event.local.optimizer or event.optimizer
        return self.finding(
            script.where(event.node),
            f"`{engine.key}` prepared `{optimizer}`, which `{scaler}` steps: {effect}",
            instead=f"{engine.key}.backward(loss) and {optimizer}.step(), without a GradScaler",
            severity=severity,
        )


def _effect(script: Script, engine: Engine) -> tuple[Severity | None, str]:
    """What a second scaler does to an engine, and how bad that is; None if the engine never scales."""
    raises = "the step unscales again with the scaler of the framework and raises AssertionError"
    if engine.plugin == "deepspeed":
        return "error", "DeepSpeed's engine runs neither backward nor step"
    if engine.precision == "fp16":
        return "error", raises
    if engine.precision != "?":
        return None, ""
    calls = [site.call for name in ("Accelerator", "Fabric") for site in script.outline.calls.get(name, ())]
    option = "mixed_precision" if engine.library == ACCELERATE else "precision"
    is_set = any(argument(call, None, option) is not None for call in calls)
    return ("warning" if is_set else "advice"), f"in fp16 {raises}"


RULES: tuple[type[Rule], ...] = (ScalerNextToFramework,)
