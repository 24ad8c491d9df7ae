"""Skipped iterations: tests of the gradients that leave out the rest of one, and tests of the scale after the scaler has skipped a step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from halfstep.check.regex import regex
from halfstep.check.script.flow.conditions import Conditions
from halfstep.check.script.flow.event import Event, Guard, is_accumulation
from halfstep.check.script.flow.order import is_amp
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.formats import formats_of
from halfstep.check.script.objects.values import UNKNOWN, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import blocks_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function

__all__ = [
    "find_branch",
    "find_skip",
    "is_past",
    "never_float16",
    "reads_gradients",
    "reads_scale",
    "same_scales",
    "settled_by",
]

MAX_TESTS = 20  # that are inspected after one `unscale_`; only generated code has more
_FINITE = regex(r"finite|is_?nan|is_?inf|has_(nan|inf)", re.IGNORECASE)
_INFINITE = regex(r"finite|inf(?!er|o)|overflow", re.IGNORECASE)
_NORM = regex(r"grad_?norm|total_norm|^norm$|gnorm", re.IGNORECASE)
_STEP = regex(r"step|batch|iter", re.IGNORECASE)  # names of functions that run one iteration
_LOGS = regex(r"log|print|warn|zero_grad|record|track", re.IGNORECASE)
_NAMED: dict[type, str] = {ast.Name: "id", ast.Attribute: "attr", ast.keyword: "arg"}
_PRINTS = regex(r"^print$|(^|\.)(log\w*|write|add_scalar|debug|info|warn(ing)?)$")
_AVERAGES = regex(r"(^|[._])(ema|teacher)_?\w*\.(update|step)\w*$|^update_(ema|teacher)$", re.IGNORECASE)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_IS_FLOAT16 = regex(r"^\(?([A-Za-z_][\w.]*) == torch\.(?:float16|half)\)?$")
_EQUAL = (ast.LtE, ast.GtE, ast.Eq)
_UNEQUAL = (ast.Lt, ast.Gt, ast.NotEq)


def reads_gradients(script: Script, test: ast.If, event: Event) -> bool:
    """Whether a test is about inf in gradients, not about the loss: `p.grad`, a helper of the file, or a flag set from them."""
    parts: list[ast.AST] = [test.test, *_values(script, test, event.function.node)]
    calls = [node for part in parts for node in ast.walk(part) if isinstance(node, ast.Call)]
    targets = [script.outline.call_target(call, event.function) for call in calls]
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

    Its branch ends in `continue` in a loop, and in `return` in a function that a loop calls once per iteration. With `is_any`
    the test before a `continue` may be about anything but mixed precision and the end of a window.
    """
    start = node = _place(script, event, depth)
    above = list(script.above(start))
    in_loop = any(isinstance(parent, _LOOPS) for parent in above)
    if not in_loop and not _is_repeated(script, event, depth, above[-1] if above else None):
        return None
    leave = ast.Continue if in_loop else ast.Return
    for parent in above:
        if isinstance(parent, (ast.Try, ast.TryStar)) and parent.finalbody:
            return None  # `finally` runs after `return` too
        block = next((b for b in blocks_of(parent) if node in b), [])
        rest = block[block.index(node) + (node is not start) :] if block else []
        tests = [test for s in rest if isinstance(s, ast.If) for test in _leaving(script, s, leave, event)]
        for test in tests[:MAX_TESTS]:
            if _is_skip(script, test, event, above[-1], is_any=is_any and in_loop):
                return test
        if isinstance(parent, _LOOPS) or not isinstance(parent, ast.stmt):
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
    if not in_loop and not _is_repeated(script, event, depth, above[-1] if above else None):
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
            return test if not _touches(script, other, event) else None
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
    own = next((f for f in script.outline.functions if f.node is function), script.outline.module)
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
    return any(_is_elsewhere(script, call, event) for call in calls)


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


def _is_elsewhere(script: Script, call: ast.Call, event: Event) -> bool:
    """Whether a call is of an inherited method that this file does not define and that may update the scaler."""
    key = key_of(call.func)
    inherited = key.startswith("self.") and key.count(".") == 1 and not _LOGS.search(key)
    return inherited and script.outline.call_target(call, event.function) is None


def reads_scale(script: Script) -> bool:
    """Whether the script compares the scale, or the optimizer's count of steps, by which a skipped step is recognised.

    Printing the scale is no comparison, and counting the skipped steps does not keep the schedule from advancing.
    """
    if not {"_scale", "_step_count"}.isdisjoint(script.outline.loads):
        return True
    calls = [e.node for e in script.events("get_scale")]
    alone = [c for c in calls if not any(isinstance(n, ast.Compare) for n in script.above(c))]
    if any(not isinstance(script.statement(call), (ast.Assign, ast.Expr)) for call in alone):
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
