"""How often a loss was divided by one number, with the assignments before its backward followed."""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.flow.order import in_other_precision
from halfstep.check.script.objects.expressions import conditions_of, is_unread
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import blocks_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Binding, Function, Outline

__all__ = [
    "MAX_ASSIGNMENTS",
    "Assignment",
    "Divisions",
    "assignments_before",
    "averages",
    "batch_sizes",
    "bindings_before",
    "computed_apart",
    "divided_by",
    "divides_gradients",
    "divisor_of",
    "is_divided",
    "is_divided_by_value",
    "is_nominal",
    "is_on_other_path",
    "is_own_mean",
    "joins_cached",
    "latent",
    "misses_window",
    "names_in",
    "split_sizes",
    "undivided_end",
    "updated_by",
]

MAX_ASSIGNMENTS = 40  # before one backward that are followed; only generated code has more
_FUNCTIONS = {"torch", "len", "max", "min", "sum", "self", "F", "float", "int"}
_DIVIDES = {"div", "div_", "divide", "true_divide"}
_ABOVE_ONE = regex(r"^[A-Za-z_][\w.\[\]'\"]* (> 1|>= 2|!= 1)$")
# Functions that multiply gradients: `scale_grads`, `multiply_grads`, `average_gradients`, `torch._foreach_div_`.
_RESCALES = regex(r"(scale|div|mul|average|normali[sz]e)\w*_grad|grad\w*_(scale|div|mul)|^_foreach_(div|mul)_$")
_GRADIENTS = regex(r"grad(?!\w*acc)")  # not `gradient_accumulation_steps *= world_size`

# `round(nbs / batch_size)`: the nominal batch size of YOLO, whose loss is a sum over the batch.
_NOMINAL = regex(r"\bnbs\b|nominal|round|interp|\b64 /", re.IGNORECASE)
_SIZES = regex(r"\.(sum|numel|size|count_nonzero)\(|\blen\(|\.shape\b")
_MEAN = regex(r"\.mean$|(^|[._])(\w+_loss|cross_entropy|criterion|loss_fn|kl_div)$|_with_logits$", re.IGNORECASE)
_COEFFICIENT = regex(r"(^|[._])\w*(coef|beta|lambda|alpha)\w*$", re.IGNORECASE)
_WORLD = regex(r"(^|[._])(get_)?(world_size|num_gpus|n_gpus?|num_processes|num_replicas)(\(\))?$")


def names_in(node: ast.AST) -> set[str]:
    """The variables and attributes in an expression or statement."""
    parts = list(ast.walk(node))
    return {n.id for n in parts if isinstance(n, ast.Name)} | {n.attr for n in parts if isinstance(n, ast.Attribute)}


def divided_by(node: ast.AST) -> list[str]:
    """The divisors in an expression or statement."""
    divisors = [text_of(n.right) for n in ast.walk(node) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        divisors.append(text_of(node.value))
    return divisors + [text_of(n.args[0]) for n in ast.walk(node) if isinstance(n, ast.Call) and _is_division(n)]


def divisor_of(node: ast.AST) -> str | None:
    """The divisor of `loss / n` or `loss.div(n)`; None for any other expression."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return text_of(node.right)
    return text_of(node.args[0]) if isinstance(node, ast.Call) and _is_division(node) else None


def _is_division(call: ast.Call) -> bool:
    """Whether a call is `loss.div(n)`."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in _DIVIDES and len(call.args) == 1


class Assignment(NamedTuple):
    """An assignment and the variable that it binds."""

    statement: ast.Assign | ast.AugAssign
    target: str

    def binds(self, key: str) -> bool:
        """Whether it assigns a variable, also as one of several: `loss, logits = step(batch)`."""
        targets = self.statement.targets if isinstance(self.statement, ast.Assign) else []
        parts = targets[0].elts if targets and isinstance(targets[0], ast.Tuple) else []
        return self.target == key or any(key_of(part) == key for part in parts)


class Divisions:
    """How often a value was divided by one divisor, with assignments (nearest first) followed."""

    def __init__(self, divisor: str, before: list[Assignment]) -> None:
        self.divisor = divisor
        self.before = before
        self.known: dict[tuple[str, int], int] = {}

    def of(self, node: ast.AST, start: int = 0) -> int:
        """The divisions of an expression; of a sum, those of the term with the most."""
        if isinstance(node, (ast.Name, ast.Attribute)) and key_of(node):
            return self._of_variable(key_of(node), start)
        own = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and text_of(node.right) == self.divisor
        parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, ast.BinOp) and own:
            parts = [node.left]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            own = _is_division(node) and text_of(node.args[0]) == self.divisor
            parts = [node.func.value, *node.args, *(k.value for k in node.keywords)]  # `loss` of `loss.backward()`
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


