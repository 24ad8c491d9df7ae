"""Tests of the scale, by which a step that the scaler skipped is recognised."""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex
from halfstep.check.script.flow.conditions import Conditions
from halfstep.check.script.flow.event import Event, Guard
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.formats import formats_of
from halfstep.check.script.objects.values import UNKNOWN, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["never_float16", "reads_scale", "same_scales", "settled_by"]

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_PRINTS = regex(r"^print$|(^|\.)(log\w*|write|add_scalar|debug|info|warn(ing)?)$")
_AVERAGES = regex(r"(^|[._])(ema|teacher)_?\w*\.(update|step)\w*$|^update_(ema|teacher)$", re.IGNORECASE)
_IS_FLOAT16 = regex(r"^\(?([A-Za-z_][\w.]*) == torch\.(?:float16|half)\)?$")
_EQUAL = (ast.LtE, ast.GtE, ast.Eq)
_UNEQUAL = (ast.Lt, ast.Gt, ast.NotEq)


def reads_scale(script: Script) -> bool:
    """Whether the script compares the scale, or the optimizer's count of steps, by which a skipped step is recognised.

    Printing the scale is no comparison, and counting the skipped steps does not keep the schedule from advancing.
    """
    if "_step_count" in script.outline.loads:
        return True
    calls = [e.node for e in script.events("get_scale")]
    if "_scale" in script.outline.loads:
        calls += [n for n in ast.walk(script.tree) if isinstance(n, ast.Attribute) and n.attr == "_scale"]
    alone = [c for c in calls if not any(isinstance(n, ast.Compare) for n in script.above(c))]
    # `norm /= scaler.get_scale()` unscales a number.
    if any(not isinstance(script.statement(call), (ast.Assign, ast.AugAssign, ast.Expr)) for call in alone):
        return True
    assigned = [s for call in calls if isinstance(s := script.statement(call), ast.Assign)]
    keys = {key_of(target) for s in assigned for target in s.targets}
    if "" in keys:
        return True
    compared = [c for c in ast.walk(script.tree) if isinstance(c, ast.Compare)] if calls else []
    same = same_scales(script)
    return any(_reads(c, keys) and c not in same and not _is_counted(script, c) for c in compared)


def _reads(compared: ast.Compare, keys: set[str]) -> bool:
    """Whether a comparison is with the scale, or with a variable that has its value."""
    return any(
        (key_of(n) in keys and isinstance(n, (ast.Name, ast.Attribute)))
        or getattr(n, "attr", "") == "_scale"
        or (isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "get_scale")
        for n in ast.walk(compared)
    )


def _is_counted(script: Script, compared: ast.Compare) -> bool:
    """Whether a comparison only counts or prints skipped steps, `if scaler.get_scale() < before: num_skipped += 1`, or keeps averaged weights."""
    statement = script.statement(compared)
    tests = [statement]
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        flag = statement.targets[0].id
        function = next((n for n in script.above(statement) if isinstance(n, ast.FunctionDef)), script.tree)
        read = [
            n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == flag and n is not statement.targets[0]
        ]
        tests = [script.statement(n) for n in read if not isinstance(script.outline.parents.get(n), ast.FormattedValue)]
    blocks = [[*test.body, *test.orelse] if isinstance(test, ast.If) else [test] for test in tests]
    return all(isinstance(s, ast.AugAssign) or _is_print(s) or _is_average(s) for block in blocks for s in block)


def _is_average(statement: ast.stmt | None) -> bool:
    """Whether a statement updates averaged weights, `ema.update(model)`: the schedule does not wait for that."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and bool(_AVERAGES.search(text_of(call.func)))


def _is_print(statement: ast.stmt | None) -> bool:
    """Whether a statement prints or logs something."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and bool(_PRINTS.search(text_of(call.func)))


def never_float16(script: Script, step: Event) -> bool:
    """Whether a step needs float16, `if dtype == torch.float16:`, and the text shows that the dtype is always another."""
    names = [m[1] for g in step.guards if g.is_true for part in g.text.split(" and ") if (m := _IS_FLOAT16.match(part))]
    formats = [formats_of(script.outline, ast.parse(n, mode="eval").body, step.function) for n in names]
    return any(options and not options & {"float16", UNKNOWN} for options in formats)


