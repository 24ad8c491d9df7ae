"""HS108: a scale that changes between the backward and the step of its gradients."""

from __future__ import annotations

import ast
import re

from halfstep.check.examples import TWO_OPTIMIZERS
from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.script.flow.conditions import leaves_block
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import (
    TraceRule,
    between,
    earlier,
    implied,
    later,
    loops_around,
    repeats,
    together,
    without_amp,
)
from halfstep.check.script.flow.sources import element_of, latest
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.window import length_of, targets_of
from halfstep.check.script.objects.engines import engine_at
from halfstep.check.script.objects.owners import optimized_models, share
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.scaling.passes import number_of_passes
from halfstep.check.script.scaling.prepared import prepared_for
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import MAX_BINDINGS

__all__ = ["RULES"]

MAX_EVENTS = 100  # before and after an update that belong to its iteration; only generated code has more
_DOCS = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_START = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
"""
_PAIRS = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, x in enumerate(loader):
    for model, optimizer in zip(models, optimizers):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean() / 4
        scaler.scale(loss).backward()
        if (i + 1) % 4 == 0:
            scaler.step(optimizer)
            optimizer.zero_grad()
{inside}{after}"""
_FABRIC = """\
import lightning as L

fabric = L.Fabric(precision="{precision}")
model, opt_g, opt_d = fabric.setup(model, opt_g, opt_d)
for x in loader:
    opt_g.zero_grad()
    opt_d.zero_grad()
    loss_g, loss_d = model(x)
    fabric.backward(loss_g)
{between}    fabric.backward(loss_d)
{after}    opt_d.step()
"""

_WORD = regex(r"\w+")
_ENDS = {"detach", "item", "data"}  # no gradient passes these
_NO_GRADIENTS = regex(r"no_grad|inference_mode|set_grad_enabled")
# What may keep the gradients of one model's loss out of another model.
_FREEZES = regex(r"requires_grad_\(|set_requires_grad|\.requires_grad\b|freez|toggle|\.grad = None", re.IGNORECASE)