def assignments_before(script: Script, statement: ast.stmt) -> Iterator[Assignment]:
    """The assignments that certainly run before a statement in its iteration, nearest first."""
    node: ast.AST = statement
    while (parent := script.outline.parents.get(node)) is not None:
        block = next((b for b in blocks_of(parent) if any(node is s for s in b)), [])
        before = block[: next((i for i, s in enumerate(block) if s is node), 0)]
        yield from _straight(reversed(before))
        if isinstance(parent, (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
            return
        node = parent


def _straight(statements: Iterable[ast.stmt]) -> Iterator[Assignment]:
    """The assignments of a block, and of the `with` blocks and `if n > 1:` in it, last first."""
    for statement in statements:
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            yield from _straight(reversed(statement.body))
        elif isinstance(statement, ast.If) and not statement.orelse and _ABOVE_ONE.search(text_of(statement.test)):
            yield from _straight(reversed(statement.body))  # a division by 1 changes nothing
        elif isinstance(statement, ast.AugAssign):
            yield Assignment(statement, key_of(statement.target))
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            yield Assignment(statement, key_of(statement.targets[0]))


def divides_gradients(outline: Outline) -> bool:
    """Whether the script divides the gradients instead of the loss, for example by the number of tokens."""
    calls = outline.calls
    if any(_RESCALES.search(name) for name in calls):
        return True
    # By the loss scale they are only unscaled: `p.grad.mul_(1.0 / 2**lg_loss_scale)`.
    sites = [c for name in ("div_", "mul_") for c, _ in calls.get(name, ())]
    by_hand = (c.func for c in sites if not any("loss_scale" in text_of(a) for a in c.args))
    if any(isinstance(f, ast.Attribute) and _GRADIENTS.search(text_of(f.value)) for f in by_hand):
        return True
    assigned = [n for n in outline.parents if isinstance(n, ast.AugAssign)]
    return any(isinstance(n.op, (ast.Div, ast.Mult)) and _GRADIENTS.search(text_of(n.target)) for n in assigned)


def latent(script: Script, length: str, function: Function) -> str:
    """What has to change before a number of micro-batches that the text sets to 1 does harm, in words; "" for any other number."""
    bound = script.outline.lookup(length, function)
    is_one = bool(bound) and all(b.index is None and b.value is not None and constant(b.value) == 1 for b in bound)
    return f" once `{length}` is above 1" if is_one else ""


def undivided_end(script: Script, event: Event, step: Event, divisor: str) -> ast.If | None:
    """The test that divides every loss but that of the last micro-batch: `if not last: loss = loss / n`, with a step `if last:`."""
    statement = script.statement(event.node)
    blocks = blocks_of(script.outline.parents.get(statement)) if statement is not None else []
    before = [s for block in blocks if statement in block for s in block[: block.index(statement)]]
    ends = {_plain(text, is_true) for text, is_true in conditions_of(script.outline, step.node)}
    for test in (s for s in before if isinstance(s, ast.If) and len(s.body) == 1 and not s.orelse):
        text, is_true = _plain(text_of(test.test), True)
        is_flag = text in event.function.params or any(guard.text == text for guard in step.accumulating)
        here, every = (
            [part for part in divided_by(node) if divisor in part.split(".")]
            for node in (test.body[0], event.function.node)
        )
        if step.function is event.function and is_flag and (text, not is_true) in ends and here == every != []:
            return test
    return None


def _plain(text: str, is_true: bool) -> tuple[str, bool]:
    """A condition without `not`."""
    return (text[4:], not is_true) if text.startswith("not ") else (text, is_true)


def is_divided(script: Script, event: Event, last: str) -> bool:
    """Whether the loss of a backward is certainly divided by the number of micro-batches in the iteration."""
    statement = script.statement(event.node)
    before = list(itertools.islice(assignments_before(script, statement), MAX_ASSIGNMENTS)) if statement else []
    divisors = {d for node in (event.node, *(a.statement for a in before)) for d in divided_by(node)}
    return any(last in re.split(r"\W+", d) and Divisions(d, before).of(event.node) for d in divisors)


def is_divided_by_value(script: Script, event: Event, length: str) -> bool:
    """Whether the loss of a backward is divided by a number of micro-batches, also under a name with that value: `n = 8`."""
    statement = script.statement(event.node)
    before = list(itertools.islice(assignments_before(script, statement), MAX_ASSIGNMENTS)) if statement else []
    divisors = {d for node in (event.node, *(a.statement for a in before)) for d in divided_by(node)}
    same = {d for d in divisors if [length] in ([d], [*map(text_of, script.outline.values(d, event.function))])}
    return any(Divisions(d, before).of(event.node) for d in same)


def is_on_other_path(script: Script, node: ast.AST, event: Event) -> bool:
    """Whether a line runs only where an event does not: in the other branch of an `if`, or of a second test of the same flag.

    Also where nothing reads what the line assigns: `total = loss / n`, and `total.backward() if False else None`.
    """
    if is_unread(script.outline, node):
        return True
    conditions = tuple(conditions_of(script.outline, event.node))
    return in_other_precision(script, node, event.node) or not possible(
        tuple(conditions_of(script.outline, node)), conditions
    )


def bindings_before(script: Script, name: str, event: Event) -> list[Binding]:
    """The assignments that may bind a variable at an event: those before it, where its own function has any."""
    every = script.outline.lookup(name, event.function)
    line = getattr(event.node, "lineno", 0)
    return [b for b in every if b.function is event.function and getattr(b.node, "lineno", 0) <= line] or every


def computed_apart(script: Script, a: Event, b: Event, loss: str) -> bool:
    """Whether two backwards are in the two branches of a test, and each branch computes its own loss."""
    around = {node for node in script.above(a.node) if isinstance(node, ast.If)}
    test = next((node for node in script.above(b.node) if node in around), None)
    if not loss or not isinstance(test, ast.If):
        return False
    branches = [[n for statement in block for n in ast.walk(statement)] for block in (test.body, test.orelse)]
    is_apart = (a.node in branches[0]) != (b.node in branches[0])
    assigned = [{key_of(t) for n in nodes if isinstance(n, ast.Assign) for t in n.targets} for nodes in branches]
    return is_apart and all(loss in names for names in assigned)


def averages(value: ast.expr) -> bool:
    """Whether an expression is a mean, also with a minus sign or a constant factor, or a sum of such terms."""
    if isinstance(value, ast.UnaryOp):
        return averages(value.operand)
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Sub)):
        return averages(value.left) and averages(value.right)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        pairs = ((value.left, value.right), (value.right, value.left))
        return any((constant(a) is not ... or _COEFFICIENT.search(key_of(a))) and averages(b) for a, b in pairs)
    if isinstance(value, ast.Call):
        return bool(_MEAN.search(text_of(value.func)))
    return isinstance(value, ast.Attribute) and value.attr == "loss"