def same_scales(script: Script) -> dict[ast.Compare, Function]:
    """The comparisons of two values of one scale that no update separates, each with its function."""
    reads = {e.node: e for e in script.events("get_scale")}
    updates = {e.node: e for e in script.events("update")}
    if len(reads) < 2 or not updates or script.has("handed", "stored"):
        return {}
    functions = {e.function for e in reads.values()}
    return {
        node: function
        for function in functions
        for node in ast.walk(function.node)
        if isinstance(node, ast.Compare) and _is_same(script, node, function, reads, updates)
    }


def settled_by(script: Script, compared: dict[ast.Compare, Function]) -> dict[Guard, ast.Compare]:
    """The conditions that always hold because a scale is compared with itself, each with that comparison."""
    settled: dict[Guard, ast.Compare] = {}
    for node, function in compared.items():
        value = isinstance(node.ops[0], _EQUAL)
        settled |= dict.fromkeys(Conditions(script.outline, function).guards(node, is_true=value), node)
        statement = script.statement(node)
        keys = {key_of(target) for target in statement.targets} if isinstance(statement, ast.Assign) else set()
        for key in keys - {""}:
            bound = script.outline.lookup(key, function)
            if all(b.value is node or constant(b.value) is value for b in bound):
                settled[Guard(key, value)] = node
    return settled


def _is_same(
    script: Script,
    compared: ast.Compare,
    function: Function,
    reads: dict[ast.AST, Event],
    updates: dict[ast.AST, Event],
) -> bool:
    """Whether both sides are the scale of one scaler, read before and after its step with no update between."""
    if len(compared.ops) != 1 or not isinstance(compared.ops[0], (*_EQUAL, *_UNEQUAL)):
        return False
    sides = [_read(script, side, function, reads) for side in (compared.left, compared.comparators[0])]
    calls = sorted((call for call in sides if call is not None), key=lambda call: call.lineno)
    if len(calls) != 2 or len({reads[call].local.scaler for call in calls}) != 1:
        return False
    first, last = calls
    scaler = reads[first].local.scaler
    if not _precedes(script, first, last) or not any(e.local.scaler == scaler for e in updates.values()):
        return False
    between = [
        n
        for n in ast.walk(function.node)
        if isinstance(n, ast.Call) and first.lineno < n.lineno <= last.lineno and n is not last
    ]
    stepped = {e.node for e in script.events("scaler_step") if e.local.scaler == scaler}
    return not stepped.isdisjoint(between) and not any(_may_update(script, n, function, scaler) for n in between)


def _read(script: Script, side: ast.expr, function: Function, reads: dict[ast.AST, Event]) -> ast.Call | None:
    """The call that reads the scale: the side of a comparison itself, or the one value of its variable."""
    key = key_of(side)
    bound = script.outline.lookup(key, function) if key and side not in reads else []
    is_bound = len(bound) == 1 and bound[0].index is None and bound[0].function is function
    node = bound[0].value if is_bound else side
    return node if isinstance(node, ast.Call) and node in reads and reads[node].function is function else None


def _precedes(script: Script, first: ast.Call, last: ast.Call) -> bool:
    """Whether each run of the later call comes after one of the earlier, in the same pass of their loops."""
    statement = script.statement(first)
    block = script.outline.parents.get(statement) if statement is not None else None
    above = list(script.above(last))
    if block not in above or first.lineno >= last.lineno:
        return False
    return not any(isinstance(node, _LOOPS) for node in above[: above.index(block)])


def _may_update(script: Script, call: ast.Call, function: Function, scaler: str) -> bool:
    """Whether a call updates the scale, or is one that may: of this file, of the object itself, or with the scaler."""
    func = call.func
    owner = key_of(func.value) if isinstance(func, ast.Attribute) else ""
    if owner == scaler:
        return isinstance(func, ast.Attribute) and func.attr in {"update", "load_state_dict"}
    is_own = owner in {"self", "super()"} or script.outline.call_target(call, function) is not None
    return is_own or key_of(func) == scaler or any(key_of(a) == scaler for a in arguments_of(call))
