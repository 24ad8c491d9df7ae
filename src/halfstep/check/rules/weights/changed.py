"""HS135: weights that change inside a region."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.rules.frameworks.owned_backward import entered_engine
from halfstep.check.script.flow.order import TraceRule
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.values import autocasts_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES"]

_CHANGES = {"clamp_", "clip_", "copy_", "mul_", "add_", "sub_", "div_", "lerp_", "normal_", "zero_", "fill_", "renorm_"}
_CRITIC = """\
import torch
for x in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = critic(x).mean()
{clamp}        score = critic(generator(z)).mean()
    (loss - score).backward()
"""
_SPANNING = """\
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with accelerator.autocast():
    for x, y in loader:
        accelerator.backward(loss_fn(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
"""


class WeightsChangedInsideAutocast(TraceRule):
    """Weights are changed inside an autocast region that has already cast them."""

    code = "HS135"
    name = "weights-changed-inside-autocast"
    severity = "warning"
    reason = (
        "Autocast casts each float32 weight that requires a gradient once and keeps the 16-bit copy until the region ends. A "
        "clamp, copy or other change of the weights inside the region does not reach the copies: the forward passes that follow "
        "in the region use the old weights. So does every iteration after the first where `accelerator.autocast()` or `fabric.autocast()` is "
        "around the loop with the optimizer's steps, because the region that a prepared model opens itself does not end the outer one."
    )
    bad = (
        _CRITIC.format(clamp="        for p in critic.parameters():\n            p.data.clamp_(-0.01, 0.01)\n"),
        _SPANNING,
    )
    good = (
        _CRITIC.format(clamp=""),
        _SPANNING.replace("with accelerator.autocast():\n    ", "").replace("\n        ", "\n    "),
    )
    references = (
        "https://docs.pytorch.org/docs/stable/amp.html#torch.autocast",
        "measured: torch 2.13.0 on the CPU, the loss of five steps with a nested region per forward: the same until the outer region ends",
    )
    kinds = ("opt_step",)

    def check(self, script: Script) -> Iterator[Finding]:
        """An in-place change of a parameter between two calls of its model, in one region."""
        yield from super().check(script)
        for name in sorted(_CHANGES & script.outline.calls.keys()):
            for call, function in script.outline.calls[name]:
                owner = _parameter_owner(script, call)
                region = self._region(script, call, function) if owner else None
                if region is None or not isinstance(call.func, ast.Attribute):
                    continue
                uses = [n.lineno for n in ast.walk(region) if isinstance(n, ast.Call) and key_of(n.func) == owner]
                if any(line < call.lineno for line in uses) and any(line > call.lineno for line in uses):
                    yield self.finding(
                        script.where(call),
                        f"`{name}` changes the weights of `{owner}` inside the autocast region opened at {script.at(region)}: "
                        "the 16-bit copies that autocast keeps are the old ones",
                        instead="end the region before the weights change",
                    )

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A step in a region of an engine that is opened outside the loop; HS141 reports those of torch."""
        event = trace[index]
        entered = entered_engine(script, event)
        if entered is None:
            return None
        region, engine, func = entered
        if len(event.loops) <= region.num_loops or engine.plugin == "deepspeed":
            return None
        when = "" if engine.precision in {"fp16", "bf16"} else "with fp16 or bf16 "
        return self.finding(
            script.where(event.node),
            f"`{key_of(func)}()`, opened at {script.at(func)}, spans the loop: {when}its cached 16-bit weights are stale after this step",
            instead="open it inside the loop, around what the model does not compute",
            severity="error",
        )

    @staticmethod
    def _region(script: Script, call: ast.Call, function: Function) -> ast.With | None:
        """The autocast block around a call, in its function."""
        node: ast.AST | None = call
        while node is not None and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if isinstance(node, ast.With):
                contexts = [item.context_expr for item in node.items]
                if any(a.enabled != "no" for c in contexts for a in autocasts_of(script.outline, c, function)):
                    return node
            node = script.outline.parents.get(node)
        return None


def _parameter_owner(script: Script, call: ast.Call) -> str:
    """The model in `for p in model.parameters(): p.data.clamp_()`, or in `model.weight.data.copy_()`; "" for anything else."""
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    if not isinstance(receiver, ast.Attribute) or receiver.attr != "data":
        return ""
    key = key_of(receiver.value)
    node = script.outline.parents.get(call)
    while node is not None:
        if isinstance(node, ast.For) and key_of(node.target) == key and isinstance(node.iter, ast.Call):
            func = node.iter.func
            is_parameters = isinstance(func, ast.Attribute) and func.attr == "parameters"
            return key_of(func.value) if is_parameters and isinstance(func, ast.Attribute) else ""
        node = script.outline.parents.get(node)
    return key.split(".")[0] if key.count(".") == 1 and key.endswith((".weight", ".bias")) else ""


RULES: tuple[type[Rule], ...] = (WeightsChangedInsideAutocast,)
