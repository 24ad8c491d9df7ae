"""HS163, HS164: constants that are outside the range of float16, or zero in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.logits import with_autocast
from halfstep.check.script.flow.sources import latest
from halfstep.check.script.objects.lowered import formats_of_tensor
from halfstep.check.script.objects.modules import created_classes
from halfstep.check.script.objects.outputs import Exit, leaves_autocast
from halfstep.check.script.objects.values import DTYPES, argument, constant, dtypes_of, text_of
from halfstep.check.script.objects.weights import base_of, cast_formats
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.scope import default_of

__all__ = ["RULES"]

_PRESERVES_DTYPE = frozenset({
    "abs", "norm", "sum", "mean", "pow", "square", "sqrt", "detach", "cuda", "max", "min", "clone", "contiguous",
})  # fmt: skip
_PROBABILITIES = ("softmax", "log_softmax", "sigmoid")
_CLAMPS = {"torch.clamp", "torch.clip", "torch.clamp_min"}
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
    return frozenset({"float16"} if is_cast else ()).union(*(a.dtypes for a in regions))


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


_FOCAL = """\
import torch

class FocalLoss(torch.nn.Module):
    def __init__(self, eps={eps}):
        super().__init__()
        self.eps = eps

    def forward(self, logits, targets):
        p = torch.sigmoid(logits)
        return -(targets * torch.log(p.clamp(min=self.eps))).mean()

criterion = FocalLoss()
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


