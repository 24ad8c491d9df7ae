"""The number of micro-batches of a step, as scripts name it: a variable, an entry of a configuration, the length of a loop; and such loops."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event, Guard
from halfstep.check.script.objects.tensors import grad_of
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function

__all__ = [
    "STEPS",
    "divided_by_parameter",
    "dividend",
    "divides_total",
    "is_counted_between",
    "is_entry",
    "is_length",
    "is_length_of_loop",
    "may_use_gradients",
    "same_steps",
    "steps_name",
]

STEPS = "gradient_accumulation_steps"
_NUMBER = regex(r"\.(item|detach|cpu|tolist)\(|^(float|int)\(")
_COLLECTS = regex(r"grad", re.IGNORECASE)  # a function that may read the gradients before they are cleared
_CLEARS = regex(r"^(zero_grad|no_grad|clip_grad\w*|set_grad_enabled|enable_grad|requires_grad_?)$")
_SUMS = {"sum", "fsum", "mean"}


def same_steps(a: ast.expr, b: ast.expr) -> bool:
    """Whether two expressions name the same number of steps: equal literals, or variables of one name."""
    one, other = constant(a), constant(b)
    if one is not ... or other is not ...:
        return one == other
    return bool(steps_name(a)) and steps_name(a) == steps_name(b)


def is_length_of_loop(script: Script, divisor: ast.expr, call: ast.Call) -> bool:
    """Whether a loss is divided by the number of turns of the loop around its backward: `for x in parts:` and `len(parts)`."""
    loop = next((n for n in script.above(call) if isinstance(n, ast.For)), None)
    source = loop.iter if loop is not None else None
    while isinstance(source, ast.Call) and source.args and last_name(text_of(source.func)) in {"tqdm", "enumerate"}:
        source = source.args[0]
    if isinstance(divisor, ast.Call) and text_of(divisor.func) == "max":  # `max(len(parts), 1)`
        divisor = next((a for a in divisor.args if isinstance(a, ast.Call)), divisor)
    if not isinstance(divisor, ast.Call) or text_of(divisor.func) != "len" or len(divisor.args) != 1:
        return False
    return key_of(source) != "" and key_of(divisor.args[0]) == key_of(source)


def dividend(division: ast.AST) -> ast.expr | None:
    """What `a / n` or `a /= n` divides."""
    if isinstance(division, ast.BinOp):
        return division.left
    return division.target if isinstance(division, ast.AugAssign) else None


def divides_total(script: Script, division: ast.AST, event: Event) -> bool:
    """Whether a sum of numbers for the log is divided: `running_loss += loss.item()`, or `sum(losses)` of a list of them."""
    node = dividend(division)
    if node is None:
        return False
    outline = script.outline
    bound = [b.value for b in outline.lookup(text_of(node), event.function)[:MAX_BINDINGS] if b.value is not None]
    if bound:
        reset = (ast.Constant, ast.Tuple)  # `running_loss, count = 0.0, 0`
        return all(isinstance(v, reset) or _NUMBER.search(text_of(v)) for v in bound)
    is_sum = isinstance(node, ast.Call) and last_name(text_of(node.func)) in _SUMS and len(node.args) == 1
    return isinstance(node, ast.Call) and is_sum and _has_numbers(script, key_of(node.args[0]), event.function)


@lru_cache(maxsize=64)
def _has_numbers(script: Script, key: str, function: Function) -> bool:
    """Whether a function appends numbers to a list, and nothing else."""
    sites = [site.call for site in script.outline.calls.get("append", ()) if key and site.function is function]
    added = [call.args[0] for call in sites if text_of(call.func) == f"{key}.append" and call.args]
    return bool(added) and all(_NUMBER.search(text_of(value)) for value in added)


@dataclass(frozen=True)
class Divisor:
    """A parameter for the number of micro-batches, by which a function divides its loss."""

    name: str
    is_one: bool  # unless a caller passes another number


def divided_by_parameter(script: Script, cleared: Event, back: Event) -> Divisor | None:
    """The parameter by which the function of a backward divides the loss of one micro-batch, cleared in the same call."""
    function = back.function
    if cleared.function is not function or cleared.loops or back.loops or cleared.roots or cleared.accumulating:
        return None
    arguments = getattr(function.node, "args", None)
    names = [name for name in function.params if is_length(name)] if arguments is not None else []
    nodes = [n for statement in function.body for n in ast.walk(statement)] if names and back.kind == "backward" else []
    losses = [n for n in nodes if (part := dividend(n)) is not None and _is_loss(part, back)]
    divisors = {
        text_of(n.right if isinstance(n, ast.BinOp) else n.value)
        for n in losses
        if isinstance(n, ast.BinOp | ast.AugAssign)
    }
    name = next((name for name in names if name in divisors), "")
    if not name or arguments is None or any(isinstance(s, ast.For | ast.While) for s in script.above(back.node)):
        return None
    defaults = dict(zip([a.arg for a in arguments.args][::-1], arguments.defaults[::-1], strict=False))
    defaults |= {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None}
    return Divisor(name, constant(defaults.get(name)) == 1)


def _is_loss(value: ast.expr, back: Event) -> bool:
    """Whether what is divided is the loss of a backward, or another one by its name."""
    return "loss" in text_of(value).lower() or key_of(value) == back.local.subject != ""


def is_length(divisor: str) -> bool:
    """Whether a divisor is named like the number of micro-batches of a window."""
    return bool(re.search(r"accum", divisor, re.IGNORECASE)) and divisor.replace(".", "").isidentifier()


def is_entry(node: ast.expr) -> bool:
    """Whether an expression reads the steps from a configuration or an engine."""
    return isinstance(node, ast.Subscript | ast.Call) and steps_name(node) == STEPS


def steps_name(node: ast.expr) -> str:
    """The last name of a variable, of an entry `config["steps"]` or `config.get("steps", 1)`, or of `engine.steps()`."""
    key: object = ...
    if isinstance(node, ast.Subscript):
        key = constant(node.slice)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        key = constant(node.args[0]) if node.func.attr == "get" and node.args else node.func.attr
    return key if isinstance(key, str) else last_name(text_of(node))


def is_counted_between(guard: Guard, event: Event, step: Event) -> bool:
    """Whether a variable of a condition changes between two events, so that the same text is true in another iteration."""
    depth, is_called = len(step.roots), len(event.roots) > len(step.roots)
    if event.roots[:depth] != step.roots or (event.function is not step.function and not is_called):
        return True
    # What a function that the one with the step calls may do at any of its lines happens at the line of that call.
    first, last = (getattr(node, "lineno", 0) for node in (event.roots[depth] if is_called else event.node, step.node))
    stored = [n for n in ast.walk(step.function.node) if first <= getattr(n, "lineno", 0) <= last]
    stored += ast.walk(event.function.node) if is_called else ()
    names = {key_of(n) for n in stored if isinstance(getattr(n, "ctx", None), ast.Store)}
    return bool(names & set(re.findall(r"[A-Za-z_][\w.]*", guard.text)))


def may_use_gradients(loop: ast.For) -> bool:
    """Whether a loop steps, reads gradients or may leave early, so that clearing them there has a purpose."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Break | ast.Return) or (isinstance(node, ast.expr) and grad_of(node)):
            return True
        name = text_of(node.func).rsplit(".", 1)[-1] if isinstance(node, ast.Call) else ""
        if name.endswith("step") or (_COLLECTS.search(name) and not _CLEARS.search(name)):
            return True
    return False