class UpdateBeforeStep(TraceRule):
    """The scale is updated between a backward and the step that uses its gradients."""

    code = "HS108"
    name = "update-before-step"
    severity = "error"
    reason = (
        "`step` divides by the current scale. After an `update()` that may differ from the scale the loss was multiplied by, so "
        "gradients are off by a factor of two. With one optimizer, `update()` before `step()` raises because no inf check was "
        "recorded. Call `update()` once, after all steps. That holds for a loop over models with their optimizers, too, if gradients "
        "accumulate over several batches: the update for the first model comes between the backwards of the others."
    )
    bad = (
        _START + "    scaler.update()\n    scaler.step(optimizer)\n",
        "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    scaler.scale(loss_g).backward()\n"
        "    scaler.scale(loss_d).backward()\n    scaler.step(opt_g)\n    scaler.update()\n    scaler.step(opt_d)\n    scaler.update()\n",
        _FABRIC.format(precision="16-mixed", between="", after="    opt_g.step()\n"),
        "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    scaler.scale(model(x)).backward()\n"
        "    for optimizer in optimizers:\n        scaler.step(optimizer)\n        scaler.update()\n",
        _PAIRS.format(inside="            scaler.update()\n", after=""),
    )
    good = (
        _START + "    scaler.step(optimizer)\n    scaler.update()\n",
        TWO_OPTIMIZERS,
        _PAIRS.format(inside="", after="    if (i + 1) % 4 == 0:\n        scaler.update()\n"),
        _FABRIC.format(precision="16-mixed", between="    opt_g.step()\n", after=""),
        _FABRIC.format(precision="bf16-mixed", between="", after="    opt_g.step()\n"),
        "import torch\nscaler = torch.amp.GradScaler('cuda')\nfor x in loader:\n    scaler.scale(loss_d).backward()\n"
        "    scaler.step(opt_d)\n    scaler.update()\n    scaler.scale(loss_g).backward()\n    scaler.step(opt_g)\n    scaler.update()\n",
    )
    references = (
        f"{_DOCS}#working-with-multiple-models-losses-and-optimizers",
        "measured: source code of Accelerate 1.15.0 and Lightning 2.6.6, the step of each optimizer calls scaler.update()",
    )
    kinds = ("update", "opt_step")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """An update followed by a step with no new backward in between."""
        event = trace[index]
        if event.kind == "opt_step":
            return self._under_engine(script, trace, index)
        if (line := self._loop_over_optimizers(script, trace, index)) is not None:
            return self.finding(
                script.where(event.node),
                f"`{event.local.scaler}.update()` runs after the step of each optimizer in the loop at line {line}: the next one divides "
                "by a different scale than the loss was multiplied by",
                instead=f"call {event.local.scaler}.update() once, after that loop",
            )
        if (paired := self._loop_over_pairs(script, trace, index)) is not None:
            return paired
        following = next(
            later(trace, index, "backward", "owned_backward", "scale", "scaler_step", "autograd_grad"), None
        )
        if following is None or trace[following].kind != "scaler_step":
            if not any(e.kind == "scaler_step" for e in trace[max(0, index - MAX_EVENTS) : index]):
                return None
            return self._in_window(script, trace, index) or self._from_other_loss(script, trace, index)
        step = trace[following]
        if step.loops != event.loops or step.scaler != event.scaler or not repeats(event):
            return None
        backs = [
            i for i in earlier(trace, index, "backward") if trace[i].scaled == "yes" and trace[i].scaler == event.scaler
        ]
        if not backs or trace[backs[0]].loops[: len(event.loops)] != event.loops:
            return None
        used = between(trace, backs[-1], index, "scaler_step", "unscale", "update")
        if any(e.optimizer == step.optimizer and e.kind == "scaler_step" for e in used) or without_amp(step):
            return None
        if not (implied(event, step) or implied(step, event) or together(script, event, step)):
            return None
        if _leaves_before(script, event, step):
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.scaler}.update()` runs before `{event.scaler}.step({step.optimizer})`: the step divides by a different scale "
            "than the loss was multiplied by",
            instead=f"call {event.scaler}.update() once, after the last step of the iteration",
        )

    def _in_window(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for an update at the end of a window, in which the gradients of another optimizer accumulate too."""
        event = trace[index]
        before = next((trace[i] for i in earlier(trace, index, "scaler_step")), None)
        near = [e for e in trace[index + 1 : index + MAX_EVENTS] if e.loops == event.loops and compatible(e, event)]
        back = next((e for e in near if e.kind == "backward"), None)
        step = next((e for e in near if e.kind == "scaler_step"), None)
        if before is None or back is None or step is None or near.index(back) > near.index(step):
            return None
        is_one = {back.scaler, before.scaler, step.scaler} == {event.scaler} and back.scaled == "yes"
        if not is_one or before.loops != event.loops or before.optimizer in {step.optimizer, ""} or not repeats(event):
            return None
        shared = [g for g in event.accumulating if g in step.guards and g in before.guards and g not in back.guards]
        window = next((g for g in shared if length_of(script, g)), None)
        cleared = [e for e in trace if e.kind == "zero_grad" and e.loops == event.loops and window not in e.guards]
        if window is None or any(e.optimizer != before.optimizer for e in cleared) or without_amp(step):
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.local.scaler}.update()` runs when `{window.text}`, before the step of `{step.local.optimizer}` (line "
            f"{script.where(step.node).line}): the gradients of its earlier micro-batches were multiplied by the scale before the update",
            instead=f"call {event.local.scaler}.update() once, after the last step of the window",
        )

    def _from_other_loss(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for an update after which an optimizer uses gradients that the loss of another one has left in its model."""
        event = trace[index]
        near = trace[max(0, index - MAX_EVENTS) : index + MAX_EVENTS]
        inside = [e for e in near if e.loops[: len(event.loops)] == event.loops and compatible(e, event)]
        at = next((i for i, e in enumerate(inside) if e is event), 0)  # not among them where no run reaches it
        before = next((e for e in reversed(inside[:at]) if e.kind in {"scaler_step", "backward"}), None)
        backs = [i for i in range(at) if inside[i].kind == "backward"]
        if before is None or before.kind != "scaler_step" or not backs or not repeats(event):
            return None
        back = inside[backs[-1]]
        following = [*inside[at + 1 :], *inside[: backs[-1]]]  # the rest of the iteration, and the next one
        step = next((e for e in following if e.kind == "scaler_step"), None)
        if step is None or step.optimizer in {before.optimizer, ""} or {e.loops for e in (back, step)} != {event.loops}:
            return None
        next_back = next((e for e in following if e.kind == "backward"), None)
        same = {e.scaler for e in (back, before, step, next_back) if e is not None} == {event.scaler}
        if next_back is None or not same or back.scaled != "yes" or without_amp(step):
            return None
        first = following.index(next_back)
        passed = [*inside[backs[-1] + 1 : at], *following[:first]]
        if first > following.index(step) or any(
            e.kind == "handed" or (e.kind == "zero_grad" and e.optimizer != before.optimizer) for e in passed
        ):
            return None
        models, others = optimized_models(script, step), optimized_models(script, before)
        is_one = back.function is step.function or all(m.startswith("self.") for m in models)
        if not models or not others or share(models, others) or not is_one or _FREEZES.search(script.source.text):
            return None
        called = models & _called_for(script, back)
        if not called:
            return None
        return self.finding(
            script.where(event.node),
            f"the backward of line {script.where(back.node).line} also leaves gradients in `{min(called)}`, multiplied by the scale before this "
            f"update: the step of `{step.local.optimizer}` (line {script.where(step.node).line}) divides them by the scale after it",
            instead=f"call {step.local.optimizer}.zero_grad() right before the backward of line {script.where(next_back.node).line}",
        )

    def _under_engine(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The second step after the backwards of an engine in fp16, which updates its one scale in the first."""
        event = trace[index]
        kinds = ("backward", "owned_backward", "handed", "autograd_grad", "engine_step", "opt_step")
        previous = next((trace[i] for i in earlier(trace, index, *kinds)), None)
        if previous is None or previous.kind != "opt_step" or previous.optimizer == event.optimizer:
            return None
        is_joint = previous.loops == event.loops and previous.guards == event.guards and event.loops
        back = next((trace[i] for i in earlier(trace, index, "owned_backward", "backward")), None)
        func = back.node.func if back is not None and isinstance(back.node, ast.Call) else None
        if not is_joint or back is None or back.kind != "owned_backward" or not isinstance(func, ast.Attribute):
            return None
        engine = engine_at(script, key_of(func.value), back.function)
        if engine is None or engine.precision != "fp16" or engine.plugin == "deepspeed":
            return None
        prepared = prepared_for(script, engine.library, event).names
        if back.loops[: len(event.loops)] != event.loops or not _is_stepped(prepared, previous, event):
            return None
        return self.finding(
            script.where(event.node),
            f"the step of `{previous.local.optimizer}` ({script.at(previous.node)}) updates the one scale of `{engine.key}`: "
            f"`{event.local.optimizer}` divides its gradients by a different scale than the loss was multiplied by",
            instead="compute the gradients of each optimizer after the step of the other, or use bf16",
        )

    def _loop_over_pairs(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """The finding for an update in a loop over models with their optimizers, all of which accumulate with this scale."""
        event = trace[index]
        loops = loops_around(script, event) if len(event.loops) > 1 else []
        if len(loops) < 2 or len(loops) != len(event.loops) or not isinstance(loops[-1], ast.For) or without_amp(event):
            return None
        targets = targets_of(loops[-1])
        inside = [e for e in trace if e.loops == event.loops and compatible(e, event)]
        steps = [e for e in inside if e.kind == "scaler_step" and set(_WORD.findall(e.local.optimizer)) & targets]
        backs = [e for e in inside if e.kind == "backward" and e.scaled == "yes" and e.scaler == event.scaler]
        if not steps or not backs or any(e.scaler != event.scaler for e in steps):
            return None
        window = next(
            (g for g in event.accumulating if length_of(script, g) and all(g in e.guards for e in steps)), None
        )
        cleared = [e for e in inside if e.kind in {"zero_grad", "handed"} and not e.accumulating]
        tested = set(_WORD.findall(f"{window.text if window else ''} {event.local.scaler}")) & targets
        if window is None or tested or cleared or any(window in e.guards for e in backs):
            return None
        if number_of_passes(script, loops[-1].iter, event.function) == 1:
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.local.scaler}.update()` runs in each pass of the loop at {script.at(loops[-1])}: what the next pass steps on was accumulated "
            "with the scale before this update",
            instead=f"call {event.local.scaler}.update() once, after that loop, or use a scaler for each optimizer",
        )

    @staticmethod
    def _loop_over_optimizers(script: Script, trace: Trace, index: int) -> int | None:
        """The line of a loop that steps several optimizers with this scaler and contains the update but no backward."""
        event, loops = trace[index], loops_around(script, trace[index])
        if not loops or len(loops) != len(event.loops):
            return None
        targets = targets_of(loops[-1])
        inside = [e for e in trace if e.loops[: len(event.loops)] == event.loops]
        steps = [e for e in inside if e.kind == "scaler_step" and e.scaler == event.scaler and e.loops == event.loops]
        if any(e.kind in {"backward", "owned_backward", "scale", "autograd_grad", "handed"} for e in inside):
            return None
        # `if index != chosen: continue` steps one of them; `% optimizer.interval` may end the windows of several at once.
        tests = [re.sub(r"% \w+\.\w+ == 0", "", g.text) for g in event.guards]
        names = {word for text in (event.local.scaler, *tests) for word in re.findall(r"\w+", text)}
        if names & targets or not any(set(re.findall(r"\w+", e.local.optimizer)) & targets for e in steps):
            return None
        backs = [
            i for i in earlier(trace, index, "backward") if trace[i].scaled == "yes" and trace[i].scaler == event.scaler
        ]
        if not any(e.kind in {"backward", "owned_backward"} for e in trace):
            # A method that only steps: another one of the class computes the gradients of all of them.
            scaled = (e for e in script.near(event, "backward") if e.scaled == "yes" and e.scaler == event.scaler)
            return loops[-1].lineno if any(True for _ in scaled) else None
        before = event.loops[:-1]
        return loops[-1].lineno if backs and trace[backs[0]].loops[: len(before)] == before else None


def _is_stepped(prepared: frozenset[str], *steps: Event) -> bool:
    """Whether all optimizers of some steps are those that an engine has prepared."""
    return all(last_name(step.local.optimizer) in prepared for step in steps)


def _leaves_before(script: Script, event: Event, other: Event) -> bool:
    """Whether a branch or a handler around an event goes to the next iteration, so that another event outside of it does not follow."""
    node: ast.AST = event.node
    for parent in script.above(event.node):
        blocks = [parent.body] if isinstance(parent, (ast.If, ast.ExceptHandler)) else []
        for block in [*blocks, parent.orelse] if isinstance(parent, ast.If) else blocks:
            is_inside = any(part is other.node for statement in block for part in ast.walk(statement))
            if node in block and leaves_block(block) and not is_inside:
                return True
        if isinstance(parent, (ast.For, ast.While)):
            return False
        node = parent
    return False


def _called_for(script: Script, back: Event) -> set[str]:
    """The models that the gradients of a backward reach: `netD` of `criterion(netD(fake), real)`, not of `netD(fake).detach()`."""
    outline, function = script.outline, back.function
    called: set[str] = set()
    read: set[tuple[str, int]] = set()
    func = back.node.func if isinstance(back.node, ast.Call) else None
    todo: list[tuple[ast.AST, int]] = [(func.value, func.lineno)] if isinstance(func, ast.Attribute) else []
    while todo:
        node, line = todo.pop()
        name = key_of(node.func) if isinstance(node, ast.Call) else ""
        if getattr(node.func if isinstance(node, ast.Call) else node, "attr", "") in _ENDS:
            continue
        called |= {name.removesuffix(".forward").removesuffix(".module")}
        key = key_of(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
        if key and (key, line) not in read and len(read) < MAX_BINDINGS:
            read.add((key, line))
            for binding in latest(outline, key, function, line):
                value = element_of(binding)
                if value is not None and not any(map(_is_without_gradients, script.above(value))):
                    todo.append((value, value.lineno))
        todo += [(child, line) for child in ast.iter_child_nodes(node)]
    return called - {""}


def _is_without_gradients(node: ast.AST) -> bool:
    items = node.items if isinstance(node, (ast.With, ast.AsyncWith)) else []
    return any(_NO_GRADIENTS.search(text_of(item.context_expr)) for item in items)


RULES: tuple[type[Rule], ...] = (UpdateBeforeStep,)
