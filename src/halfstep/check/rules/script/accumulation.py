"""HS180-HS181: gradient accumulation over several micro-batches."""

from __future__ import annotations

import ast
import re

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.script.event import Event
from halfstep.check.script.order import STEPS, TraceRule, earlier, later
from halfstep.check.script.script import Script
from halfstep.check.script.trace import Trace
from halfstep.check.script.values import text_of

__all__ = ["RULES"]

_DOCS = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation"
_LOOP = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
{start}    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y){divide}
    scaler.scale(loss).backward()
    if (i + 1) % accumulation_steps == 0:
        scaler.step(optimizer)
        scaler.update()
{end}"""
_RIGHT = _LOOP.format(start="", divide=" / accumulation_steps", end="        optimizer.zero_grad()\n")
_WINDOW = re.compile(r"%\s*([A-Za-z_][\w.\[\]'\"]*|\d+)")
_STEPS = re.compile(
    r"accum|acc_|_acc|virtual|subdivision|batch_split|micro|iter_size|grad_steps|update_freq", re.IGNORECASE
)

# Functions that multiply gradients: `scale_grads`, `multiply_grads`, `average_gradients`, `torch._foreach_div_`.
_RESCALES = re.compile(r"(scale|div|mul|average|normali[sz]e)\w*_grad|grad\w*_(scale|div|mul)|^_foreach_(div|mul)_$")


def _window(script: Script, event: Event) -> str:
    """The window length in the step's condition: `accumulation_steps` in `(i + 1) % accumulation_steps == 0`."""
    for text, _ in event.accumulating:
        bound = script.outline.bindings.get(text, ())  # a flag that a caller computes and passes
        value = bound[0].value if len(bound) == 1 and bound[0].index is None else None
        match = _WINDOW.search(text) or _WINDOW.search(text_of(value))
        if match:
            return match.group(1)
    return ""


def _step_of(script: Script, trace: Trace, index: int) -> Event | None:
    """The step that ends the accumulation window of a backward that runs in every iteration of a loop."""
    event = trace[index]
    following = next(later(trace, index, *STEPS), None)
    if following is None or event.accumulating:
        return None
    step = trace[following]
    return step if step.loops == event.loops and step.kind != "owned_step" and _window(script, step) else None


def _divides_gradients(script: Script) -> bool:
    """Whether the script divides the gradients instead of the loss, for example by the number of tokens."""
    calls = script.outline.calls
    if any(_RESCALES.search(name) for name in calls):
        return True
    by_hand = (c.func for name in ("div_", "mul_") for c, _ in calls.get(name, ()))
    if any(isinstance(f, ast.Attribute) and "grad" in text_of(f.value) for f in by_hand):
        return True
    assigned = [n for n in script.outline.parents if isinstance(n, ast.AugAssign)]
    return any(isinstance(n.op, (ast.Div, ast.Mult)) and "grad" in text_of(n.target) for n in assigned)


class LossNotDivided(TraceRule):
    """The loss of each micro-batch is not divided by the number of micro-batches."""

    code = "HS180"
    name = "loss-not-divided"
    severity = "warning"
    reason = (
        "The gradients of n micro-batches add up, so without the division they are n times larger than those of one large batch: "
        "the effective learning rate of SGD is n times higher, clipping by norm removes n times more, and float16 gradients "
        "overflow n times sooner."
    )
    bad = (_LOOP.format(start="", divide="", end="        optimizer.zero_grad()\n"),)
    good = (_RIGHT, _RIGHT.replace(" / accumulation_steps", "\n    loss *= 1. / accumulation_steps"))
    references = (_DOCS,)
    kinds = ("backward",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A backward in every iteration, a step in every n-th, and no division by n anywhere."""
        event = trace[index]
        step = _step_of(script, trace, index)
        if step is None or event.kind != "backward":
            return None
        window = _window(script, step)
        last = window.rsplit(".", 1)[-1]
        if last in {"0", "1"} or self._nominal(script, last):
            return None
        if any(e.kind == "backward" and e.loops == event.loops and e.function is event.function for e in trace[:index]):
            return None  # reported at the first backward
        cleared = [e for e in trace if e.kind == "zero_grad" and e.loops == event.loops]
        if not cleared or not all(e.accumulating for e in cleared):
            return None
        outline = script.outline
        if any(last in re.split(r"\W+", text) for text in outline.divisors) or "sum" in outline.strings:
            return None
        if any(_STEPS.search(text) for text in outline.divisors) or self._weighted(script, event):
            return None
        calls = (c for name in ("div", "div_", "mul_", "true_divide") for c, _ in outline.calls.get(name, ()))
        if any(last in re.split(r"\W+", text_of(argument)) for c in calls for argument in c.args):
            return None
        if _divides_gradients(script):
            return None
        return self.finding(
            script.where(event.node),
            f"the step runs every `{window}` micro-batches, but the loss is not divided by `{window}`: gradients are too large by that factor",
            instead=f"loss = loss / {window}",
        )

    @staticmethod
    def _nominal(script: Script, window: str) -> bool:
        """Whether the number of micro-batches is computed from batch sizes, with losses summed over a batch, as in YOLO."""
        values = [
            b.value for key, bs in script.outline.bindings.items() if key.rsplit(".", 1)[-1] == window for b in bs
        ]
        nodes = [n for value in values if value is not None for n in ast.walk(value)]
        return any(isinstance(n, ast.BinOp) and isinstance(n.op, (ast.Div, ast.FloorDiv)) for n in nodes)

    @staticmethod
    def _weighted(script: Script, event: Event) -> bool:
        """Whether the loss is divided by something other than a constant, under any name."""
        names = {n.id for n in ast.walk(event.node) if isinstance(n, ast.Name)} | {event.subject.partition(".")[0]}
        bound = [b for name in names - {"", "self"} for b in script.outline.lookup(name, event.function)]
        nodes = [n for v in (*(b.value for b in bound if b.value is not None), event.node) for n in ast.walk(v)]
        return any(
            isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div) and not isinstance(n.right, ast.Constant)
            for n in nodes
        )


class ClearedEveryMicroBatch(TraceRule):
    """Gradients are cleared on every micro-batch, so nothing accumulates."""

    code = "HS181"
    name = "cleared-every-micro-batch"
    severity = "warning"
    reason = (
        "With `zero_grad()` in every iteration and a step in every n-th, the step uses the gradients of the last micro-batch only: "
        "n - 1 of n backward passes are wasted."
    )
    bad = (_LOOP.format(start="    optimizer.zero_grad()\n", divide=" / accumulation_steps", end=""),)
    good = (_RIGHT,)
    references = (_DOCS,)
    kinds = ("zero_grad",)

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A zero_grad before the backward of every iteration, in a loop that steps in every n-th."""
        event = trace[index]
        back = next(later(trace, index, "backward"), None)
        if back is None or event.guards != trace[back].guards or event.loops != trace[back].loops:
            return None
        step = _step_of(script, trace, back)
        if step is None or event.accumulating or (event.optimizer and event.optimizer != step.optimizer):
            return None
        if not _STEPS.search(_window(script, step)) or any(
            trace[i].loops == event.loops for i in earlier(trace, index, *STEPS, "backward")
        ):
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.optimizer}.zero_grad()` runs on every micro-batch, but the step runs only when `{step.accumulating[0][0]}`: "
            "the earlier gradients are discarded",
            instead="call zero_grad() right after the step",
        )


RULES: tuple[type[Rule], ...] = (LossNotDivided, ClearedEveryMicroBatch)