def is_nominal(script: Script, window: str, losses: set[str], event: Event) -> bool:
    """Whether a number of micro-batches is computed from batch sizes, with losses summed over a batch, as in YOLO."""
    values = [b.value for key, bs in script.outline.bindings.items() if key.rsplit(".", 1)[-1] == window for b in bs]
    is_computed = any(_NOMINAL.search(text_of(value)) for value in values if value is not None)
    return is_computed and not any(_has_mean(script, name, event) for name in losses)


def _has_mean(script: Script, name: str, event: Event) -> bool:
    """Whether a variable is a loss that is averaged before a backward: `loss_a = loss_a.mean()`."""
    bound = bindings_before(script, name, event) if "loss" in name.lower() else []
    calls = [b.value for b in bound if isinstance(b.value, ast.Call) and isinstance(b.value.func, ast.Attribute)]
    return any(call.func.attr == "mean" and not call.args for call in calls if isinstance(call.func, ast.Attribute))


def is_own_mean(quotient: ast.BinOp) -> bool:
    """Whether a quotient is a mean over what it divides: `(loss * mask).sum() / mask.sum()`, `sum(losses) / len(losses)`."""
    sized = {n.id for n in ast.walk(quotient.right) if isinstance(n, ast.Name)} - _FUNCTIONS
    is_sum = any(
        isinstance(n, ast.Call) and text_of(n.func).rsplit(".", 1)[-1] == "sum" for n in ast.walk(quotient.left)
    )
    return is_sum and bool(sized) and sized <= {n.id for n in ast.walk(quotient.left) if isinstance(n, ast.Name)}


def _is_mean_of_batch(quotient: ast.BinOp, sizes: set[str]) -> bool:
    """Whether a quotient is the mean over a micro-batch: `loss.sum() / batch_size`, the batch size of the loader."""
    return key_of(quotient.right).rsplit(".", 1)[-1] in sizes and text_of(quotient.left).endswith(".sum()")


