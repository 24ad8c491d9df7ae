"""What ends a run for gradients that are not finite: a test that raises or exits, an assertion, a clip with `error_if_nonfinite`.

A test of their norm may also keep a step from running.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function

__all__ = ["raising", "tests_norm"]

_NOT_FINITE = regex(r"is_?(finite|nan|inf)|non_?finite|has_?(nan|inf)|nan_?or_?inf|all_?finite", re.IGNORECASE)
# `norm == float("inf")`, `not (norm < math.inf)`, `norm != norm`.
_INFINITY = r"(float\(['\"]\+?inf|(math|np|numpy|torch)\.inf\b)"
_COMPARED = regex(rf"[<>=]=? {_INFINITY}|\b([\w.]+) != \3(?![\w.(])")
_GRADIENT = regex(r"grad|norm", re.IGNORECASE)
_LOSS = regex(r"loss", re.IGNORECASE)
# A limit on how many in a row are accepted, or a test of the scale itself.
_LENIENT = regex(r"consecutive|count|num_|patience|max_|limit|scale\b|get_scale|streak|skipped", re.IGNORECASE)
_EXITS = {"exit", "quit", "sys.exit", "os._exit", "os.abort"}
_TESTS = {f"{module}.{name}" for module in ("torch", "math", "np") for name in ("isnan", "isinf", "isfinite")}
_NORM = regex(r"^[\w.]*norm\w*$", re.IGNORECASE)
_TO_NUMBER = {"item", "all", "any", "cpu", "detach"}
_CONVERTS = {"bool", "float", "torch.tensor", "torch.as_tensor"}
_INTERRUPTS = {"KeyboardInterrupt", "SystemExit", "StopIteration"}  # what a clip or a test of gradients does not raise


def raising(script: Script, function: Function) -> Iterator[tuple[int, ast.AST]]:
    """What raises for a gradient that is not finite, in a function or in one that it calls, with the line of the function."""
    for place in _raising_in(script, function):
        yield getattr(place, "lineno", 0), place
    unscaling = {e.function for e in script.events("unscale")}
    for node in ast.walk(function.node):
        target = script.outline.call_target(node, function) if isinstance(node, ast.Call) else None
        if target is not None and target is not function and target not in unscaling:
            yield from ((getattr(node, "lineno", 0), inner) for inner in _raising_in(script, target))
            if (
                isinstance(node, ast.Call)
                and _raises_for(script, node, target, function)
                and not _is_caught(script, node)
            ):
                yield node.lineno, node


def _raises_for(script: Script, call: ast.Call, target: Function, function: Function) -> bool:
    """Whether a function raises for an argument that is not finite, and a call passes gradients or their norm for it."""
    offset = target.method and target.params[:1] in {("self",), ("cls",)}
    for name in _required_finite(target):
        value = argument(call, target.params.index(name) - offset, name)
        texts = [text_of(value)]
        if isinstance(value, ast.Name):
            texts += map(
                text_of, _values_of(script, [value.id], value, function)[-1:]
            )  # `total = clip_grad_norm_(...)`
        if any(map(_GRADIENT.search, texts)) and not any(map(_LOSS.search, texts)) and not _LENIENT.search(texts[0]):
            return True
    return False


@lru_cache(maxsize=1024)  # a file may call one function very often
def _required_finite(function: Function) -> tuple[str, ...]:
    """The parameters for which a function raises if they are not finite."""
    names: set[str] = set()
    for test in (n for n in ast.walk(function.node) if isinstance(n, (ast.If, ast.Assert))):
        raises = isinstance(test, ast.Assert) or any(map(_ends_run, test.body))
        if raises and _is_of_finite(test.test) and not _LENIENT.search(text_of(test.test)):
            names |= _names_in(test.test) & set(function.params)
    return tuple(sorted(names))


def _raising_in(script: Script, function: Function) -> Iterator[ast.AST]:
    """The lines of a function that end the run for a gradient that is not finite."""
    for node in ast.walk(function.node):
        place: ast.AST | None = None
        if isinstance(node, ast.If):
            ends = next(filter(_ends_run, node.body), None)
            place = ends if ends is not None and _tests_gradients(script, node.test, function) else None
        elif (isinstance(node, ast.Assert) and _tests_gradients(script, node.test, function)) or (
            isinstance(node, ast.Call)
            and text_of(node.func).endswith("clip_grad_norm_")
            and _is_strict(node)
            and not _is_tested(script, node, function)
        ):
            place = node
        if place is not None and not _is_caught(script, place) and not _is_without_scaler(script, place):
            yield place


def _ends_run(statement: ast.stmt) -> bool:
    """Whether a statement raises, or exits the program."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(statement, ast.Raise) or (isinstance(call, ast.Call) and key_of(call.func) in _EXITS)


