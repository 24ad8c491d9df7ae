"""How often a loss was divided by one number, with the assignments before its backward followed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import blocks_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Binding, Outline

__all__ = [
    "Assignment",
    "Divisions",
    "assignments_before",
    "bindings_before",
    "computed_apart",
    "divided_by",
    "divides_gradients",
    "is_own_mean",
    "names_in",
    "undivided_end",
]

_FUNCTIONS = {"torch", "len", "max", "min", "sum", "self", "F", "float", "int"}
_DIVIDES = {"div", "div_", "divide", "true_divide"}
_ABOVE_ONE = regex(r"^[A-Za-z_][\w.\[\]'\"]* (> 1|>= 2|!= 1)$")
# Functions that multiply gradients: `scale_grads`, `multiply_grads`, `average_gradients`, `torch._foreach_div_`.
_RESCALES = regex(r"(scale|div|mul|average|normali[sz]e)\w*_grad|grad\w*_(scale|div|mul)|^_foreach_(div|mul)_$")


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


def _is_division(call: ast.Call) -> bool:
    """Whether a call is `loss.div(n)`."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in _DIVIDES and len(call.args) == 1


class Assignment(NamedTuple):
    """An assignment and the variable that it binds."""

    statement: ast.Assign | ast.AugAssign
    target: str


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
    if any(isinstance(f, ast.Attribute) and "grad" in text_of(f.value) for f in by_hand):
        return True
    assigned = [n for n in outline.parents if isinstance(n, ast.AugAssign)]
    return any(isinstance(n.op, (ast.Div, ast.Mult)) and "grad" in text_of(n.target) for n in assigned)


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


def is_own_mean(quotient: ast.BinOp) -> bool:
    """Whether a quotient is a mean over what it divides: `(loss * mask).sum() / mask.sum()`, `sum(losses) / len(losses)`."""
    sized = {n.id for n in ast.walk(quotient.right) if isinstance(n, ast.Name)} - _FUNCTIONS
    is_sum = any(
        isinstance(n, ast.Call) and text_of(n.func).rsplit(".", 1)[-1] == "sum" for n in ast.walk(quotient.left)
    )
    return is_sum and bool(sized) and sized <= {n.id for n in ast.walk(quotient.left) if isinstance(n, ast.Name)}
