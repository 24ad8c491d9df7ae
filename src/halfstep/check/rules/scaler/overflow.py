"""HS175: a run that ends at the first overflow, which the scaler is there to skip."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.rules.scaler.bf16 import ScalerWithBf16
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import TraceRule, earlier, scalers_at, switched_off, without_amp
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.engines import (
    ACCELERATE,
    engine_at,
    lightning_methods,
    scaling_accelerator,
    trains_in_fp16,
)
from halfstep.check.script.objects.values import argument
from halfstep.check.script.scaling.finite_tests import raising
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES"]

_LOOP = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0{strict})
{test}    scaler.step(optimizer)
    scaler.update()
"""
_OWNED = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="{precision}")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(loss_fn(model(x), y))
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
{test}    optimizer.step()
"""
_CALLBACK = """\
import torch
from lightning import Callback, Trainer

class StopAtNan(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        for name, weight in module.named_parameters():
            if {tested}:
                raise RuntimeError(name)

Trainer(precision="16-mixed", gradient_clip_val=1.0, callbacks=[StopAtNan()]).fit(module, data)
"""
_PARTS = """\
import torch

def check(value):
    if not torch.isfinite(value).all():
        raise FloatingPointError("not finite")

def update(actor, gain, penalty, scaler):
    params = list(actor.parameters())
    g = torch.autograd.grad(scaler.scale(gain), params, retain_graph=True)
    h = torch.autograd.grad(scaler.scale(penalty), params)
    norm = sum(x.norm() ** 2 for x in g)
{test}    for p, x, y in zip(params, g, h):
        p.grad = x + y
"""
_RAISE = "    if not torch.isfinite(norm):\n        raise RuntimeError('gradient norm is not finite')\n"
_REDUCED = """\
    bad = not torch.isfinite(norm)
    flag = torch.tensor(1 if bad else 0, device="cuda")
    torch.distributed.all_reduce(flag)
    if flag.item() > 0:
        raise RuntimeError('gradient norm is not finite')
"""
_COLLECTED = """\
    broken = []
    for name, weight in model.named_parameters():
        if weight.grad is not None and not torch.isfinite(weight.grad).all():
            broken.append(name)
    if broken:
        sys.exit(f"gradients of {broken} are not finite")
"""
_CAUGHT = """\
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError:
        print("overflow")
"""
# The hooks of Lightning between a backward and the next `zero_grad`.
_HOOKS = {"on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "configure_gradient_clipping"}
_INSTEAD = "remove the test, or count the skipped steps and raise only after many in a row"


class OverflowRaises(TraceRule):
    """A gradient that overflows ends the run, although the scaler would skip its step."""

    code = "HS175"
    name = "overflow-raises"
    severity = "error"
    reason = (
        "A dynamic loss scale is found by overflowing: it starts at 65536 and doubles after 2000 steps without inf, so gradients that are "
        "inf or NaN after `unscale_` are normal in float16. `scaler.step` skips such a step and `update` halves the scale. A test that "
        "raises between the two or, for the norm measured there, below them, or `clip_grad_norm_(..., error_if_nonfinite=True)`, ends the run "
        "instead, often in its first step. The scalers of Accelerate and "
        "Lightning work in the same way; a hook of Lightning sees the gradients of a skipped step too."
    )
    bad = (
        _PARTS.format(test="    check(norm)\n"),
        _LOOP.format(strict="", test=_RAISE),
        _LOOP.format(strict=", error_if_nonfinite=True", test=""),
        _LOOP.format(strict="", test="    assert torch.isfinite(norm), 'gradient norm is not finite'\n"),
        _LOOP.format(strict="", test=_REDUCED),
        _LOOP.format(strict="", test=_COLLECTED),
        _LOOP.format(strict="", test=_CAUGHT.replace('print("overflow")', "raise")),
        _OWNED.format(precision="fp16", test=_RAISE),
        _OWNED.format(precision="fp16", test=_RAISE).replace(
            "norm = accelerator.clip", "accelerator.unscale_gradients(optimizer)\n    norm = torch.nn.utils.clip"
        ),
        _CALLBACK.format(tested="weight.grad is not None and torch.isnan(weight.grad).any()"),
    )
    good = (
        _PARTS.format(test=""),
        _LOOP.format(strict="", test=""),
        _LOOP.format(strict="", test=_RAISE.replace("norm):", "loss):")),
        _LOOP.format(strict="", test=_RAISE.replace("norm):", "norm) and num_skipped > 50:")),
        _LOOP.format(strict="", test=_REDUCED.replace("isfinite(norm)", "isfinite(loss)")),
        _LOOP.format(strict="", test=_COLLECTED.replace("if broken:", "if len(broken) == max_broken:")),
        _LOOP.format(strict="", test=_COLLECTED.replace("sys.exit", "print")),
        _LOOP.format(strict="", test=_CAUGHT),
        _OWNED.format(precision="bf16", test=_RAISE),
        _CALLBACK.format(tested="torch.isnan(weight).any()"),
    )
    references = (
        "https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler.step",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html",
    )
    words = ("Accelerator", "on_train_batch_end", "on_after_backward")
    kinds = ("unscale", "owned_clip", "owned_unscale", "autograd_grad")

    def check(self, script: Script) -> Iterator[Finding]:
        """Every event of the traces, and the hooks that Lightning runs while there are gradients."""
        yield from super().check(script)
        if "ightning" not in script.source.text or not trains_in_fp16(script):
            return
        places = {p: f.name for f in lightning_methods(script) if f.name in _HOOKS for _, p in raising(script, f)}
        for place, hook in places.items():
            yield self.finding(
                script.where(place),
                f"this ends the run when a float16 gradient overflows: `{hook}` also runs for the steps that Lightning's scaler skips",
                instead=_INSTEAD,
            )

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An unscale_ after which the same function raises for gradients that are not finite, before the step."""
        event = trace[index]
        if event.kind == "autograd_grad":
            return self._computed(script, trace, index)
        if event.kind != "unscale":
            return self._owned(script, trace, index)
        if (
            without_amp(event)
            or switched_off(script, event)
            or not any(True for _ in earlier(trace, index, "backward"))
        ):
            return None
        if event.scaler.rsplit(".", 1)[-1] in {s.key.rsplit(".", 1)[-1] for s in ScalerWithBf16.idle(script)}:
            return None  # bfloat16 does not overflow; HS120
        place = self._between(script, trace, index)
        if place is None:
            return None
        name = event.local.scaler
        return self.finding(
            script.where(place),
            f"this ends the run when a float16 gradient overflows; `{name}.step` skips such a step and `{name}.update()` lowers the scale",
            instead=_INSTEAD,
            severity=None if _is_float16(script) and _is_default(script, event) else "warning",
        )

    def _computed(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The same after `torch.autograd.grad(scaler.scale(loss), ...)`, in its function."""
        event, inside = trace[index], set(ast.walk(trace[index].node))
        scale = next((trace[i] for i in earlier(trace, index, "scale") if trace[i].node in inside), None)
        if scale is None or without_amp(event) or switched_off(script, scale):
            return None
        if scale.scaler.rsplit(".", 1)[-1] in {s.key.rsplit(".", 1)[-1] for s in ScalerWithBf16.idle(script)}:
            return None
        ends = [e.node for e in trace[index:] if e.kind == "scaler_step" and e.function is event.function]
        start, end = (getattr(n, "lineno", 0) for n in (event.node, ends[0] if ends else ast.Pass()))
        places = [(n, at) for n, at in raising(script, event.function) if n > start and (n < end or not ends)]
        if not places:
            return None
        return self.finding(
            script.where(min(places, key=lambda item: item[0])[1]),
            f"this ends the run when a gradient that `{scale.local.scaler}` multiplies by its scale overflows; "
            f"`{scale.local.scaler}.step` skips such a step and `update()` lowers the scale",
            instead=_INSTEAD,
            severity="warning",
        )

    def _owned(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The same after the clip of Accelerate, which unscales, or its `unscale_gradients`."""
        event = trace[index]
        func = event.node.func if isinstance(event.node, ast.Call) else None
        key = key_of(func.value) if isinstance(func, ast.Attribute) else ""
        engine, scaling = engine_at(script, key, event.function), scaling_accelerator(script)
        if engine is None or engine.library != ACCELERATE or scaling is None:
            return None
        place = self._between(script, trace, index)
        if place is None:
            return None
        condition = "" if engine.precision == "fp16" else "with mixed_precision='fp16' "
        return self.finding(
            script.where(place),
            f"{condition}this ends the run when a gradient overflows; the prepared optimizer skips such a step and lowers the scale",
            instead=_INSTEAD,
            severity="warning" if condition else None,
        )

    @staticmethod
    def _between(script: Script, trace: Trace, index: int) -> ast.AST | None:
        """What raises between an unscale_ and the step, in its function or in one of its callers."""
        event = trace[index]
        ends = {"scaler_step", "update"} if event.kind == "unscale" else {"opt_step"}
        for depth in range(len(event.roots), -1, -1):
            after = [e for e in trace[index + 1 :] if e.kind in ends and len(e.roots) >= depth]
            after = [e for e in after if e.roots[:depth] == event.roots[:depth]]
            function = _function_at(script, event, depth)
            if not after or function is None or after[0].loops != event.loops:
                continue
            start, end = (getattr((*e.roots, e.node)[depth], "lineno", 0) for e in (event, after[0]))
            raised = list(raising(script, function))
            places = [(line, n) for line, n in raised if start < line < end]
            places = places or list(_after_step(script, function, start, end, raised))
            if places:  # the first one ends the run; a test below it is not reached
                return min(places, key=lambda item: item[0])[1]
        return None


def _after_step(
    script: Script, function: Function, start: int, step: int, raised: list[tuple[int, ast.AST]]
) -> Iterator[tuple[int, ast.AST]]:
    """What raises below a step, in its loop, for a norm that was measured between `unscale_` (line `start`) and the step."""
    inside = list(ast.walk(function.node))
    loops = [n for n in inside if isinstance(n, (ast.For, ast.AsyncFor, ast.While)) and n.lineno < start]
    end = min((n.end_lineno or 0 for n in loops if (n.end_lineno or 0) >= step), default=0)
    later = [(line, place) for line, place in raised if step < line <= end]
    if not later:
        return
    assigns = [n for n in inside if isinstance(n, ast.Assign) and start < n.lineno <= step]
    measured = {key_of(target) for n in assigns for target in n.targets} - {""}
    copies = [
        n for n in inside if isinstance(n, ast.Assign) and step < n.lineno <= end and _is_number_of(n.value, measured)
    ]
    measured |= {key_of(target) for n in copies for target in n.targets} - {""}
    changed = [
        n.lineno
        for n in inside
        if isinstance(n, ast.Assign) and n.lineno > step and n not in copies and measured & set(map(key_of, n.targets))
    ]
    reads = [e.node.lineno for e in script.events("get_scale") if isinstance(e.node, ast.expr)]
    for line, place in later:
        # The call that leads to a place in another function, or the test around one in this.
        parts = [n for n in inside if isinstance(n, ast.Call) and n.lineno == line]
        tests = [place, *(n.test for n in script.above(place) if isinstance(n, ast.If))] if place in inside else parts
        names = {n.id for test in tests for n in ast.walk(test) if isinstance(n, ast.Name)}
        if names & measured and not any(step < n <= line for n in (*reads, *changed)):
            yield line, place


def _is_number_of(value: ast.expr, measured: set[str]) -> bool:
    """Whether a value is one of some variables as a number: `float(norm)`, `norm.item()`."""
    inner = value.func.value if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) else value
    if isinstance(inner, ast.Call) and key_of(inner.func) == "float" and len(inner.args) == 1:
        inner = inner.args[0]
    return inner is not value and key_of(inner) in measured


def _function_at(script: Script, event: Event, depth: int) -> Function | None:
    """The function that is `depth` calls below the root of an event's trace."""
    if depth == len(event.roots):
        return event.function
    outermost = list(script.above(event.roots[depth]))[-1]
    functions = (script.outline.module, *script.outline.functions)
    return next((f for f in functions if f.node is outermost), None)


def _is_default(script: Script, event: Event) -> bool:
    """Whether the scaler is created in this file and starts at 65536."""
    scalers = scalers_at(script, event)
    return bool(scalers) and all(argument(s.node, None, "init_scale") is None for s in scalers)


def _is_float16(script: Script) -> bool:
    """Whether every region is in float16."""
    regions = [a for a in script.autocasts if a.enabled != "no"]
    return bool(regions) and all(a.dtype == "float16" for a in regions)


RULES: tuple[type[Rule], ...] = (OverflowRaises,)
