"""HS163: constants that are outside the range of float16."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.objects.lowered import formats_of_tensor
from halfstep.check.script.objects.modules import created_classes
from halfstep.check.script.objects.values import argument, autocasts_of, constant, dtypes_of, text_of
from halfstep.check.script.objects.weights import base_of, cast_formats
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES"]

_ATTENTION = """\
import torch
def attention(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(-2, -1)) / 8
    scores = scores.masked_fill(mask == 0, {value})
    return torch.matmul(scores.softmax(-1), v)
with torch.autocast("cuda", dtype=torch.float16):
    y = attention(q, k, v, mask)
"""


# Functions that fill a tensor, each with the position of the value among the arguments of the method.
_FILLS = {"masked_fill": 1, "masked_fill_": 1, "full": 1, "full_like": 1, "new_full": 1, "fill_": 0}
_CONTEXT = regex(r"cast|amp|ctx|context|precision|accelerat|fabric", re.IGNORECASE)
_LARGEST = 3.4028234663852886e38  # of float32
_SINGLE = {"torch.float32", "torch.float"}


class MaskOverflowsHalf(ScriptRule):
    """A float16 tensor is filled with a value outside the range of float16."""

    code = "HS163"
    name = "mask-overflows-half"
    severity = "warning"
    reason = (
        "The largest float16 value is 65504. Under autocast the scores of a matmul are float16, and `masked_fill` with -1e9 raises RuntimeError: "
        "value cannot be converted to type c10::Half without overflow. So do `full`, `full_like`, `new_full` and `fill_`. (A sum, `where` and "
        "an assignment to `scores[mask]` give -inf instead.)"
    )
    bad = (
        _ATTENTION.format(value="-1e9"),
        _ATTENTION.format(value="float('-1e20')"),
        _ATTENTION.format(value="-1e10").replace(
            "return torch.matmul(scores.softmax(-1), v)", "scores = torch.softmax(scores, -1)"
        ),
    )
    good = (
        _ATTENTION.format(value="torch.finfo(scores.dtype).min"),
        _ATTENTION.format(value="float('-inf')"),
        _ATTENTION.format(value="-1e9").replace("float16", "bfloat16"),
    )
    references = ("https://docs.pytorch.org/docs/stable/type_info.html#torch.torch.finfo",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Fill values beyond 65504 for a tensor that is float16, or for a product in a script that runs in float16."""
        sites = [(name, *site) for name in _FILLS for site in script.outline.calls.get(name, ())]
        for name, call, function in sites:
            receiver, value, dtype = _parts(script, name, call)
            number = _number(script, value, function)
            if number is None or not 65504 < abs(number) < float("inf"):
                continue
            if dtype is not None:
                formats = dtypes_of(script.outline, dtype, function)
            else:
                formats = formats_of_tensor(script, receiver, function) if receiver is not None else frozenset()
                if not formats and receiver is not None and name.startswith("masked_fill"):
                    formats = _product_formats(script, receiver, function, call.lineno)
            if "float16" in formats:
                yield self._report(script, call, receiver, number, is_certain=formats == {"float16"})

    def _report(
        self, script: Script, call: ast.Call, receiver: ast.expr | None, number: float, *, is_certain: bool
    ) -> Finding:
        key = key_of(receiver) if receiver is not None else ""
        return self.finding(
            script.where(call),
            f"{number:g} is outside the range of float16 (maximum 65504): this raises RuntimeError{'' if is_certain else ' in float16'}",
            instead=f"torch.finfo({key}.dtype).min" if key else "torch.finfo(torch.float16).min",
            severity=None if is_certain else "advice",
        )


def _parts(script: Script, name: str, call: ast.Call) -> tuple[ast.expr | None, ast.expr | None, ast.expr | None]:
    """The tensor whose dtype a fill has, the value, and the dtype if it is an argument."""
    dtype = argument(call, None, "dtype")
    is_function = script.outline.names.full(call.func).startswith("torch.")
    if name in {"full", "full_like"}:
        tensor = argument(call, 0, "input") if name == "full_like" else None
        return (tensor, argument(call, 1, "fill_value"), dtype) if is_function else (None, None, None)
    if is_function:
        return argument(call, 0, "input"), argument(call, _FILLS[name] + 1, "value"), dtype
    tensor = call.func.value if isinstance(call.func, ast.Attribute) else None
    return tensor, argument(call, _FILLS[name], "fill_value" if name == "new_full" else "value"), dtype


