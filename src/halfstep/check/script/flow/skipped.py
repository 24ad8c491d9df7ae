"""Skipped iterations: tests of the gradients that leave out the rest of one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event, Guard, is_accumulation
from halfstep.check.script.flow.order import is_amp
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import blocks_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function

__all__ = [
    "find_branch",
    "find_early_return",
    "find_skip",
    "is_past",
    "reads_gradients",
]

MAX_TESTS = 20  # that are inspected after one `unscale_`; only generated code has more
_FINITE = regex(r"finite|is_?nan|is_?inf|has_(nan|inf)", re.IGNORECASE)
_INFINITE = regex(r"finite|inf(?!er|o)|overflow", re.IGNORECASE)
_NORM = regex(r"grad_?norm|total_norm|^norm$|gnorm", re.IGNORECASE)
_STEP = regex(r"step|batch|iter", re.IGNORECASE)  # names of functions that run one iteration
_LOGS = regex(r"log|print|warn|zero_grad|record|track", re.IGNORECASE)
_NAMED: dict[type, str] = {ast.Name: "id", ast.Attribute: "attr", ast.keyword: "arg"}
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def reads_gradients(script: Script, test: ast.If) -> bool:
    """Whether a test is about inf in gradients, not about the loss: `p.grad`, a helper of the file, or a flag set from them."""
    function = _function_of(script, test)
    parts: list[ast.AST] = [test.test, *_values(script, test, function.node)]
    calls = [node for part in parts for node in ast.walk(part) if isinstance(node, ast.Call)]
    targets = [script.outline.call_target(call, function) for call in calls]
    names = [name for part in (*parts, *(t.node for t in targets if t is not None)) for name in _names(part)]
    is_loss = any("loss" in name.lower() for name in _names(test.test))
    is_gradient = any("grad" in name.lower() or "total_norm" in name.lower() for name in names)
    return not is_loss and is_gradient and any(map(_INFINITE.search, names))


def _place(script: Script, event: Event, depth: int) -> ast.stmt:
    """The statement of an event in the function that is `depth` calls below the root of its trace."""
    statement = script.statement((*event.roots, event.node)[depth])
    assert statement is not None
    return statement


def is_past(script: Script, update: Event, event: Event, depth: int, skip: ast.If) -> bool:
    """Whether an update belongs to the same call of the function and comes after the skip."""
    same = update.roots[:depth] == event.roots[:depth]
    return same and _place(script, update, depth).lineno > (skip.body[-1].end_lineno or 0)


def find_skip(script: Script, event: Event, depth: int, *, is_any: bool = False) -> ast.If | None:
    """The test of the gradients, after an event and in one function, that skips the rest of the iteration.

    Its branch ends in `continue` in a loop, and in `return` in a function that a loop calls once per iteration: one of this file, or,
    by its name or because the branch clears the gradients for the next batch, of another. With `is_any` the test before a `continue`
    may be about anything but mixed precision and the end of a window.
    """
    start = node = _place(script, event, depth)
    above = list(script.above(start))
    for i, parent in enumerate(above):
        if isinstance(parent, (ast.Try, ast.TryStar)) and parent.finalbody:
            return None  # `finally` runs after `return` too
        in_loop = any(isinstance(outer, _LOOPS) for outer in above[i:])
        is_certain = in_loop or _is_repeated(script, event, depth, above[-1])
        if not is_certain and depth:
            return None
        block = next((b for b in blocks_of(parent) if node in b), [])
        rest = block[block.index(node) + (node is not start) :] if block else []
        leave = ast.Continue if in_loop else ast.Return
        tests = [test for s in rest if isinstance(s, ast.If) for test in _leaving(script, s, leave, event)]
        for test in tests[:MAX_TESTS]:
            if _is_skip(script, test, event, above[-1], is_any=is_any and in_loop):
                return test if is_certain or _is_continued(script, event, depth, test.body) else None
        if not isinstance(parent, ast.stmt):
            return None
        node = parent  # also a loop over micro-batches or optimizers, in an iteration of the loop around it
    return None


def find_early_return(script: Script, event: Event, uses: list[Event]) -> ast.If | None:
    """The test of the gradients by which a function returns before all uses of the scaler; the caller continues with the next batch.

    The function is called after the event, `self.optimizer_step()`, and returns nothing by which the caller could leave its loop.
    """
    first = uses[0]
    same = next((i for i, pair in enumerate(zip(event.roots, first.roots, strict=False)) if pair[0] is not pair[1]), -1)
    same = min(len(event.roots), len(first.roots)) if same < 0 else same
    for depth in range(len(first.roots), same, -1):
        if _stops(script, _place(script, first, depth - 1)):
            return None
        node = _place(script, first, depth)
        above = list(script.above(node))
        for parent in above:
            block = next((b for b in blocks_of(parent) if node in b), [])
            before = block[: block.index(node)] if block else []
            tests = [t for s in before if isinstance(s, ast.If) for t in _leaving(script, s, ast.Return, event)]
            for test in tests[:MAX_TESTS]:
                if _is_skip(script, test, event, above[-1], is_any=False):
                    return test if all(is_past(script, e, first, depth, test) for e in uses) else None
            if not isinstance(parent, ast.stmt):
                return None
            node = parent
    return None


def _leaving(script: Script, test: ast.If, leave: type[ast.stmt], event: Event) -> Iterator[ast.If]:
    """The tests whose branch leaves the iteration: one itself, and those inside it, `if step > warmup: if norm > limit: continue`."""
    if isinstance(test.body[-1], leave):
        yield test
        return
    if any(is_amp((name, True)) for name in _names(test.test)):
        return
    for block in (test.body, test.orelse):
        for i, inner in enumerate(block):
            if isinstance(inner, ast.If) and not _touches(script, [test.test, *block[:i]], event):
                yield from _leaving(script, inner, leave, event)


def find_branch(script: Script, event: Event, depth: int, updates: list[Event]) -> ast.If | None:
    """The test of the gradients, in one function, whose one branch contains every update and whose other continues."""
    start = _place(script, event, depth)
    above = list(script.above(start))
    in_loop = any(isinstance(parent, _LOOPS) for parent in above)
    if any(u.kind == "handed" or u.roots[:depth] != event.roots[:depth] for u in updates):
        return None
    is_certain = in_loop or _is_repeated(script, event, depth, above[-1] if above else None)
    if not is_certain and depth:
        return None
    branches = [_branches(script, _place(script, u, depth), above) for u in updates]
    common = [pair for pair in branches[0] if all(pair in other for other in branches[1:])]
    for test, is_body in common:
        other = test.orelse if is_body else test.body
        ends = (
            (ast.Raise, ast.Break, ast.Return) if in_loop else (ast.Raise,)
        )  # `return` ends one iteration of a caller
        leaves = bool(other) and isinstance(other[-1], ends)
        if test.lineno > start.lineno and not leaves and _tests_gradients(script, test, above[-1]):
            is_certain = is_certain or _is_continued(script, event, depth, other)
            return test if is_certain and not _touches(script, other, event) else None
    return None


def _branches(script: Script, node: ast.AST, above: list[ast.AST]) -> list[tuple[ast.If, bool]]:
    """The tests around a statement, each with whether it is in the body, up to a block that contains `above` as well."""
    tests = []
    for parent in script.above(node):
        if parent in above:
            break
        if isinstance(parent, ast.If):
            tests.append((parent, any(node is s for s in parent.body)))
        node = parent
    return tests


def _is_repeated(script: Script, event: Event, depth: int, function: ast.AST | None) -> bool:
    """Whether the caller continues with the next batch when a function returns."""
    if depth == 0:  # no caller in this file: decide by the name
        return isinstance(function, ast.FunctionDef) and bool(_STEP.search(function.name))
    looped = any(isinstance(node, _LOOPS) for root in event.roots[:depth] for node in script.above(root))
    return looped and not _stops(script, _place(script, event, depth - 1))


def _is_continued(script: Script, event: Event, depth: int, branch: list[ast.stmt]) -> bool:
    """Whether a function without a caller in this file abandons one iteration: its scaler outlives it, and the branch clears the gradients."""
    own = _function_of(script, _place(script, event, depth))
    if event.scaler.partition(".")[0] not in own.params:
        return False
    calls = [node for statement in branch for node in ast.walk(statement) if isinstance(node, ast.Call)]
    targets = [target.node for call in calls if (target := script.outline.call_target(call, own)) is not None]
    cleared = {e.node for e in script.events("zero_grad")}
    return any(node in cleared for part in (*calls, *targets) for node in ast.walk(part))


def _stops(script: Script, call: ast.stmt) -> bool:
    """Whether the caller tests the return value and may leave the loop: `if not train_step(batch): break`."""
    targets = call.targets if isinstance(call, ast.Assign) else []
    results = {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    block = next((b for b in blocks_of(script.outline.parents.get(call)) if call in b), [])
    for test in block[block.index(call) :] if block else ():
        if isinstance(test, ast.If):
            read = {node.id for node in ast.walk(test.test) if isinstance(node, ast.Name)}
            leaves = any(isinstance(node, (ast.Break, ast.Raise, ast.Return)) for node in ast.walk(test))
            if leaves and (test is call or read & results):
                return True
    return False


def _is_skip(script: Script, test: ast.If, event: Event, function: ast.AST, *, is_any: bool) -> bool:
    """Whether a branch is for non-finite gradients or losses, or for anything, and does not touch the scaler."""
    guard = Guard(text_of(test.test), is_true=True)
    is_other = is_any and not is_accumulation(guard) and not any(is_amp((name, True)) for name in _names(test.test))
    is_skip = is_other or _tests_gradients(script, test, function)
    return is_skip and not _touches(script, [test.test, *test.body], event)


def _tests_gradients(script: Script, test: ast.If, function: ast.AST) -> bool:
    """Whether a condition is about non-finite values, or compares the norm of the gradients with a threshold."""
    tested = [*_names(test.test), *(str(n.value) for n in ast.walk(test.test) if isinstance(n, ast.Constant))]
    assigned = [name for value in _values(script, test, function) for name in _names(value)]
    if any(is_amp((name, True)) for name in tested):
        return False
    own = _function_of(script, test)
    calls = (node for node in ast.walk(test.test) if isinstance(node, ast.Call))
    targets = [target for call in calls if (target := script.outline.call_target(call, own)) is not None]
    assigned += [name for target in targets for name in _names(target.node)]  # `if self.gradients_are_finite():`
    compared = [name for part in ast.walk(test.test) if _is_threshold(part) for name in _names(part)]
    return any(map(_FINITE.search, (*tested, *assigned))) or any(map(_NORM.search, compared))


def _is_threshold(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))


def _touches(script: Script, parts: Sequence[ast.AST], event: Event) -> bool:
    """Whether a branch uses the scaler, or may through a method that this file does not define."""
    scaler = event.scaler.rsplit(".", 1)[-1]
    calls = [node for part in parts for node in ast.walk(part) if isinstance(node, ast.Call)]
    shown = {id(call.func) for call in calls if _is_of_bar(call)}
    nodes = (node for part in parts for node in ast.walk(part) if id(node) not in shown)
    if any(name == scaler or "update" in name for node in nodes for name in _own_name(node)):
        return True
    return any(_is_elsewhere(script, call) for call in calls)


def _is_of_bar(call: ast.Call) -> bool:
    """Whether a call is `bar.update(1)` or `meter.update(loss, n)`: a scaler's update has no argument, or a new scale."""
    func = call.func
    return isinstance(func, ast.Attribute) and func.attr == "update" and bool(call.args) and "scal" not in text_of(func)