def _is_caught(script: Script, place: ast.AST) -> bool:
    """Whether the training loop continues after an exception: a `try` in it catches, and does not raise again or leave."""
    inner, attempts = place, []
    for outer in script.above(place):
        if isinstance(outer, ast.Try) and inner in outer.body:
            attempts.append(outer)
        elif isinstance(outer, (ast.For, ast.While)) and any(map(_continues, attempts)):
            return True
        inner = outer
    return False


def _continues(attempt: ast.Try) -> bool:
    """Whether a handler of errors neither raises nor leaves the loop."""
    handlers = [h for h in attempt.handlers if key_of(h.type) not in _INTERRUPTS]
    leaves = (ast.Raise, ast.Break, ast.Return)
    return any(
        not any(isinstance(n, leaves) or (isinstance(n, ast.stmt) and _ends_run(n)) for n in ast.walk(handler))
        for handler in handlers
    )


def _is_tested(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether a clip is under a test of what is finite: directly, or by a function of the file."""
    for test in (outer.test for outer in script.above(call) if isinstance(outer, ast.If)):
        targets = [script.outline.call_target(n, function) for n in ast.walk(test) if isinstance(n, ast.Call)]
        texts = [text_of(test), *(ast.unparse(target.node) for target in targets if target is not None)]
        if any(map(_NOT_FINITE.search, texts)):
            return True
    return False


def _is_strict(call: ast.Call) -> bool:
    """Whether a clip raises for a norm that is not finite."""
    return constant(argument(call, 3, "error_if_nonfinite")) is True


def _tests_gradients(script: Script, test: ast.expr, function: Function) -> bool:
    """Whether a test is whether gradients are finite, directly or through variables: `bad = first_nonfinite_grad(model)`."""
    text = text_of(test)
    names = _names_in(test)
    if any(_LENIENT.search(t) for t in (text, *names)) or _LOSS.search(text):
        return False
    values = _values_of(script, names, test, function)
    texts = [text, *map(text_of, values)]
    if (_is_of_finite(test) or any(_NOT_FINITE.search(t) for t in texts)) and any(_GRADIENT.search(t) for t in texts):
        return True
    if _is_set_for_gradients(script, names, test, function):
        return True
    # `flag = torch.tensor(1 if bad else 0)`, which ranks reduce: one variable further.
    further = [name for value in values if not isinstance(value, ast.Compare) for name in _names_in(value) - {"torch"}]
    tests = [v for v in _values_of(script, further, test, function) if _NOT_FINITE.search(text_of(v))]
    return any(
        _GRADIENT.search(text_of(t)) and not _LOSS.search(text_of(t)) and not _LENIENT.search(text_of(t)) for t in tests
    )


def _is_without_scaler(script: Script, place: ast.AST) -> bool:
    """Whether a line runs only if the scaler is disabled, in runs where no overflow is normal."""
    options = {scaler.enabled for scaler in script.scalers}
    false: set[str] = set()
    for guard in conditions_of(script.outline, place):
        with contextlib.suppress(SyntaxError):  # `except@12`
            false |= set(_false_in(ast.parse(guard.text, mode="eval").body, is_true=guard.is_true))
    return any(text.endswith(".is_enabled()") or text in options for text in false)


def _false_in(test: ast.expr, *, is_true: bool) -> Iterator[str]:
    """The parts of a test that are false if the test has this value."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _false_in(test.operand, is_true=not is_true)
    elif isinstance(test, ast.BoolOp):
        if isinstance(test.op, ast.And) is is_true:
            for part in test.values:
                yield from _false_in(part, is_true=is_true)
    elif not is_true:
        yield text_of(test)


def _is_of_finite(test: ast.expr) -> bool:
    """Whether a test is whether something is inf or NaN, by a function or by a comparison."""
    text = text_of(test)
    return bool(_NOT_FINITE.search(text) or _COMPARED.search(text))


def _names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _values_of(script: Script, names: Iterable[str], test: ast.expr, function: Function) -> list[ast.expr]:
    """What a function assigns to variables before a test."""
    bound = [b for name in sorted(names) for b in script.outline.bindings.get(name, ())[:MAX_BINDINGS]]
    values = [
        b.value
        for b in bound
        if b.function is function and getattr(b.node, "lineno", 0) <= test.lineno and b.value is not None
    ]
    return values[-3:]


def _is_set_for_gradients(script: Script, names: Iterable[str], test: ast.expr, function: Function) -> bool:
    """Whether a variable is set, or a list filled, only for gradients that are not finite: `if isnan(p.grad).any(): bad = True`."""
    outline = script.outline
    places: list[ast.AST] = [
        b.node
        for name in names
        for b in outline.bindings.get(name, ())[:MAX_BINDINGS]
        if b.function is function and constant(b.value) is True
    ]
    places += [
        call
        for call, inner in outline.calls.get("append", ())
        if inner is function and isinstance(call.func, ast.Attribute) and key_of(call.func.value) in set(names)
    ]
    guards = [g.text for p in places if getattr(p, "lineno", 0) < test.lineno for g in conditions_of(outline, p)]
    return any(_NOT_FINITE.search(g) and _GRADIENT.search(g) and not _LOSS.search(g) for g in guards)


def tests_norm(script: Script, step: Event) -> bool:
    """Whether a step runs only for a norm of the gradients that is finite: after that its scaler skips nothing."""
    known: set[tuple[str, bool]] = set()
    for guard in step.guards:
        if guard.text.isidentifier() or _NOT_FINITE.search(guard.text):
            with contextlib.suppress(SyntaxError):  # `except@12`
                test = ast.parse(guard.text, mode="eval").body
                known.update(_tests_of_norm(script, test, step.function, is_true=guard.is_true))
    return ("isfinite", True) in known or {("isnan", False), ("isinf", False)} <= known


def _tests_of_norm(
    script: Script, test: ast.expr, function: Function, *, is_true: bool, depth: int = 4
) -> Iterator[tuple[str, bool]]:
    """The functions `isfinite`, `isnan` and `isinf` that a test calls for a norm, each with what it has returned."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _tests_of_norm(script, test.operand, function, is_true=not is_true, depth=depth)
    elif isinstance(test, ast.BoolOp):
        if isinstance(test.op, ast.And) is is_true:
            for part in test.values:
                yield from _tests_of_norm(script, part, function, is_true=is_true, depth=depth)
    elif isinstance(test, ast.Name) and depth:
        values = script.outline.values(test.id, function)
        for value in values if len(values) == 1 else ():
            yield from _tests_of_norm(script, value, function, is_true=is_true, depth=depth - 1)
    elif (value := _plain_number(test)) is not test:
        yield from _tests_of_norm(script, value, function, is_true=is_true, depth=depth)
    elif isinstance(test, ast.Call) and text_of(test.func) in _TESTS and any(map(_is_norm, test.args)):
        yield text_of(test.func).rpartition(".")[2], is_true


def _is_norm(node: ast.expr) -> bool:
    return bool(_NORM.search(key_of(_plain_number(node))))


def _plain_number(node: ast.expr) -> ast.expr:
    """The expression without conversions: `norm` of `float(norm.detach())` or `torch.tensor(norm)`, `isfinite(norm)` of `bool(isfinite(norm).item())`."""
    while isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in _TO_NUMBER and not node.args:
            node = node.func.value
        elif key_of(node.func) in _CONVERTS and len(node.args) == 1:
            node = node.args[0]
        else:
            break
    return node