def _number(script: Script, node: ast.expr | None, function: Function) -> float | None:
    """A number, also written as `float("-1e20")`, `torch.finfo(torch.float32).min` or a constant of the file."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        positive = _number(script, node.operand, function)
        return -positive if positive is not None else None
    if isinstance(node, ast.Call) and key_of(node.func) == "float" and len(node.args) == 1:
        node = node.args[0]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call) and node.attr in {"min", "max"}:
        limits, dtype = node.value, argument(node.value, 0, "type")
        is_limits = script.outline.names.full(limits.func) == "torch.finfo"
        if not is_limits or dtype is None or script.outline.names.full(dtype) not in _SINGLE:
            return None
        return -_LARGEST if node.attr == "min" else _LARGEST
    key = key_of(node) if node is not None else ""
    if (key.isidentifier() and key not in function.params) or key.startswith("self."):
        values = script.outline.values(key, function)
        node = values[0] if len(values) == 1 else None
    value = constant(node)
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None


def _product_formats(script: Script, node: ast.expr, function: Function, line: int) -> frozenset[str]:
    """The dtypes of the regions of a script, for scores that are a product; empty if none is float16."""
    regions = [a for a in script.autocasts if a.enabled != "no"]
    is_cast = function.cls in _half_classes(script) if function.cls else False
    is_lowered = is_cast or any("float16" in a.dtypes for a in regions)
    if not is_lowered or not _from_matmul(script, node, function, line):
        return frozenset()
    if not is_cast and not _may_run_lowered(script, node, function):
        return frozenset()
    return frozenset({"float16"} if is_cast else ()).union(*(a.dtypes for a in regions))


def _may_run_lowered(script: Script, node: ast.AST, function: Function, depth: int = 4) -> bool:
    """Whether a node may run in an autocast region: it stands in one, or its function is called from one.

    A model runs its methods from elsewhere, and so does whoever receives a function as a value. A function that this file
    never calls is another file's concern.
    """
    outline = script.outline
    if _may_be_in_region(script, node, function):
        return True
    if function is outline.module:
        return False
    if function.cls or not depth:
        return True
    sites = [s for s in outline.calls.get(function.name, ()) if outline.call_target(s.call, s.function) is function]
    if outline.loads[function.name] > len(sites):
        return True  # passed on
    return any(_may_run_lowered(script, site.call, site.function, depth - 1) for site in sites)


def _may_be_in_region(script: Script, node: ast.AST, function: Function) -> bool:
    """Whether a `with` block or a decorator around a node is an autocast region, or may be one."""
    parent = script.outline.parents.get(node)
    while parent is not None and parent is not function.node:
        if isinstance(parent, (ast.With, ast.AsyncWith)) and any(
            _may_be_region(script, item.context_expr, function) for item in parent.items
        ):
            return True
        parent = script.outline.parents.get(parent)
    return any(_may_be_region(script, d, function) for d in getattr(function.node, "decorator_list", ()))


def _may_be_region(script: Script, context: ast.expr, function: Function) -> bool:
    """Whether a context is a region that may be float16; one of another file, `with self.amp_context():`, may be too."""
    regions = autocasts_of(script.outline, context, function)
    if regions:
        return any("float16" in a.dtypes and a.enabled != "no" for a in regions)
    return bool(_CONTEXT.search(text_of(context)))


def _half_classes(script: Script) -> set[str]:
    """The classes of this file whose objects are cast to float16, and those that they are made of."""
    outline = script.outline
    classes: set[str] = set()
    for call, function in (site for name in ("half", "to") for site in outline.calls.get(name, ())):
        if cast_formats(outline, call, function) != {"float16"}:
            continue
        base = base_of(call)
        made = [base] if isinstance(base, ast.Call) else []
        made += [c.node for c in script.training.model(base, function).creations] if key_of(base) else []
        classes |= {cls for node in made for cls in created_classes(outline, node)}
    pending = list(classes)
    while pending:
        init = outline.classes.get(pending.pop(), {}).get("__init__")
        parts = {key_of(n.func) for n in ast.walk(init.node) if isinstance(n, ast.Call)} if init is not None else set()
        new = (parts & outline.classes.keys()) - classes
        classes |= new
        pending += new
    return classes


def _from_matmul(script: Script, node: ast.expr, function: Function, line: int) -> bool:
    """Whether scores are a matrix product that is not cast to float32 before a line."""
    options = [node]
    key = key_of(node)
    if key:
        options = [
            b.value
            for b in script.outline.lookup(key, function)
            if b.function is function and b.value is not None and b.node.lineno < line  # type: ignore[attr-defined]
        ]
    text = " ".join(ast.unparse(option) for option in options)
    products = ("matmul(", "bmm(", "einsum(", "baddbmm(", " @ ")
    cast = re.search(r"\.float\(|float32|softmax", text)
    return any(p in text for p in products) and cast is None


RULES: tuple[type[Rule], ...] = (MaskOverflowsHalf,)
