"""Learning rates that a loop assigns to its optimizer, `group["lr"] = rate(step)`, from a counter of its iterations.

The counter is the loop's own (`enumerate(loader)`, `range(steps)`) or one that the loop increments wherever the optimizer steps. The rate
depends on it through what the loop assigns before, or through a function that receives it: one of the file that sets the rate or calls
another that does, or one of another file whose name says so, `scheduler(step)` or `adjust_learning_rate(optimizer, step)`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event, is_accumulation
from halfstep.check.script.flow.order import AnyLoop, function_around, loops_around
from halfstep.check.script.flow.window import targets_of
from halfstep.check.script.objects.expressions import arguments_of, conditions_of
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.scaling.positions import counter_of
from halfstep.check.script.scaling.schedules import schedules_value
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function

__all__ = ["RateSet", "rates_by_iteration", "sets_rates"]

_ASSIGNS_RATE = regex(
    r"\[['\"]lr['\"]\]\s*=[^=]|^[ \t]+[\w.]*schedul(?:er|e)\(|\bstep_schedulers\(|(?:adjust|set|update|assign|apply)_(?:lr|learning_rate)\w*\(",
    re.MULTILINE,
)
# A schedule that is called, `scheduler(step)`, and methods and functions of other files that set the rate for a step.
_SCHEDULE = regex(r"^_?(lr_?)?(scheduler|schedule|step_schedulers)$")
_SETS_RATE = regex(r"^_?(adjust|set|update|assign|apply)_(lr|learning_rate)(_|$)")
_GROUPS = regex(r"param_?groups")
_LOADER_LENGTH = regex(r"len\(|(per|in)_(an_)?epoch|num_(train_)?batches|n_?iters?$")
_SEARCHES = regex(r"find|range_test|sweep")  # tests that raise the rate until the loss diverges
# A counter that waits for finite gradients, as the step does, counts steps; for a finite loss it does not.
_FINITE = regex(r"^(?!.*loss).*(finite|nan|isinf|overflow)", re.IGNORECASE)
MAX_DEPTH = 5  # variables between a counter and the rate


class RateSet(NamedTuple):
    """An assignment of a learning rate, or the call that makes it, the counter that it follows and the loop of both."""

    node: ast.AST
    counter: str
    loop: AnyLoop


def sets_rates(script: Script) -> bool:
    """Whether a script assigns learning rates itself."""
    return bool(_ASSIGNS_RATE.search(script.source.text))


def rates_by_iteration(script: Script, step: Event) -> Iterator[RateSet]:
    """The learning rates that the loop around a step sets from a counter of its iterations."""
    loops = loops_around(script, step)
    stepped = {last_name(step.local.optimizer), step.local.optimizer.partition(".")[0]}  # `wrapper.optimizer`
    while loops and stepped & targets_of(loops[-1]):
        loops.pop()  # over the optimizers
    if not loops:
        return
    loop = loops[-1]
    around = function_around(script, loop)
    function = next((f for f in (*script.outline.functions, script.outline.module) if f.node is around), None)
    if function is None or _SEARCHES.search(function.name):
        return
    counters = {counter_of(script, loop, function), *_incremented(script, loop, step)} - {""}
    for node, values in _settings(script, loop, function) if counters else ():
        counter = next((c for c in sorted(counters) for v in values if _follows(v, c, loop)), "")
        if counter:
            yield RateSet(node, counter, loop)


def _incremented(script: Script, loop: AnyLoop, step: Event) -> Iterator[str]:
    """The variables to which a loop adds 1 in each iteration, or at each end of a window: not only where something shows an applied step."""
    outer = {g.text for g in conditions_of(script.outline, loop)}
    # Also `if train:`, which is no condition of a call that passes True.
    around = {g for g in (*step.guards, *conditions_of(script.outline, step.node)) if not _FINITE.search(g.text)}
    for node in ast.walk(loop):
        counter = _raised_by_one(node)
        if not counter:
            continue
        inner = next((n for n in script.above(node) if isinstance(n, (ast.For, ast.AsyncFor, ast.While))), None)
        guards = [g for g in conditions_of(script.outline, node) if g.text not in outer]
        if inner is loop and all(g in around or is_accumulation(g) for g in guards):
            yield counter


def _raised_by_one(node: ast.AST) -> str:
    """The variable of `step += 1` or `step = step + 1`; "" for any other statement."""
    if isinstance(node, ast.AugAssign):
        return key_of(node.target) if isinstance(node.op, ast.Add) and constant(node.value) == 1 else ""
    value = node.value if isinstance(node, ast.Assign) else None
    key = key_of(node.targets[0]) if isinstance(node, ast.Assign) else ""
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return ""
    return key if key_of(value.left) == key and constant(value.right) == 1 else ""


def _settings(
    script: Script, part: ast.AST, function: Function, depth: int = 1
) -> Iterator[tuple[ast.AST, list[ast.expr]]]:
    """Where a loop sets learning rates, and the values that decide them: an assignment, or the call of a function that has one.

    Also where a function that the loop calls, `train_step(batch, step)`, sets them from what it is passed.
    """
    groups = _groups(part)
    for node in ast.walk(part):
        if isinstance(node, ast.Assign) and _is_rate(node, groups):
            yield node, [node.value]
        elif not isinstance(node, ast.Call) or not (node.args or node.keywords):
            continue
        elif _names_rate(script, node, function):
            yield node, arguments_of(node)
        elif "." not in (name := key_of(node.func).removeprefix("self.")) and name:
            target = script.outline.call_target(node, function)
            if target is None or target is function or _SEARCHES.search(target.name):
                continue
            own = _groups(target.node)
            if any(isinstance(n, ast.Assign) and _is_rate(n, own) for n in ast.walk(target.node)):
                yield node, arguments_of(node)
            elif depth:
                for inner, values in _settings(script, target.node, target, depth - 1):
                    keys = {key for value in values for key in _keys(value)}
                    if passed := [value for name, value in _passed(node, target) if name in keys]:
                        yield inner, passed


def _names_rate(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether a call of a schedule, or of a function of another file, sets the learning rate by its name."""
    key = key_of(call.func)
    name = last_name(key)
    if not _SCHEDULE.search(name) and not _SETS_RATE.search(name):
        return False
    if script.outline.call_target(call, function) is not None or any("scaler" in key_of(v) for v in arguments_of(call)):
        return False  # one that receives the scaler may look at the scale
    is_alone = isinstance(script.outline.parents.get(call), ast.Expr)
    if _SETS_RATE.search(name):
        return is_alone or any("optim" in key_of(value) for value in arguments_of(call))
    created = [value for value in script.outline.values(key, function) if isinstance(value, ast.Call)]
    return is_alone and not any(schedules_value(value, text_of(value.func)) for value in created)