def _names(node: ast.AST) -> list[str]:
    """Every name, attribute and keyword in an expression or statement."""
    return [text for part in ast.walk(node) for text in _own_name(part)]


def _own_name(node: ast.AST) -> list[str]:
    text = getattr(node, _NAMED.get(type(node), ""), None)
    return [text] if isinstance(text, str) else []


def _values(script: Script, test: ast.If, function: ast.AST) -> Iterator[ast.expr]:
    """The values last assigned to the variables of a test: `bad = not isfinite(norm)`."""
    for name in {node.id for node in ast.walk(test.test) if isinstance(node, ast.Name)}:
        bindings = script.outline.bindings.get(name, [])
        if len(bindings) <= MAX_BINDINGS:
            before = [b for b in bindings if b.function.node is function and getattr(b.node, "lineno", 0) < test.lineno]
            if before and before[-1].value is not None:
                yield before[-1].value
                above = script.outline.parents.get(before[-1].node)
                if isinstance(above, ast.If) and isinstance(before[-1].value, ast.Constant):
                    yield above.test  # `if not isfinite(p.grad).all(): bad = True`


def _is_elsewhere(script: Script, call: ast.Call) -> bool:
    """Whether a call is of an inherited method that this file does not define and that may update the scaler."""
    key = key_of(call.func)
    inherited = key.startswith("self.") and key.count(".") == 1 and not _LOGS.search(key)
    return inherited and script.outline.call_target(call, _function_of(script, call)) is None


def _function_of(script: Script, node: ast.AST) -> Function:
    """The function that contains a line."""
    above = list(script.above(node))[-1:]
    return next((f for f in script.outline.functions if f.node in above), script.outline.module)
