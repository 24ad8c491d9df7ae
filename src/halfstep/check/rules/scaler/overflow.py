"""HS175: a run that ends at the first overflow, which the scaler is there to skip."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

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
from halfstep.check.script.objects.expressions import conditions_of
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
_NOT_FINITE = regex(r"is_?(finite|nan|inf)|non_?finite|has_?(nan|inf)|nan_?or_?inf|all_?finite", re.IGNORECASE)
_GRADIENT = regex(r"grad|norm", re.IGNORECASE)
_LOSS = regex(r"loss", re.IGNORECASE)
# A limit on how many in a row are accepted, or a test of the scale itself.
_LENIENT = regex(r"consecutive|count|num_|patience|max_|limit|scale\b|get_scale|streak|skipped", re.IGNORECASE)
# The hooks of Lightning between a backward and the next `zero_grad`.
_HOOKS = {"on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "configure_gradient_clipping"}
_EXITS = {"exit", "quit", "sys.exit", "os._exit", "os.abort"}
_INTERRUPTS = {"KeyboardInterrupt", "SystemExit", "StopIteration"}  # what a clip or a test of gradients does not raise
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
    kinds = ("unscale", "owned_clip", "owned_unscale")

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
            raising = [(line, n) for line, n in _raising(script, function) if start < line < end]
            if raising:  # the first one ends the run; a test below it is not reached
                return min(raising, key=lambda item: item[0])[1]
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
    """The lines of a function that end the run for a gradient that is not finite."""
    for node in ast.walk(function.node):
        place: ast.AST | None = None
        if isinstance(node, ast.If):
            ends = next(filter(_ends_run, node.body), None)
            place = ends if ends is not None and _tests_gradients(script, node.test, function) else None
        elif (isinstance(node, ast.Assert) and _tests_gradients(script, node.test, function)) or (
            isinstance(node, ast.Call)
            and text_of(node.func).endswith("clip_grad_norm_")
            and _is_strict(node)
            and not _is_tested(script, node, function)
        ):
            place = node
        if place is not None and not _is_caught(script, place):
            yield place


def _ends_run(statement: ast.stmt) -> bool:
    """Whether a statement raises, or exits the program."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(statement, ast.Raise) or (isinstance(call, ast.Call) and key_of(call.func) in _EXITS)


def _is_caught(script: Script, place: ast.AST) -> bool:
    """Whether the training loop continues after an exception: a `try` in it catches, and does not raise again or leave."""
    inner, attempts = place, []
    for outer in script.above(place):
        if isinstance(outer, ast.Try) and inner in outer.body:
            attempts.append(outer)
        elif isinstance(outer, (ast.For, ast.While)) and any(map(_continues, attempts)):
            return True
        inner = outer
    return False


def _continues(attempt: ast.Try) -> bool:
    """Whether a handler of errors neither raises nor leaves the loop."""
    handlers = [h for h in attempt.handlers if key_of(h.type) not in _INTERRUPTS]
    leaves = (ast.Raise, ast.Break, ast.Return)
    return any(
        not any(isinstance(n, leaves) or (isinstance(n, ast.stmt) and _ends_run(n)) for n in ast.walk(handler))
        for handler in handlers
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
    """Whether a test is whether gradients are finite, directly or through variables: `bad = first_nonfinite_grad(model)`."""
    text = text_of(test)
    names = _names_in(test)
    if any(_LENIENT.search(t) for t in (text, *names)) or _LOSS.search(text):
        return False
    values = _values_of(script, names, test, function)
    texts = [text, *map(text_of, values)]
    if any(_NOT_FINITE.search(t) for t in texts) and any(_GRADIENT.search(t) for t in texts):
        return True
    if _is_set_for_gradients(script, names, test, function):
        return True
    # `flag = torch.tensor(1 if bad else 0)`, which ranks reduce: one variable further.
    further = [name for value in values if not isinstance(value, ast.Compare) for name in _names_in(value) - {"torch"}]
    tests = [v for v in _values_of(script, further, test, function) if _NOT_FINITE.search(text_of(v))]
    return any(
        _GRADIENT.search(text_of(t)) and not _LOSS.search(text_of(t)) and not _LENIENT.search(text_of(t)) for t in tests
    )


def _names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _values_of(script: Script, names: Iterable[str], test: ast.expr, function: Function) -> list[ast.expr]:
    """What a function assigns to variables before a test."""
    bound = [b for name in sorted(names) for b in script.outline.bindings.get(name, ())[:MAX_BINDINGS]]
    values = [
        b.value
        for b in bound
        if b.function is function and getattr(b.node, "lineno", 0) <= test.lineno and b.value is not None
    ]
    return values[-3:]


def _is_set_for_gradients(script: Script, names: Iterable[str], test: ast.expr, function: Function) -> bool:
    """Whether a variable is set, or a list filled, only for gradients that are not finite: `if isnan(p.grad).any(): bad = True`."""
    outline = script.outline
    places: list[ast.AST] = [
        b.node
        for name in names
        for b in outline.bindings.get(name, ())[:MAX_BINDINGS]
        if b.function is function and constant(b.value) is True
    ]
    places += [
        call
        for call, inner in outline.calls.get("append", ())
        if inner is function and isinstance(call.func, ast.Attribute) and key_of(call.func.value) in set(names)
    ]
    guards = [g.text for p in places if getattr(p, "lineno", 0) < test.lineno for g in conditions_of(outline, p)]
    return any(_NOT_FINITE.search(g) and _GRADIENT.search(g) and not _LOSS.search(g) for g in guards)


RULES: tuple[type[Rule], ...] = (OverflowRaises,)
