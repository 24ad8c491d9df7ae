"""The number of micro-batches of a step, as scripts name it: a variable, an entry of a configuration, the length of a loop."""

from __future__ import annotations

import ast
from functools import lru_cache

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function

__all__ = ["STEPS", "dividend", "divides_total", "is_entry", "is_length_of_loop", "same_steps", "steps_name"]

STEPS = "gradient_accumulation_steps"
_NUMBER = regex(r"\.(item|detach|cpu|tolist)\(|^(float|int)\(")
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
