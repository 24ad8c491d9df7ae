"""HS180-HS182: gradient accumulation over several micro-batches."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import STEPS, TraceRule, earlier, implied, later, only_settings
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.window import ACCUMULATION, Window, accumulated_over, branched
from halfstep.check.script.objects.engines import leaves_loss
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import blocks_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Binding

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
# What a schedule divides, not a loss: `len(loader) / accumulation_steps` counts optimizer steps.
_COUNTS = re.compile(r"\blen\b|num_|n_|_size|samples|steps|epochs|batches|total", re.IGNORECASE)
_LOSS = re.compile(r"loss|err|grad|cost|objective|elbo|nll|\bkl|criterion|logits|output", re.IGNORECASE)
_NUMBER = re.compile(r"\.(item|detach|cpu|tolist)\(|^(float|int)\(")  # `loss.item() / accumulation_steps`
_BACKWARDS = ("backward", "owned_backward")
_UPDATES = {"update_grad", "need_update"}  # whether the step follows the backward
MAX_ASSIGNMENTS = 40  # before one backward that are followed; only generated code has more
_LOSS_FUNCTION = re.compile(r"forward|loss|criterion|__call__|__init__|objective", re.IGNORECASE)

# Functions that multiply gradients: `scale_grads`, `multiply_grads`, `average_gradients`, `torch._foreach_div_`.
_RESCALES = re.compile(r"(scale|div|mul|average|normali[sz]e)\w*_grad|grad\w*_(scale|div|mul)|^_foreach_(div|mul)_$")


def _names(node: ast.AST) -> set[str]:
    parts = list(ast.walk(node))
    return {n.id for n in parts if isinstance(n, ast.Name)} | {n.attr for n in parts if isinstance(n, ast.Attribute)}


def _divisions(script: Script) -> Iterator[tuple[str, str]]:
    """Every division in a script, as the texts of the divisor and of what is divided."""
    for node in script.outline.parents:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield text_of(node.right), text_of(node.left)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            yield text_of(node.value), text_of(node.target)
    for name in ("div", "div_", "mul_", "mul", "true_divide"):
        for call, _ in script.outline.calls.get(name, ()):
            yield from ((text_of(argument), "loss") for argument in call.args)


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
    kinds = ("backward", "owned_backward")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A backward in every iteration, a step in every n-th, and no division by n anywhere."""
        event = trace[index]
        if event.kind == "owned_backward" and not leaves_loss(script, event):
            return None
        window = accumulated_over(script, trace, index)
        if window is None:
            return None
        length = window.length
        last = length.rsplit(".", 1)[-1]
        if last in {"0", "1"} or self._nominal(script, last) or not self._cleared_after(trace, event, window):
            return None
        others = [e for e in trace[:index] if e.loops == event.loops and e.function is event.function]
        twins = {(g.text, not g.is_true) for g in branched(trace, event)}
        if any(e.kind in self.kinds and not twins & set(e.guards) for e in others):
            return None  # reported at the first backward
        if self._divided(script, last) or self._weighted(script, event) or _divides_gradients(script):
            return None
        if self._summed(script, trace, event) or _joins_cached(script):
            return None
        return self.finding(
            script.where(event.node),
            f"the step runs every `{length}` micro-batches, but the loss is not divided by `{length}`: gradients are too large by that factor",
            instead=f"loss = loss / {length}",
        )

    @staticmethod
    def _cleared_after(trace: Trace, event: Event, window: Window) -> bool:
        """Whether gradients are cleared once per window, and not on every micro-batch."""
        depth = min(len(window.step.loops), len(event.loops))
        cleared = [e for e in trace if e.kind == "zero_grad" and e.loops[:depth] == event.loops[:depth]]
        if window.by_loop:
            return bool(cleared) and all(e.loops != event.loops for e in cleared)
        shared = set(event.guards) - set(branched(trace, event))
        return bool(cleared) and all(any(g not in shared for g in e.accumulating) for e in cleared)

    @staticmethod
    def _divided(script: Script, last: str) -> bool:
        """Whether anything but a number of steps, or a number for the log, is divided by the number of micro-batches."""
        for divisor, divided in _divisions(script):
            if _NUMBER.search(divided):
                continue
            if (last in re.split(r"\W+", divisor) or ACCUMULATION.search(divisor)) and not (
                _COUNTS.search(divided) and not _LOSS.search(divided)
            ):
                return True
        return False

    def _summed(self, script: Script, trace: Trace, event: Event) -> bool:
        """Whether the loss is a sum over the batch, whose gradients add up to those of the sum over the window."""
        near = {e.function for e in trace}
        used = self._behind(script, event)
        for call, function in (site for sites in script.outline.calls.values() for site in sites):
            if any(k.arg == "reduction" and constant(k.value) == "sum" for k in call.keywords):
                statement = script.statement(call)
                target = key_of(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
                if _LOSS_FUNCTION.search(function.name) or (
                    target.rsplit(".", 1)[-1] in used if target else function in near
                ):
                    return True
        return False

    @staticmethod
    def _behind(script: Script, event: Event) -> set[str]:
        """The names from which the loss of a backward is computed, directly or through two assignments."""
        names = _names(event.node)
        for _ in range(2):
            bound = [b for name in names - {"self"} for b in script.outline.lookup(name, event.function)[:MAX_BINDINGS]]
            names |= {name for b in bound if b.value is not None for name in _names(b.value)}
        return names

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
        bound = [b for name in names - {"", "self"} for b in _before(script, name, event)]
        nodes = [n for v in (*(b.value for b in bound if b.value is not None), event.node) for n in ast.walk(v)]
        return any(
            isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div) and not isinstance(n.right, ast.Constant)
            for n in nodes
        )


