"""HS164: small constants that float16 does not keep apart from zero or one."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.logits import with_autocast
from halfstep.check.script.flow.sources import latest
from halfstep.check.script.objects.lowered import RAISED, formats_of_tensor, has_dtype_of, names_with_dtype
from halfstep.check.script.objects.outputs import Exit, leaves_autocast
from halfstep.check.script.objects.values import DTYPES, argument, constant, dtypes_of, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import nodes_in
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.scope import default_of

__all__ = ["RULES"]

_PRESERVES_DTYPE = frozenset({
    "abs", "norm", "sum", "mean", "pow", "square", "sqrt", "detach", "cuda", "max", "min", "clone", "contiguous",
})  # fmt: skip
_PROBABILITIES = ("softmax", "log_softmax", "sigmoid")
_CLAMPS = {"torch.clamp", "torch.clip", "torch.clamp_min"}
_MOVES = frozenset({"clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_", "add", "add_", "maximum"})
# What a constant that rounds to zero is written with: three patterns that are searched for fast, because each starts with a letter.
_TINY = (regex(r"[eE]-0*(?:[7-9]|[1-9]\d)"), regex(r"0\.0{7}"), regex(r"\*\*\s*\(?-[1-9]\d*(?![.\d])"))
_HALF = regex(r"\.half\(|(?<!b)float16")
_COMPLEMENT = regex(r"\blog\(\s*1(\.0*)? *- ")  # `log(1 - p)`
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


_HEATMAP = """\
import torch

def focal_loss(logits, target):
    p = torch.clamp(torch.sigmoid({logits}), min=1e-4, max={high})
    return -(target * torch.log(p) + (1 - target) * torch.log(1 - p)).mean()

scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = focal_loss(model(x), y)
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
        "should protect gives inf or NaN. Below 1 the values are 1/2048 apart, so a limit of 1 - 1e-4 is 1. Under autocast the sigmoid of "
        "float16 logits is float16, and a clamp of it does not keep the logarithm of p or 1 - p finite."
    )
    bad = (
        "import torch\ny = x / (x.half().abs() + 1e-8)\n",
        "import torch\nz = w.to(torch.float16).clamp(min=1e-12)\n",
        "import torch\neps = torch.tensor(1e-8, dtype=torch.float16)\n",
        _FOCAL.format(eps="1e-8"),
        _HEATMAP.format(high="1 - 1e-4", logits="logits"),
    )
    good = (
        "import torch\ny = x / (x.half().abs() + 1e-6)\n",
        "import torch\nz = w.to(torch.float16).float().clamp(min=1e-12)\n",
        _FOCAL.format(eps="1e-6"),
        _FOCAL.format(eps="1e-8").replace("(logits)", "(logits.float())"),
        _FOCAL.format(eps="1e-8").replace("(logits)", "((logits * targets).sum(dim=1))"),
        _HEATMAP.format(high="1 - 1e-4", logits="logits.float()"),
        _HEATMAP.format(high="1 - 1e-3", logits="logits"),
        _FOCAL.format(eps="1e-8").replace("(logits)\n", "(logits)\n        p = p + 1e-3\n"),
        "import torch\nx = x.half()\nx += 1\ny = x.clamp(min=1e-12)\n",
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
        spots += _guards_of_parameters(script)
        yield from (self._report(script, node, constant(value)) for node, value in spots if _underflows(value))
        for call, eps in _rounded_limits(script):
            yield self.finding(
                script.where(call),
                f"1 - {eps:g} rounds to 1 in float16, which this sigmoid has under autocast: the logarithm of 1 - p is -inf for large logits",
                instead="compute the loss in float32, on logits.float(), or with logsigmoid",
            )
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
    """The guards of a sigmoid before a logarithm in a loss that runs under float16 autocast: `log(p.clamp(min=eps))`.

    A sigmoid of float16 logits stays float16 there, and only the logarithm computes in float32, after the guard.
    """
    for function in _losses_in_float16(script):
        probabilities: set[str] = set()
        for node in ast.walk(function.node):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and _is_probability(node.value, probabilities):
                probabilities.add(key_of(node.targets[0]))
        probabilities -= _moved(function)
        for call in (n for n in ast.walk(function.node) if isinstance(n, ast.Call)):
            guarded = call.args[0] if text_of(call.func) == "torch.log" and call.args else None
            if guarded is None and isinstance(call.func, ast.Attribute) and call.func.attr == "log":
                guarded = call.func.value
            for value in _limits(guarded, probabilities - {""}):
                yield call, _default(script, value, function)


def _rounded_limits(script: Script) -> Iterator[tuple[ast.Call, float]]:
    """The clamps of a sigmoid to at most 1 - eps, in such a loss, where that is 1 in float16 and `log(1 - p)` follows."""
    for function in _losses_in_float16(script):
        for call in (n for n in ast.walk(function.node) if isinstance(n, ast.Call)):
            clamped = _clamped(script, call)
            if clamped is None or not _is_probability(clamped[0], set()) or clamped[2] is None:
                continue
            high = clamped[2]
            if isinstance(high, ast.BinOp) and isinstance(high.op, ast.Sub) and constant(high.left) == 1:
                eps = constant(_default(script, high.right, function))
            else:
                number = constant(_default(script, high, function))
                eps = 1 - number if isinstance(number, float) else None
            if isinstance(eps, float) and 0 < eps <= 2**-12 and _COMPLEMENT.search(script.source.text):
                yield call, eps


def _losses_in_float16(script: Script) -> Iterator[Function]:
    """The functions that compute a sigmoid of what they get, as it is, and that run under float16 autocast alone."""
    if not script.autocasts or "sigmoid" not in script.source.text:
        return
    classes = script.classes_under_autocast
    only = all(a.dtypes == {"float16"} for a in script.autocasts if a.enabled != "no")
    for function in script.outline.functions:
        if isinstance(function.node, ast.Module) or function.name in {"forward", "__init__"}:
            continue
        if only and function in script.functions_in_autocast and _is_uncast(function):
            yield function
    for name in (n for n, dtypes in classes.items() if dtypes == {"float16"}):
        forward = script.outline.classes.get(name, {}).get("forward")
        if forward is not None and _is_uncast(forward):
            yield forward


def _is_uncast(function: Function) -> bool:
    """Whether a function computes the sigmoid of logits that it does not cast, and leaves autocast on.

    A sum or a norm under autocast is float32 already: the score of a pair of embeddings.
    """
    text = ast.unparse(function.node)
    if "sigmoid" not in text or "enabled=False" in text:
        return False
    operands = [_operand(n) for n in ast.walk(function.node) if isinstance(n, ast.Call)]
    names = {key_of(n) for part in operands if part is not None for n in ast.walk(part)} - {""}
    casts = [n for n in ast.walk(function.node) if isinstance(n, ast.Assign) and {key_of(t) for t in n.targets} & names]
    parts = [part for part in (*operands, *(n.value for n in casts)) if part is not None]
    raised = [
        n for part in parts for n in ast.walk(part) if isinstance(n, ast.Call) and last_name(text_of(n.func)) in RAISED
    ]
    return not raised and not any("float" in text or "double" in text for text in map(text_of, parts))


def _operand(call: ast.Call) -> ast.expr | None:
    """The logits of `torch.sigmoid(x)` and `x.sigmoid()`; None for another call."""
    if text_of(call.func).rsplit(".", 1)[-1] not in {"sigmoid", "sigmoid_"}:
        return None
    return call.args[0] if call.args else call.func.value if isinstance(call.func, ast.Attribute) else None


def _is_probability(node: ast.expr, known: set[str]) -> bool:
    """Whether a value is a sigmoid, or one minus it."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and constant(node.left) == 1:
        return _is_probability(node.right, known)
    return (isinstance(node, ast.Call) and _operand(node) is not None) or key_of(node) in known


def _clamped(script: Script, call: ast.Call) -> tuple[ast.expr, ast.expr | None, ast.expr | None] | None:
    """The tensor of `torch.clamp(x, low, high)` or `x.clamp(low, high)` and its limits."""
    if script.outline.names.full(call.func) in _CLAMPS and call.args:
        return call.args[0], argument(call, 1, "min"), argument(call, 2, "max")
    if isinstance(call.func, ast.Attribute) and call.func.attr in {"clamp", "clamp_", "clip"}:
        return call.func.value, argument(call, 0, "min"), argument(call, 1, "max")
    return None


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
    if not isinstance(target, ast.Name) or script.autocasts or target.id in _moved(function):
        return []
    uses = [n for n in ast.walk(function.node) if isinstance(n, ast.Name) and n.id == target.id and n is not target]
    uses = [n for n in uses if n.lineno > call.lineno and isinstance(n.ctx, ast.Load)]
    return [n for n in uses if formats_of_tensor(script, n, function) == {"float16"}]


def _guards_of_parameters(script: Script) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """The guards of what is made of a parameter for which a call of this file passes float16: `normalize(x.half())`."""
    tiny = _lines_of(_TINY, script.source.text) if _HALF.search(script.source.text) else []
    for function in script.outline.functions if tiny else ():
        first, last = getattr(function.node, "lineno", 0), getattr(function.node, "end_lineno", None) or 0
        if bisect_left(tiny, first) == bisect_right(tiny, last) or not any(map(_underflows, nodes_in(function.node))):
            continue
        for name in function.params if function not in script.functions_in_autocast else ():
            passed = script.outline.passed(name, function)
            if any(formats_of_tensor(script, value, caller) == {"float16"} for value, caller in passed):
                names = names_with_dtype(function, name) - _moved(function)
                for node in ast.walk(function.node):
                    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and has_dtype_of(node.left, names):
                        yield node, node.right
                    clamped = _clamped(script, node) if isinstance(node, ast.Call) else None
                    if clamped is not None and has_dtype_of(clamped[0], names):
                        yield node, clamped[1]


def _lines_of(patterns: Iterable[re.Pattern[str]], text: str) -> list[int]:
    """The numbers of the lines where patterns match, in order."""
    starts = sorted(match.start() for pattern in patterns for match in pattern.finditer(text))
    lines, line, end = [], 1, 0
    for start in starts:
        line, end = line + text.count("\n", end, start), start
        lines.append(line)
    return lines


def _moved(function: Function) -> set[str]:
    """The variables that an assignment moves away from zero, so that a later guard has nothing to do: `p = p + 1e-3`, `p.clamp_(1e-4)`."""
    names: set[str] = set()
    for node in ast.walk(function.node):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            names.add(key_of(node.target))
        elif isinstance(node, ast.Assign):
            names |= {key_of(t) for t in node.targets if _moves(node.value, key_of(t))}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            func = node.value.func
            names |= {key_of(func.value)} if isinstance(func, ast.Attribute) and func.attr in _MOVES else set()
    return names - {""}


def _moves(value: ast.expr, name: str) -> bool:
    """Whether an expression adds to a variable or limits it from below."""
    nodes = list(ast.walk(value))
    return any(key_of(n) == name for n in nodes) and any(
        (isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add))
        or (isinstance(n, ast.Call) and last_name(text_of(n.func)) in _MOVES)
        for n in nodes
    )


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


RULES: tuple[type[Rule], ...] = (EpsUnderflowsHalf,)