class EpsUnderflowsHalf(ScriptRule):
    """A small constant that guards a float16 value against zero is itself zero in float16."""

    code = "HS164"
    name = "eps-underflows-half"
    severity = "warning"
    reason = (
        "The smallest positive float16 value is 6e-8, and 1e-8 rounds to zero. `x.half() + 1e-8` equals x, and the division it "
        "should protect gives inf or NaN."
    )
    bad = (
        "import torch\ny = x / (x.half().abs() + 1e-8)\n",
        "import torch\nz = w.to(torch.float16).clamp(min=1e-12)\n",
        "import torch\neps = torch.tensor(1e-8, dtype=torch.float16)\n",
        _FOCAL.format(eps="1e-8"),
    )
    good = (
        "import torch\ny = x / (x.half().abs() + 1e-6)\n",
        "import torch\nz = w.to(torch.float16).float().clamp(min=1e-12)\n",
        _FOCAL.format(eps="1e-6"),
        _FOCAL.format(eps="1e-8").replace("(logits)", "(logits.float())"),
    )
    references = ("https://github.com/pytorch/pytorch/issues/147437",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Constants that round to zero in float16, added to or clamping a value that is certainly float16."""
        outline = script.outline
        spots: list[tuple[ast.AST, ast.AST | None]] = []
        for name in ("half", "to"):
            for call, function in outline.calls.get(name, ()):
                if name == "half" or any(DTYPES.get(outline.names.full(a)) == "float16" for a in call.args):
                    spots += _guards_of(script, call)
                    for use in _uses_of_cast(script, call, function):
                        spots += _guards_of(script, use)
        for call, function in outline.calls.get("tensor", ()):
            if dtypes_of(outline, argument(call, None, "dtype"), function) == {"float16"}:
                spots.append((call, argument(call, 0, "data")))
        spots += _guarded_sigmoids(script)
        yield from (self._report(script, node, constant(value)) for node, value in spots if _underflows(value))
        for probability, exit_ in _probabilities_after_autocast(script):
            for node, value in _guards_of(script, probability):
                if _underflows(value):
                    yield self._report(script, node, constant(value), exit_)

    def _report(self, script: Script, node: ast.AST, number: object, exit_: Exit | None = None) -> Finding:
        unless = f" (it has that dtype unless `{exit_.model}` casts its output: {exit_.cause})" if exit_ else ""
        return self.finding(
            script.where(node),
            f"{number:g} rounds to zero in float16, whose smallest positive value is 6e-8{unless.replace('this loss', 'this line')}",
            instead="compute in float32, or use an eps of at least 1e-7",
            severity="advice" if exit_ is not None and not exit_.is_certain else None,
        )


def _underflows(value: ast.AST | None) -> bool:
    """Whether a constant is not zero, but rounds to zero in float16."""
    number = constant(value)
    return isinstance(number, float) and 0 < abs(number) < 2**-25


def _probabilities_after_autocast(script: Script) -> Iterator[tuple[ast.AST, Exit]]:
    """The uses of probabilities of logits that leave a float16 region, each with the region."""
    sites = [site for name in _PROBABILITIES for site in script.outline.calls.get(name, ())] if script.autocasts else []
    for call, function in sites:
        is_function = script.outline.names.full(call.func).startswith("torch.")
        value = argument(call, 0, "input") if is_function else getattr(call.func, "value", None)
        if value is None or argument(call, None, "dtype") is not None or with_autocast(script, call, function):
            continue
        exit_ = leaves_autocast(script, value, function, call.lineno)
        if exit_ is not None and "float16" in exit_.formats:
            yield from ((use, exit_) for use in _uses_of_value(script, call, function))


def _uses_of_value(script: Script, node: ast.AST, function: Function, depth: int = 3) -> Iterator[ast.AST]:
    """A value and the uses of its variable, also after `exp`: `probs = torch.exp(log_probs)`."""
    yield node
    parent = script.outline.parents.get(node)
    target = parent.targets[0] if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else None
    if isinstance(target, ast.Name):
        for use in (n for n in ast.walk(function.node) if isinstance(n, ast.Name) and n.id == target.id):
            values = latest(script.outline, use.id, function, use.lineno) if isinstance(use.ctx, ast.Load) else []
            if len(values) == 1 and values[0].node is parent and depth:
                yield from _uses_of_value(script, use, function, depth - 1)
    outer = script.outline.parents.get(parent) if isinstance(parent, ast.Attribute) and parent.attr == "exp" else parent
    if isinstance(outer, ast.Call) and text_of(outer.func).endswith("exp") and depth:
        yield from _uses_of_value(script, outer, function, depth - 1)


def _guarded_sigmoids(script: Script) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """The logarithms of a guarded sigmoid in a loss that runs under float16 autocast: `log(p.clamp(min=eps))`.

    A sigmoid of float16 logits stays float16 there, and only the logarithm computes in float32, after the guard.
    """
    classes = script.classes_under_autocast
    for name in (n for n, dtypes in classes.items() if dtypes == {"float16"}):
        forward = script.outline.classes.get(name, {}).get("forward")
        if (
            forward is None
            or "sigmoid" not in (text := ast.unparse(forward.node))
            or "float32" in text
            or ".float()" in text
        ):
            continue
        probabilities: set[str] = set()
        for node in ast.walk(forward.node):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and _is_probability(node.value, probabilities):
                probabilities.add(key_of(node.targets[0]))
        for call in (n for n in ast.walk(forward.node) if isinstance(n, ast.Call)):
            guarded = call.args[0] if text_of(call.func) == "torch.log" and call.args else None
            if guarded is None and isinstance(call.func, ast.Attribute) and call.func.attr == "log":
                guarded = call.func.value
            for value in _limits(guarded, probabilities - {""}):
                yield call, _default(script, value, forward)


def _is_probability(node: ast.expr, known: set[str]) -> bool:
    """Whether a value is a sigmoid, or one minus it."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and constant(node.left) == 1:
        return _is_probability(node.right, known)
    is_call = isinstance(node, ast.Call) and text_of(node.func).rsplit(".", 1)[-1] == "sigmoid"
    return is_call or key_of(node) in known


def _limits(node: ast.expr | None, probabilities: set[str]) -> Iterator[ast.expr]:
    """The constant of `p + eps` and `p.clamp(min=eps)`, where p is a sigmoid."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _is_probability(node.left, probabilities):
        yield node.right
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"clamp", "clip"}:
        low = argument(node, 0, "min")
        if low is not None and _is_probability(node.func.value, probabilities):
            yield low


def _default(script: Script, value: ast.expr, method: Function) -> ast.expr:
    """A constant, also as `self.eps` that `__init__` sets from a parameter with a default."""
    key = key_of(value)
    init = script.outline.classes.get(method.cls, {}).get("__init__")
    if not key.startswith("self.") or init is None:
        default = default_of(method, key) if key in method.params else None
        return default if default is not None else value
    for node in ast.walk(init.node):
        if isinstance(node, ast.Assign) and any(key_of(t) == key for t in node.targets):
            default = default_of(init, key_of(node.value)) if key_of(node.value) in init.params else None
            return default if default is not None else node.value
    return value


def _uses_of_cast(script: Script, call: ast.Call, function: Function) -> list[ast.Name]:
    """The later uses of a variable whose value is this cast: `x = x.half()`; none in a script with autocast."""
    parent = script.outline.parents.get(call)
    target = parent.targets[0] if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else None
    if not isinstance(target, ast.Name) or script.autocasts:
        return []
    uses = [n for n in ast.walk(function.node) if isinstance(n, ast.Name) and n.id == target.id and n is not target]
    uses = [n for n in uses if n.lineno > call.lineno and isinstance(n.ctx, ast.Load)]
    return [n for n in uses if formats_of_tensor(script, n, function) == {"float16"}]


def _guards_of(script: Script, node: ast.AST) -> list[tuple[ast.AST, ast.AST | None]]:
    """Additions and clamps applied directly to a float16 value."""
    parents = script.outline.parents
    while True:
        parent = parents.get(node)
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add):
            return [(parent, parent.right if parent.left is node else parent.left)]
        if (
            isinstance(parent, ast.Call)
            and script.outline.names.full(parent.func) in _CLAMPS
            and node in parent.args[:1]
        ):
            return [(parent, argument(parent, 1, "min"))]
        call = parents.get(parent) if isinstance(parent, ast.Attribute) and parent.value is node else None
        if not isinstance(parent, ast.Attribute) or not isinstance(call, ast.Call):
            return []
        if parent.attr in {"clamp", "clamp_", "clamp_min", "clip"}:
            return [(call, argument(call, 0, "min"))]
        if parent.attr not in _PRESERVES_DTYPE:
            return []
        node = call


RULES: tuple[type[Rule], ...] = (MaskOverflowsHalf, EpsUnderflowsHalf)
