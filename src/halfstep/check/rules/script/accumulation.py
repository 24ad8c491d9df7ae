"""HS180, HS182: the division of a loss by the number of micro-batches."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

from halfstep.check.examples import ACCUMULATING_LOOP
from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.script.accumulated import dividend, divides_total
from halfstep.check.script.flow.divisions import (
    MAX_ASSIGNMENTS,
    Divisions,
    assignments_before,
    averages,
    batch_sizes,
    bindings_before,
    computed_apart,
    divides_gradients,
    is_divided,
    is_nominal,
    is_on_other_path,
    joins_cached,
    latent,
    misses_window,
    names_in,
    split_sizes,
    undivided_end,
    updated_by,
)
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.flow.order import STEPS, TraceRule, in_other_precision, loops_around
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.flow.window import (
    ACCUMULATION,
    Window,
    abandons,
    accumulated_over,
    branched,
    depth_without_optimizers,
)
from halfstep.check.script.objects.engines import ACCELERATE, engine_at, leaves_loss
from halfstep.check.script.objects.outputs import in_no_grad
from halfstep.check.script.objects.trainers import losses_without_count
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.scaling.divided_losses import divisions_of_loss
from halfstep.check.script.scaling.weighted_losses import passed_to_loss, weighed_with_owner
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS

__all__ = ["RULES"]

_DOCS = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation"
_RIGHT = ACCUMULATING_LOOP.format(start="", divide=" / accumulation_steps", end="        optimizer.zero_grad()\n")
# What a schedule divides, not a loss: `len(loader) / accumulation_steps` counts optimizer steps.
_COUNTS = regex(r"\blen\b|num_|n_|_size|samples|\bstep\b|steps|iters|epochs|batches|total", re.IGNORECASE)
_LOSS = regex(r"loss|err|grad(?!\w*acc)|cost|objective|elbo|nll|\bkl|criterion|logits|output", re.IGNORECASE)
_LOSS_NAME = regex(r"^[\w.]*\b(scaled_|micro_|total_|backward_)?loss(es)?$|factor|scale|weight", re.IGNORECASE)
_NUMBER = regex(r"\.(item|detach|cpu|tolist)\(|^(float|int)\(")  # `loss.item() / accumulation_steps`
_GRADIENT = regex(r"grads?(?![a-z_])")  # not `grad_accum_steps`
_ENTRY = regex(r"\[['\"](\w+)['\"]\]$")  # `config["steps"]`
_FACTOR = regex(r"^[A-Za-z_][\w.]*$|^[2-9]$|^[1-9]\d+$")
_PIECES = regex(r"^len\((?!.*(micro|mini|sub))", re.IGNORECASE)  # of a batch that the script splits
_DIVIDING = {"div", "div_", "mul_", "mul", "true_divide"}
_LOSS_FUNCTION = regex(r"forward|loss|criterion|__call__|__init__|objective", re.IGNORECASE)


def _divisions(script: Script) -> Iterator[tuple[ast.AST, str, str]]:
    """Every division in a script, with the texts of the divisor and of what is divided."""
    for node in ast.walk(script.tree):  # not only the functions that are about precision: a model may divide its loss
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node, text_of(node.right), text_of(node.left)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            yield node, text_of(node.value), text_of(node.target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _DIVIDING:
            yield from ((node, text_of(argument), "loss") for argument in node.args)


class LossNotDivided(TraceRule):
    """The loss of each micro-batch is not divided by the number of micro-batches."""

    code = "HS180"
    name = "loss-not-divided"
    severity = "warning"
    reason = (
        "The gradients of n micro-batches add up, so without the division they are n times larger than those of one large batch: "
        "the effective learning rate of SGD is n times higher, clipping by norm removes n times more, and float16 gradients "
        "overflow n times sooner. It is advice where the script sets n to 1."
    )
    bad = (ACCUMULATING_LOOP.format(start="", divide="", end="        optimizer.zero_grad()\n"),)
    good = (_RIGHT, _RIGHT.replace(" / accumulation_steps", "\n    loss *= 1. / accumulation_steps"))
    references = (_DOCS,)
    words = ("def compute_loss(",)
    kinds = ("backward", "owned_backward")

    def check(self, script: Script) -> Iterator[Finding]:
        """Undivided losses of training loops, and of a Trainer's own compute_loss."""
        yield from super().check(script)
        for method, steps in losses_without_count(script.outline):
            yield self.finding(
                script.where(method),
                f"`compute_loss` ignores `num_items_in_batch`, and the Trainer leaves the division to it: with `gradient_accumulation_steps={steps}` "
                "the gradients are the sum over the micro-batches",
                instead="pass num_items_in_batch to the model, or divide the loss by self.current_gradient_accumulation_steps",
            )

    def judge(self, script: Script, trace: Trace, index: int) -> Finding | None:
        """A backward in every iteration, a step in every n-th, and no division by n anywhere."""
        event = trace[index]
        if (event.kind == "owned_backward" and not leaves_loss(script, event)) or ("False", True) in event.guards:
            return None
        window = accumulated_over(script, trace, index)
        if window is None:
            return None
        length = window.length
        if length == "self.trainer.accumulate_grad_batches":
            return None  # 1: Lightning raises for any other number with manual optimization
        last = entry[1] if (entry := _ENTRY.search(length)) else length.rsplit(".", 1)[-1]
        if (
            last in {"0", "1"}
            or is_nominal(script, last, self._behind(script, event), event)
            or not self._cleared_after(script, trace, event, window)
        ):
            return None
        others = [e for e in trace[:index] if e.loops == event.loops and e.function is event.function]
        twins = {(g.text, not g.is_true) for g in branched(trace, event)}
        others = [e for e in others if e.kind in self.kinds and e.node is not event.node and not twins & set(e.guards)]
        others = [e for e in others if not computed_apart(script, e, event, key_of(_loss_of(event)))]
        others = [e for e in others if e.kind != "owned_backward" or leaves_loss(script, e)]
        others = [e for e in others if not is_divided(script, e, last)]
        if not all(in_other_precision(script, e.node, event.node) and self._divided(script, last, e) for e in others):
            return None  # reported at the first backward
        if (
            window.by_loop
            and (part := _partly_divided(script, event, length))
            and not divides_gradients(script.outline)
        ):
            return self.finding(
                script.where(event.node),
                f"the loop runs `{length}` micro-batches, but the loss is not divided by `{part}`: gradients are too large by that factor",
                instead=f"loss = loss / ({length})",
            )
        if (test := undivided_end(script, event, window.step, last)) and not divides_gradients(script.outline):
            return self.finding(
                script.where(test),
                f"the loss is divided by `{length}` only if `{text_of(test.test)}`: that of the micro-batch before the step is not",
                instead=f"loss = loss / {length} for every micro-batch",
            )
        if (
            self._divided(script, last, event)
            or self._weighted(script, event, length)
            or divides_gradients(script.outline)
        ):
            return None
        if (
            _is_zero(script, event)
            or self._summed(script, trace, event)
            or joins_cached(script)
            or passed_to_loss(script, last, length)
            or weighed_with_owner(script, length, event)
        ):
            return None
        if (" / " in length or _PIECES.search(length)) and not _is_mean(script, event):
            return None  # each slice may have its share of the batch as a factor
        engine = engine_at(script, event.subject, event.function) if event.kind == "owned_backward" else None
        when = latent(script, length, event.function)
        unless = " (unless the launcher sets it)" if engine is not None and engine.library == ACCELERATE else ""
        return self.finding(
            script.where(event.node),
            f"the step runs every `{length}` micro-batches, but the loss is not divided by `{length}`{unless}: gradients are too large by that factor{when}",
            instead=f"loss = loss / {length}",
            severity="advice" if when else None,
        )

    @staticmethod
    def _cleared_after(script: Script, trace: Trace, event: Event, window: Window) -> bool:
        """Whether gradients are cleared once per window, and not on every micro-batch."""
        depth = min(len(window.step.loops), len(event.loops))
        if window.by_loop:
            depth = depth_without_optimizers(script, window.step)
        # A discriminator's; the other branch (`if amp: scaler.step(opt)`, `else: opt.step()`) steps the same one.
        steps = [e for e in trace if e.kind in STEPS and compatible(e, window.step)]
        others = {e.optimizer for e in steps} - {window.step.optimizer}
        cleared = [e for e in trace if e.kind == "zero_grad" and e.loops[:depth] == event.loops[:depth]]
        cleared = [e for e in cleared if e.optimizer not in others]
        # `if isnan(loss): zero_grad(); continue`, and the branch for a window of one micro-batch.
        known = tuple(g for g in event.guards if g not in event.accumulating or "%" not in g.text)
        cleared = [e for e in cleared if possible(known, e.guards)]
        cleared = [e for e in cleared if (e.accumulating and not window.by_loop) or not abandons(script, e)]
        if window.by_loop:
            return bool(cleared) and all(e.loops[: depth + 1] != event.loops[: depth + 1] for e in cleared)
        shared = set(event.guards) - set(branched(trace, event))
        return bool(cleared) and all(any(g not in shared for g in e.accumulating) for e in cleared)

    def _divided(self, script: Script, last: str, event: Event) -> bool:
        """Whether anything but a number of steps, or a number for the log, is divided by the number of micro-batches."""
        losses = self._behind(script, event, rounds=1)  # also one that is called `total`
        for node, divisor, divided in _divisions(script):
            if _NUMBER.search(divided) or is_on_other_path(script, node, event) or divides_total(script, node, event):
                continue
            is_count = _COUNTS.search(divided) and not _LOSS.search(divided) and divided not in losses
            if (last in re.split(r"\W+", divisor) or ACCUMULATION.search(divisor)) and not is_count:
                if isinstance(node, (ast.BinOp, ast.AugAssign)) and (
                    self._is_for_log(script, node, event) or self._is_apart(script, node, divided, event)
                ):
                    continue
                if not self._is_of_other(script, node, event):
                    return True
        return False

    def _is_of_other(self, script: Script, node: ast.AST, event: Event) -> bool:
        """Whether a quotient is the loss of another backward only: that of another loop, or of a discriminator."""
        around = list(script.above(node))
        others = {e.node: e for e in script.events(*self.kinds) if e.node is not event.node}
        if node in others or any(n in others for n in around):
            return True  # `(loss / n).backward()`
        if not around:
            return False  # a function that is not about training, such as that of a model
        if around[-1] is not event.function.node:
            callers = {n for root in event.roots for n in script.above(root)}
            return around[-1] not in callers and any(e.function.node is around[-1] for e in others.values())
        statement = script.statement(node)
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        names = {key_of(target).rsplit(".", 1)[-1] for target in targets}
        near = [e for e in others.values() if e.function is event.function]
        loops = {n for n in around if isinstance(n, (ast.For, ast.While))}.difference(script.above(event.node))
        if any(n in loops for e in near for n in script.above(e.node)):
            return True
        return not names & {"", *self._behind(script, event, rounds=6)} and any(
            names <= self._behind(script, e, rounds=6) for e in near
        )

    def _is_apart(self, script: Script, node: ast.BinOp | ast.AugAssign, divided: str, event: Event) -> bool:
        """Whether a quotient is assigned to a variable from which the loss is not computed: a time, an average for the log."""
        statement = script.statement(node)
        target = ""
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            stored = statement.targets[0]
            if divided == text_of(_loss_of(event)) and list(script.above(statement))[-1:] == [event.function.node]:
                # `log[0] = loss / n` of the very variable that backward runs on.
                root = text_of(stored.value if isinstance(stored, ast.Subscript) else stored)
                return root.rsplit(".", 1)[-1] not in self._behind(script, event, rounds=6)
            target = key_of(stored.value if isinstance(stored, ast.Subscript) else stored)
        if not target or _GRADIENT.search(target) or divided.replace(".", "").isdigit():
            return False
        if _LOSS.search(divided) and not divides_total(script, node, event):
            return False
        return not _LOSS_NAME.search(target) and target.rsplit(".", 1)[-1] not in self._behind(script, event, rounds=6)

    def _is_for_log(self, script: Script, node: ast.BinOp | ast.AugAssign, event: Event) -> bool:
        """Whether a quotient does not reach the backward: the loss of a validation, or a sum that is only logged."""
        statement = script.statement(node)
        if statement is None or _GRADIENT.search(ast.unparse(statement)):
            return False
        if in_no_grad(script, node):
            return bool(_LOSS.search(ast.unparse(statement)))
        if list(script.above(statement))[-1:] == [event.function.node] and divides_total(script, node, event):
            # `return total_loss / n` of the function that runs backward on another variable
            return text_of(dividend(node)) not in self._behind(script, event, rounds=6)
        total, is_quotient = updated_by(statement)
        if is_quotient and list(script.above(statement))[-1:] != [event.function.node]:
            return False
        # `total += loss / n`, or `total /= n`, with another variable in the backward.
        name = total.rsplit(".", 1)[-1].partition("[")[0]  # `outputs` of `outputs["loss"]`
        return bool(total) and name not in self._behind(script, event, rounds=6)

    def _summed(self, script: Script, trace: Trace, event: Event) -> bool:
        """Whether the loss is a sum over the batch, whose gradients add up to those of the sum over the window."""
        near = {e.function for e in trace}
        used = self._behind(script, event)
        for call, function in (site for sites in script.outline.calls.values() for site in sites):
            if any(k.arg == "reduction" and constant(k.value) == "sum" for k in call.keywords):
                if function is not event.function and in_no_grad(script, call):
                    continue  # of a validation
                statement = script.statement(call)
                target = key_of(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
                if _LOSS_FUNCTION.search(function.name) or (
                    target.rsplit(".", 1)[-1] in used if target else function in near
                ):
                    return True
        return False

    @staticmethod
    def _behind(script: Script, event: Event, rounds: int = 2) -> set[str]:
        """The names from which the loss of a backward is computed, directly or through some assignments."""
        names = names_in(event.node)
        for _ in range(rounds):
            bound = [b for name in names - {"self"} for b in bindings_before(script, name, event)[:MAX_BINDINGS]]
            names |= {name for b in bound if b.value is not None for name in names_in(b.value)}
        return names

    def _weighted(self, script: Script, event: Event, length: str) -> bool:
        """Whether the loss is divided by something other than a constant, under any name."""
        names = {n.id for n in ast.walk(event.node) if isinstance(n, ast.Name)} | {event.subject.partition(".")[0]}
        names |= {name for name in self._behind(script, event, rounds=1) if name.endswith("loss")}  # `loss * scale`
        bound = [b for name in names - {"", "self"} for b in bindings_before(script, name, event)]
        bound = [b for b in bound if not in_no_grad(script, b.node) and not is_on_other_path(script, b.node, event)]
        nodes = [n for v in (*(b.value for b in bound if b.value is not None), event.node) for n in ast.walk(v)]
        sizes = batch_sizes(script) - split_sizes(script, length, event)
        return any(
            isinstance(n, ast.BinOp)
            and isinstance(n.op, ast.Div)
            and not isinstance(n.right, ast.Constant)
            and not misses_window(script, n, sizes, event)
            for n in nodes
        )


def _partly_divided(script: Script, event: Event, length: str) -> str:
    """The factor of a window `n * world_size` by which a loss that is divided by the other one is not; "" if none."""
    factors = [text.strip() for text in length.split("*")]
    statement = script.statement(event.node)
    if len(factors) != 2 or not all(map(_FACTOR.match, factors)) or statement is None:
        return ""
    before = list(itertools.islice(assignments_before(script, statement), MAX_ASSIGNMENTS))
    counts = [Divisions(factor, before).of(event.node) for factor in factors]
    part = next((f for f, count in zip(factors, counts, strict=True) if not count), "")
    last = part.rsplit(".", 1)[-1]
    is_divisor = any(last in re.split(r"\W+", divisor) for _, divisor, _ in _divisions(script))
    return part if sum(counts) == 1 and not is_divisor else ""


def _is_zero(script: Script, event: Event) -> bool:
    """Whether a loss is multiplied by 0, for the communication of a batch without samples: `(dummy.sum() * 0.0).backward()`."""
    loss = _loss_of(event)
    bound = bindings_before(script, key_of(loss), event) if loss is not None and key_of(loss) else []
    value = max(bound, key=lambda b: getattr(b.node, "lineno", 0)).value if bound else loss
    return isinstance(value, ast.BinOp) and 0 in {constant(value.left), constant(value.right)}


def _is_mean(script: Script, event: Event) -> bool:
    """Whether the loss of a backward is a mean over its micro-batch: `x.mean()`, `output.loss`, or a loss function as torch.nn has it."""
    loss = _loss_of(event)
    values = (
        [b.value for b in bindings_before(script, key_of(loss), event)] if loss is not None and key_of(loss) else [loss]
    )
    return bool(values) and all(v is not None and averages(v) for v in values)


def _loss_of(event: Event) -> ast.expr | None:
    """The loss that a backward runs on, without its scale."""
    func = event.node.func if isinstance(event.node, ast.Call) else None
    loss = func.value if isinstance(func, ast.Attribute) else None
    if event.scaled == "yes" and isinstance(loss, ast.Call) and loss.args:
        loss = loss.args[0]  # scaler.scale(loss)
    if isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Mult) and "scale" in text_of(loss.right):
        loss = loss.left  # (loss * loss_scale).backward()
    return loss


def _repeats(script: Script, event: Event) -> set[str]:
    """The numbers of passes of the loops around a backward: `len(chunks)` of `for chunk in chunks`, `n` of `range(n)`."""
    loops = [loop for loop in loops_around(script, event) if isinstance(loop, ast.For)]
    sources = [s.args[0] if isinstance(s, ast.Call) and len(s.args) == 1 else s for s in (loop.iter for loop in loops)]
    return {text for s in sources if (key := key_of(s)) for text in (key, f"len({key})")}


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
        counts = divisions_of_loss(
            script, event, lambda d: bool(ACCUMULATION.search(d)) or d in _repeats(script, event)
        )
        twice = next((d for d in sorted(counts) if counts[d] > 1), "")
        if not twice:
            return None
        return self.finding(
            script.where(event.node),
            f"{f'`{event.local.subject}`' if event.local.subject else 'the loss'} is divided by `{twice}` twice: gradients are too small by that factor",
            instead=f"divide the loss by {twice} once",
        )


RULES: tuple[type[Rule], ...] = (LossNotDivided, LossDividedTwice)