def split_sizes(script: Script, length: str, event: Event) -> set[str]:
    """The sizes that a number of micro-batches is computed from: `batch_size` of `batch_size // micro_batch_size`.

    The window then is one batch of the loader, and a sum over a micro-batch divided by that size is a share of the mean.
    """
    parts: list[ast.AST] = []
    with contextlib.suppress(SyntaxError):
        parts.append(ast.parse(length, mode="eval"))
    parts += [b.value for b in script.outline.lookup(length, event.function)[:MAX_BINDINGS] if b.value is not None]
    quotients = [node for part in parts for node in ast.walk(part) if _is_quotient(node)]
    # Of `total // batch_size // world_size` only `total` is split.
    dividends = [list(ast.walk(q.left)) for q in quotients if isinstance(q, ast.BinOp)]
    whole = [nodes for nodes in dividends if not any(map(_is_quotient, nodes))]
    return {key_of(node).rsplit(".", 1)[-1] for nodes in whole for node in nodes} - {""}


def _is_quotient(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv))


def _is_size_of_batch(script: Script, quotient: ast.BinOp, event: Event) -> bool:
    """Whether a quotient is a mean over one micro-batch, `loss.sum() / mask.sum()`, or over the processes, `loss / world_size`.

    The number that it divides by is then computed in the iteration of the backward, not for a whole window.
    """
    divisor = quotient.right
    if _WORLD.search(text_of(divisor)):
        return True
    is_sum = any(isinstance(n, ast.Call) and text_of(n.func).endswith("sum") for n in ast.walk(quotient.left))
    names = {n.id for n in ast.walk(divisor) if isinstance(n, ast.Name)} - _FUNCTIONS
    if not is_sum or not names:
        return False
    loop = next((n for n in script.above(event.node) if isinstance(n, (ast.For, ast.AsyncFor, ast.While))), None)
    place = loop if loop is not None else event.function.node
    lines = range(getattr(place, "lineno", 0), (getattr(place, "end_lineno", 0) or 0) + 1)
    texts = [text_of(divisor)]
    for name in names:
        bound = [b for b in script.outline.lookup(name, event.function) if b.function is event.function]
        bound = [b for b in bound if getattr(b.node, "lineno", 0) in lines]
        if not bound or any(isinstance(b.node, ast.AugAssign) for b in bound):
            return False
        texts += [text_of(b.value) for b in bound if b.value is not None]
    return any(map(_SIZES.search, texts))


def misses_window(script: Script, quotient: ast.BinOp, sizes: set[str], event: Event) -> bool:
    """Whether a quotient is the mean over one micro-batch, or over the processes, and not over a window."""
    is_of_batch = _is_mean_of_batch(quotient, sizes) or is_own_mean(quotient)
    return is_of_batch or _is_size_of_batch(script, quotient, event)


def batch_sizes(script: Script) -> set[str]:
    """The names of the batch sizes that data loaders are created with."""
    names = [name for name in script.outline.calls if "data" in name.lower() or "loader" in name.lower()]
    calls = [c for name in names for c, _ in script.outline.calls[name]]
    values = [k.value for c in calls for k in c.keywords if k.arg == "batch_size"]
    return {key_of(value).rsplit(".", 1)[-1] for value in values} - {""}


def joins_cached(script: Script) -> bool:
    """Whether each loss is over the features of the whole window: `cached[:j] + [features] + cached[j + 1 :]`.

    The gradient of each micro-batch then reaches the weights once, and the sum is that of the whole batch.
    """
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
            continue
        slices = [n for n in ast.walk(node) if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Slice)]
        ends = [s.slice for s in slices if isinstance(s.slice, ast.Slice)]
        before, after = ({ast.unparse(e) for s in ends if (e := getattr(s, end))} for end in ("upper", "lower"))
        if any(f"{index} + 1" in after for index in before):
            return True
    return False


def updated_by(statement: ast.stmt) -> tuple[str, bool]:
    """The variable to which a statement adds a quotient, or which it divides, `total /= n`, and whether it is the second."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, (ast.Add, ast.Div)):
        return key_of(statement.target), isinstance(statement.op, ast.Div)
    value = statement.value if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) and isinstance(statement, ast.Assign):
        target = key_of(statement.targets[0])
        return (target, True) if key_of(value.left) == target else ("", False)  # `total = total / n`
    return "", False