def _before(script: Script, name: str, event: Event) -> list[Binding]:
    """The assignments that may bind a variable at an event: those before it, where its own function has any."""
    every = script.outline.lookup(name, event.function)
    line = getattr(event.node, "lineno", 0)
    return [b for b in every if b.function is event.function and getattr(b.node, "lineno", 0) <= line] or every


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
        """A zero_grad in the iteration of every backward, in a loop that steps in every n-th."""
        event = trace[index]
        back = self._backward(script, trace, index)
        window = accumulated_over(script, trace, back) if back is not None else None
        if back is None or window is None or not self._clears(trace, index, back, window):
            window = self._owned_window(script, trace, index)
        if window is None:
            return None
        steps = {e.optimizer for e in trace if e.kind in STEPS and e.loops == window.step.loops}
        if len(steps) > 1 and not ACCUMULATION.search(f"{window.length} {window.ends}"):
            return None  # a generator that is updated in every n-th iteration
        cleared = f"{event.local.optimizer}.zero_grad()" if isinstance(event.node, ast.Call) else text_of(event.node)
        return self.finding(
            script.where(event.node),
            f"`{cleared}` runs on every micro-batch, but the step of line {window.line} runs only when {window.ends}: "
            "the earlier gradients are discarded",
            instead="clear the gradients right after the step",
        )

    @staticmethod
    def _backward(script: Script, trace: Trace, index: int) -> int | None:
        """The backward whose gradients are cleared in its own iteration, before it or after the step that may follow it."""
        event = trace[index]
        before = [i for i in earlier(trace, index, *STEPS, *_BACKWARDS) if trace[i].loops == event.loops]
        backs = [i for i in before if trace[i].kind in _BACKWARDS]
        if before:
            # After the step; without one in between the gradients of this very backward are discarded, which has other reasons.
            back = backs[0] if len(backs) == 1 and before[0] != backs[0] else None
        else:
            back = next(later(trace, index, *_BACKWARDS), None)
        if back is None or event.loops != trace[back].loops or not implied(event, trace[back]):
            return None
        if trace[back].kind == "owned_backward" and script.outline.calls.get("accumulate"):
            return None  # Accelerate clears gradients only at the end of a window there
        return back if only_settings(script, trace[back], event) else None

    @staticmethod
    def _owned_window(script: Script, trace: Trace, index: int) -> Window | None:
        """The window of timm's scaler, which also runs backward: `scaler(loss, optimizer, update_grad=(i + 1) % n == 0)`."""
        event = trace[index]
        for step in trace:
            if step.kind != "owned_step" or step.loops != event.loops or not implied(event, step):
                continue
            passed = (
                [k.value for k in step.node.keywords if k.arg in _UPDATES] if isinstance(step.node, ast.Call) else []
            )
            for value in passed:
                options = [value, *script.outline.values(key_of(value), step.function)]
                ends = next((text_of(v) for v in options if isinstance(v, ast.Compare) and "%" in text_of(v)), "")
                if ends:
                    return Window(step, f"`{ends}`")
        return None

    @staticmethod
    def _clears(trace: Trace, index: int, back: int, window: Window) -> bool:
        """Whether a zero_grad clears the gradients that the step of a window uses."""
        name = trace[index].optimizer
        models = {e.subject for e in trace[:back] if e.kind == "forward" and e.loops == trace[back].loops}
        return not name or name == window.step.optimizer or name in models


