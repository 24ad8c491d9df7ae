"""HS175: a run that ends at the first overflow, which the scaler is there to skip."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
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
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function

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
_RAISE = "    if not torch.isfinite(norm):\n        raise RuntimeError('gradient norm is not finite')\n"
_NOT_FINITE = regex(r"is_?(finite|nan|inf)|non_?finite|has_?(nan|inf)|nan_?or_?inf|all_?finite", re.IGNORECASE)
_GRADIENT = regex(r"grad|norm", re.IGNORECASE)
_LOSS = regex(r"loss", re.IGNORECASE)
# A limit on how many in a row are accepted, or a test of the scale itself.
_LENIENT = regex(r"consecutive|count|num_|patience|max_|limit|scale\b|get_scale|streak|skipped", re.IGNORECASE)
_EXITS = regex(r"(^|\.)_?(exit|quit|abort)$")
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
        "raises between the two, or `clip_grad_norm_(..., error_if_nonfinite=True)`, ends the run instead, often in its first step. The scalers of Accelerate and "
        "Lightning work in the same way; a hook of Lightning sees the gradients of a skipped step too."
    )
    bad = (
        _LOOP.format(strict="", test=_RAISE),
        _LOOP.format(strict=", error_if_nonfinite=True", test=""),
        _LOOP.format(strict="", test="    assert torch.isfinite(norm), 'gradient norm is not finite'\n"),
        _OWNED.format(precision="fp16", test=_RAISE),
        _CALLBACK.format(tested="weight.grad is not None and torch.isnan(weight.grad).any()"),
    )
    good = (
        _LOOP.format(strict="", test=""),
        _LOOP.format(strict="", test=_RAISE.replace("norm):", "loss):")),
        _LOOP.format(strict="", test=_RAISE.replace("norm):", "norm) and num_skipped > 50:")),
        _OWNED.format(precision="bf16", test=_RAISE),
        _CALLBACK.format(tested="torch.isnan(weight).any()"),
    )
    references = (
        "https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler.step",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html",
    )
    words = ("Accelerator", "on_train_batch_end", "on_after_backward")
    kinds = ("unscale", "owned_clip")

    def check(self, script: Script) -> Iterator[Finding]:
        """Every event of the traces, and the hooks that Lightning runs while there are gradients."""
        yield from super().check(script)
        if "ightning" not in script.source.text or not trains_in_fp16(script):
            return
        places = {p: f.name for f in lightning_methods(script) if f.name in _HOOKS for _, p in _raising(script, f)}
        for place, hook in places.items():
            yield self.finding(
                script.where(place),
                f"this ends the run when a float16 gradient overflows: `{hook}` also runs for the steps that Lightning's scaler skips",
                instead=_INSTEAD,
            )

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An unscale_ after which the same function raises for gradients that are not finite, before the step."""
        event = trace[index]
        if event.kind == "owned_clip":
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

    def _owned(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The same after the clip of Accelerate, which unscales."""
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
        ends = {"opt_step"} if event.kind == "owned_clip" else {"scaler_step", "update"}
        for depth in range(len(event.roots), -1, -1):
            after = [e for e in trace[index + 1 :] if e.kind in ends and len(e.roots) >= depth]
            after = [e for e in after if e.roots[:depth] == event.roots[:depth]]
            function = _function_at(script, event, depth)
            if not after or function is None or after[0].loops != event.loops:
                continue
            start, end = (getattr((*e.roots, e.node)[depth], "lineno", 0) for e in (event, after[0]))
            place = next((n for line, n in _raising(script, function) if start < line < end), None)
            if place is not None:
                return place
        return None


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


def _raising(script: Script, function: Function) -> Iterator[tuple[int, ast.AST]]:
    """What raises for a gradient that is not finite, in a function or in one that it calls, with the line of the function."""
    for place in _raising_in(script, function):
        yield getattr(place, "lineno", 0), place
    unscaling = {e.function for e in script.events("unscale")}
    for node in ast.walk(function.node):
        target = script.outline.call_target(node, function) if isinstance(node, ast.Call) else None
        if target is not None and target is not function and target not in unscaling:
            yield from ((getattr(node, "lineno", 0), inner) for inner in _raising_in(script, target))


def _raising_in(script: Script, function: Function) -> Iterator[ast.AST]:
    """The lines of a function that raise for a gradient that is not finite, where no handler of the function catches it."""
    for node in ast.walk(function.node):
        if isinstance(node, (ast.If, ast.Assert, ast.Call)) and _is_caught(script, node):
            continue
        if isinstance(node, ast.If) and any(isinstance(s, ast.Raise) for s in node.body):
            if _tests_gradients(script, node.test, function):
                yield next(s for s in node.body if isinstance(s, ast.Raise))
        elif (isinstance(node, ast.Assert) and _tests_gradients(script, node.test, function)) or (
            isinstance(node, ast.Call)
            and text_of(node.func).endswith("clip_grad_norm_")
            and _is_strict(node)
            and not _is_tested(script, node, function)
        ):
            yield node


def _is_caught(script: Script, node: ast.AST) -> bool:
    """Whether a handler around a line catches what it raises, and the run continues."""
    inner = node
    for outer in script.above(node):
        if isinstance(outer, ast.Try) and inner in outer.body and any(map(_goes_on, outer.handlers)):
            return True
        inner = outer
    return False


def _goes_on(handler: ast.ExceptHandler) -> bool:
    """Whether a handler neither raises again nor leaves the program."""
    parts = list(ast.walk(handler))
    return not any(isinstance(n, ast.Raise) for n in parts) and not any(
        isinstance(n, ast.Call) and _EXITS.search(text_of(n.func)) for n in parts
    )


def _is_tested(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether a clip is under a test of what is finite: directly, or by a function of the file."""
    for test in (outer.test for outer in script.above(call) if isinstance(outer, ast.If)):
        targets = [script.outline.call_target(n, function) for n in ast.walk(test) if isinstance(n, ast.Call)]
        texts = [text_of(test), *(ast.unparse(target.node) for target in targets if target is not None)]
        if any(map(_NOT_FINITE.search, texts)):
            return True
    return False


def _is_strict(call: ast.Call) -> bool:
    """Whether a clip raises for a norm that is not finite."""
    return constant(argument(call, 3, "error_if_nonfinite")) is True


def _tests_gradients(script: Script, test: ast.expr, function: Function) -> bool:
    """Whether a test is whether gradients are finite, directly or through a variable: `bad = first_nonfinite_grad(model)`."""
    text = text_of(test)
    names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    bound = [b for name in names for b in script.outline.bindings.get(name, ())[:MAX_BINDINGS]]
    values = [
        b.value
        for b in bound
        if b.function is function and getattr(b.node, "lineno", 0) <= test.lineno and b.value is not None
    ]
    texts = [text, *map(text_of, values[-3:])]
    if any(_LENIENT.search(t) for t in (text, *names)) or _LOSS.search(text):
        return False
    return any(_NOT_FINITE.search(t) for t in texts) and any(_GRADIENT.search(t) for t in texts)


RULES: tuple[type[Rule], ...] = (OverflowRaises,)