def _passed(call: ast.Call, target: Function) -> Iterator[tuple[str, ast.expr]]:
    """The parameters of a function, each with what a call passes for it by position or name."""
    is_bound = bool(target.method) and target.params[:1] == ("self",)
    yield from zip(target.params[is_bound:], call.args, strict=False)
    yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg)


def _groups(part: ast.AST) -> set[str]:
    """The variables of the loops over parameter groups in a part of the text, also of a function that the outline does not walk."""
    loops = (n for n in ast.walk(part) if isinstance(n, ast.For) and _GROUPS.search(text_of(n.iter)))
    return {name for loop in loops for name in targets_of(loop)}


def _is_rate(assign: ast.Assign, groups: set[str]) -> bool:
    """Whether an assignment is to the learning rate of a parameter group."""
    target = assign.targets[0]
    if not isinstance(target, ast.Subscript) or constant(target.slice) != "lr":
        return False
    return bool(_GROUPS.search(text_of(target.value))) or key_of(target.value) in groups


def _follows(value: ast.expr, counter: str, loop: AnyLoop) -> bool:
    """Whether a value depends on a counter through what a loop assigns, as a position in epochs does too: `epoch + i / len(loader)`."""
    followed: set[str] = set()
    waiting, depth = [value], 0
    while waiting and depth <= MAX_DEPTH:
        keys = {key for part in waiting for key in _keys(part)} - followed
        if counter in keys:
            return True
        followed |= keys
        waiting, depth = list(_assigned(loop, keys)), depth + 1
    return False


def _assigned(loop: AnyLoop, keys: set[str]) -> Iterator[ast.expr]:
    """What a loop assigns to variables, itself or by looping over it."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and any(key_of(t) in keys for target in node.targets for t in ast.walk(target)):
            yield node.value
        elif isinstance(node, ast.For) and node is not loop and targets_of(node) & keys:
            yield node.iter


def _keys(value: ast.expr) -> Iterator[str]:
    """The variables in a value, except in a whole number of epochs and in what is called."""
    waiting: list[ast.AST] = [value]
    while waiting:
        node = waiting.pop()
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.FloorDiv)
            and _LOADER_LENGTH.search(text_of(node.right))
        ):
            continue
        if isinstance(node, ast.Call):
            waiting += arguments_of(node)
        elif isinstance(node, ast.Subscript):  # `schedule[it]`
            waiting += [node.value, node.slice]
            if key_of(node):
                yield key_of(node)
        elif isinstance(node, ast.expr) and key_of(node):
            yield key_of(node)
        else:
            waiting += ast.iter_child_nodes(node)