class LossDividedTwice(TraceRule):
    """The loss is divided by the number of micro-batches twice."""

    code = "HS182"
    name = "loss-divided-twice"
    severity = "error"
    reason = (
        "One division by n makes the gradients of n micro-batches those of their mean. The second makes them n times smaller: the "
        "effective learning rate of SGD is n times lower, and in float16 more of them underflow."
    )
    bad = (
        _RIGHT.replace("scaler.scale(loss)", "scaler.scale(loss / accumulation_steps)"),
        _RIGHT.replace("    scaler.scale", "    loss /= accumulation_steps\n    scaler.scale"),
    )
    good = (_RIGHT,)
    references = (_DOCS,)
    kinds = ("backward", "owned_backward")

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A backward of a loss that was divided by the same number of micro-batches at least twice."""
        event = trace[index]
        statement = script.statement(event.node)
        if statement is None or not isinstance(event.node, ast.Call):
            return None
        before = list(itertools.islice(_assignments_before(script, statement), MAX_ASSIGNMENTS))
        divisors = {d for node in (event.node, *(a.statement for a in before)) for d in _divided_by(node)}
        lengths = sorted(d for d in divisors if ACCUMULATION.search(d))
        twice = next((d for d in lengths if _Divisions(d, before).of(event.node) > 1), "")
        if not twice:
            return None
        return self.finding(
            script.where(event.node),
            f"`{event.local.subject or 'the loss'}` is divided by `{twice}` twice: gradients are too small by that factor",
            instead=f"divide the loss by {twice} once",
        )


def _divided_by(node: ast.AST) -> list[str]:
    """The divisors in an expression or statement."""
    divisors = [text_of(n.right) for n in ast.walk(node) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        divisors.append(text_of(node.value))
    return divisors


class _Assignment(NamedTuple):
    statement: ast.Assign | ast.AugAssign
    target: str


class _Divisions:
    """How often a value was divided by one divisor, with assignments (nearest first) followed."""

    def __init__(self, divisor: str, before: list[_Assignment]) -> None:
        self.divisor = divisor
        self.before = before
        self.known: dict[tuple[str, int], int] = {}

    def of(self, node: ast.AST, start: int = 0) -> int:
        """The divisions of an expression; of a sum, those of the term with the most."""
        if isinstance(node, (ast.Name, ast.Attribute)) and key_of(node):
            return self._of_variable(key_of(node), start)
        own = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and text_of(node.right) == self.divisor
        parts = [node.left] if isinstance(node, ast.BinOp) and own else ast.iter_child_nodes(node)
        return own + max((self.of(part, start) for part in parts), default=0)

    def _of_variable(self, key: str, start: int) -> int:
        if (key, start) not in self.known:
            self.known[key, start] = 0
            position = next((i for i in range(start, len(self.before)) if self.before[i].target == key), None)
            if position is not None:
                self.known[key, start] = self._of_assignment(self.before[position].statement, key, position + 1)
        return self.known[key, start]

    def _of_assignment(self, statement: ast.Assign | ast.AugAssign, key: str, start: int) -> int:
        if isinstance(statement, ast.Assign):
            return self.of(statement.value, start)
        own = isinstance(statement.op, ast.Div) and text_of(statement.value) == self.divisor
        added = self.of(statement.value, start) if isinstance(statement.op, (ast.Add, ast.Sub)) else 0
        return max(own + self._of_variable(key, start), added)


def _assignments_before(script: Script, statement: ast.stmt) -> Iterator[_Assignment]:
    """The assignments that certainly run before a statement in its iteration, nearest first."""
    node: ast.AST = statement
    while (parent := script.outline.parents.get(node)) is not None:
        block = next((b for b in blocks_of(parent) if any(node is s for s in b)), [])
        before = block[: next((i for i, s in enumerate(block) if s is node), 0)]
        yield from _straight(reversed(before))
        if isinstance(parent, (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
            return
        node = parent


def _straight(statements: Iterable[ast.stmt]) -> Iterator[_Assignment]:
    """The assignments of a block and of the `with` blocks in it, last first."""
    for statement in statements:
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            yield from _straight(reversed(statement.body))
        elif isinstance(statement, ast.AugAssign):
            yield _Assignment(statement, key_of(statement.target))
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            yield _Assignment(statement, key_of(statement.targets[0]))


def _joins_cached(script: Script) -> bool:
    """Whether each loss is over the features of the whole window: `cached[:j] + [features] + cached[j + 1 :]`.

    The gradient of each micro-batch then reaches the weights once, and the sum is that of the whole batch.
    """
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
            continue
        slices = [n for n in ast.walk(node) if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Slice)]
        before = {ast.unparse(s.slice.upper) for s in slices if isinstance(s.slice, ast.Slice) and s.slice.upper}
        after = {ast.unparse(s.slice.lower) for s in slices if isinstance(s.slice, ast.Slice) and s.slice.lower}
        if any(f"{index} + 1" in after for index in before):
            return True
    return False


RULES: tuple[type[Rule], ...] = (LossNotDivided, ClearedEveryMicroBatch, LossDividedTwice)
