"""HS165: reductions in float16."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.logits import in_autocast, with_autocast
from halfstep.check.script.flow.logit_formats import logit_formats
from halfstep.check.script.flow.sources import RESHAPES, element_of, latest, selected
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.modules import attribute_values
from halfstep.check.script.objects.outputs import in_no_grad, is_product, leaves_autocast
from halfstep.check.script.objects.values import DTYPES, argument, dtypes_of, text_of
from halfstep.check.script.regions.callers import regions_around
from halfstep.check.script.scaling.summing_losses import summing_losses
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES"]

_PRESERVES_DTYPE = {
    "abs",
    "norm",
    "sum",
    "mean",
    "pow",
    "square",
    "sqrt",
    "detach",
    "cuda",
    "max",
    "min",
    "clone",
    "contiguous",
}

_KEEPS = {"numpy", "tolist", "item", "log", "append", "extend"}
_SAME_VALUE = {"detach", "cpu", "float", "squeeze", "view", "reshape", "flatten", "data"}
_SHAPES = _SAME_VALUE - {"float", "data", "cpu"}
_ACTIVATIONS = {"sigmoid", "softmax"}
_PRODUCTS = frozenset({"torch.matmul", "torch.bmm"})
_NUMBER = regex(r"^[\d.e-]+$|scale|scaling|dim|d_k|d_head|sqrt|temperature")
_ROOTS = regex(r"(^|\.)(sqrt|float|int)$")
_MAX_STEPS = 12  # operations and assignments between a layer and a reduction
_REDUCTIONS = ("softmax", "log_softmax", "sum", "mean", "cumsum", "norm", "prod", "cumprod", "logsumexp", "var")

_ATTENTION = """\
import torch

class Attention(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query = torch.nn.Linear(width, width)

    def forward(self, x):
        q = self.query(x)
        with torch.autocast("cuda", enabled=False):
            return torch.softmax({q} @ {q}.mT, dim=-1)

model, scaler = Attention(64).cuda(), torch.amp.GradScaler("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


class ReductionInHalf(ScriptRule):
    """A softmax, sum or norm computes in float16."""

    code = "HS165"
    name = "reduction-in-half"
    severity = "advice"
    reason = (
        "A float16 sum of ones stops growing at 2048 (2048 + 1 rounds to 2048), sums overflow beyond 65504, and a softmax over a "
        "long row loses most of its small terms. Autocast runs these operations in float32 for that reason. A region with enabled=False "
        "does not: it leaves float16 inputs as they are, so that they need a `.float()`. Nor does a loss that is called after the region, such as "
        "a Dice loss that sums what the model returned."
    )
    bad = (
        "import torch\np = torch.softmax(scores, dim=-1, dtype=torch.float16)\n",
        "import torch\ntotal = x.sum(dim=1, dtype=torch.half)\n",
        "import torch\np = scores.half().softmax(-1)\n",
        "import torch\nnorm = torch.norm(grads.to(torch.float16))\n",
        _ATTENTION.format(q="q"),
    )
    good = (
        "import torch\np = torch.softmax(scores, dim=-1, dtype=torch.float32).to(torch.float16)\n",
        _ATTENTION.format(q="q.float()"),
    )
    references = ("https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-autocast-to-float32",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Reductions with dtype=torch.float16, or of a value that was just cast to float16, outside autocast."""
        for name in _REDUCTIONS:
            for call, function in script.outline.calls.get(name, ()):
                dtype = _dtype_argument(script, call)
                formats = dtypes_of(script.outline, dtype, function) if dtype is not None else frozenset()
                value = _reduced(script, call) if dtype is None else None
                if value is not None and _is_half(script, value, function) and not in_autocast(script, call, function):
                    formats = frozenset({"float16"})
                if formats == {"float16"}:
                    yield self.finding(
                        script.where(call),
                        f"`{name}` computes in float16: small terms are lost and sums overflow beyond 65504",
                        instead="dtype=torch.float32, and cast the result",
                    )
                elif value is not None and (cause := _cause(script, name, call, value, function)):
                    yield self.finding(
                        script.where(call),
                        f"`{name}` computes in float16: {cause}",
                        instead=f"cast its input: `{text_of(value)}.float()`",
                    )
                elif name == "sum" and value is not None and script.autocasts and _is_over_pixels(call):
                    yield from self._check_sum(script, call, value, function)
                elif name == "softmax" and value is not None and script.autocasts and _is_kept(script, call, function):
                    yield from self._check_exit(script, call, value, function)
        yield from self._check_losses(script)

    def _check_losses(self, script: Script) -> Iterator[Finding]:
        """Losses of the script's own that sum what a model computed in an autocast region which ends before them."""
        for (call, function), reduced in summing_losses(script) if script.autocasts else ():
            if in_autocast(script, call, function):
                continue
            output = _behind_activation(script, call.args[0], function, call.lineno) or call.args[0]
            exit_ = leaves_autocast(script, output, function, call.lineno)
            if exit_ is not None and exit_.formats == {"float16"}:
                unless = "" if exit_.is_certain else f" unless `{exit_.model}` casts its output"
                yield self.finding(
                    script.where(call),
                    f"`{text_of(reduced)}` ({script.at(reduced)}) sums in float16{unless} ({exit_.cause}): a sum overflows beyond 65504",
                    instead=f"compute the loss inside the region, or of `{text_of(call.args[0])}.float()`",
                )

    def _check_sum(self, script: Script, call: ast.Call, value: ast.expr, function: Function) -> Iterator[Finding]:
        """A sum over the pixels of probabilities whose logits were computed in an autocast region that has ended."""
        logits = _behind_activation(script, value, function, call.lineno)
        if logits is None or with_autocast(script, call, function):
            return
        exit_ = leaves_autocast(script, logits, function, logits.lineno)
        if exit_ is not None and exit_.formats == {"float16"}:
            cause = exit_.cause.replace("this loss", "this sum")
            unless = "" if exit_.is_certain else f" unless `{exit_.model}` casts its output"
            yield self.finding(
                script.where(call),
                f"`{text_of(call)}` sums in float16{unless} ({cause}): it is inf above 65504, as for the pixels of a mask of 256 x 256",
                instead=f"cast the logits with `{text_of(logits)}.float()`",
            )

    def _check_exit(self, script: Script, call: ast.Call, value: ast.expr, function: Function) -> Iterator[Finding]:
        """A softmax after an autocast region of the logits that were computed in it."""
        if with_autocast(script, call, function):
            return
        exit_ = leaves_autocast(script, value, function, call.lineno)
        if exit_ is not None and exit_.formats == {"float16"}:
            cause = exit_.cause.replace("this loss", "this softmax")
            unless = "" if exit_.is_certain else f" unless `{exit_.model}` casts its output"
            yield self.finding(
                script.where(call),
                f"the probabilities are computed in float16{unless} ({cause}): they have three digits, and those below 6e-8 are zero",
                instead="cast the logits with .float() before the softmax",
            )


def _is_over_pixels(call: ast.Call) -> bool:
    """Whether a sum is over all dimensions, or at least two of them."""
    func = call.func
    is_function = isinstance(func, ast.Attribute) and key_of(func.value) == "torch"
    dims = argument(call, 1 if is_function else 0, "dim")
    return dims is None or (isinstance(dims, ast.Tuple | ast.List) and len(dims.elts) > 1)


def _behind_activation(script: Script, node: ast.expr, function: Function, line: int) -> ast.expr | None:
    """The logits whose sigmoid or softmax a value is, but for its shape; None if it is neither."""
    is_activated = False
    for _ in range(_MAX_STEPS):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_torch = script.outline.names.full(node.func).startswith("torch.")
            inner = argument(node, 0, "input") if is_torch else node.func.value
            if node.func.attr not in _SHAPES | _ACTIVATIONS or argument(node, None, "dtype") or inner is None:
                return None
            is_activated = is_activated or node.func.attr in _ACTIVATIONS
            node = inner
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif not isinstance(node, ast.Name) or is_activated:
            return node if is_activated else None
        else:
            bindings = latest(script.outline, node.id, function, line)
            value = bindings[0].value if len(bindings) == 1 and bindings[0].index is None else None
            if value is None:
                return None
            node, line = value, getattr(bindings[0].node, "lineno", 0)
    return None


def _is_kept(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether probabilities are used as numbers: stored or computed with, not ranked or compared with a threshold."""
    parent = script.outline.parents.get(call)
    target = parent.targets[0] if isinstance(parent, ast.Assign) else None
    if not isinstance(target, ast.Name):
        return _is_number(script, call)
    uses = [n for n in ast.walk(function.node) if isinstance(n, ast.Name) and n.id == target.id and n is not target]
    return any(_is_number(script, n) for n in uses if n.lineno > call.lineno and isinstance(n.ctx, ast.Load))


def _is_number(script: Script, node: ast.AST) -> bool:
    """Whether a tensor is an operand, is appended to a list, or leaves torch: `confidence.cpu().numpy()`."""
    parents = script.outline.parents
    while isinstance(parent := parents.get(node), (ast.Attribute, ast.Subscript)) and parent.value is node:
        call = parents.get(parent)
        name = parent.attr if isinstance(parent, ast.Attribute) else ""
        if name in _KEEPS:
            return True
        if name and (name not in _SAME_VALUE or not isinstance(call, ast.Call)):
            return False
        node = call if name and call is not None else parent
    if isinstance(parent, ast.Call) and node in parent.args:
        return text_of(parent.func).rsplit(".", 1)[-1] in _KEEPS
    return isinstance(parent, (ast.BinOp, ast.AugAssign))


def _dtype_argument(script: Script, call: ast.Call) -> ast.expr | None:
    """The dtype of a reduction: a keyword, or the third argument of torch.softmax(x, dim, dtype)."""
    third = call.args[2] if len(call.args) > 2 else None
    if third is not None and script.outline.names.full(third) in DTYPES:
        return third
    return argument(call, None, "dtype")


def _reduced(script: Script, call: ast.Call) -> ast.expr | None:
    """What a reduction of torch reduces: the receiver of a method, or the first argument of a function."""
    func = call.func
    if script.outline.names.full(func).startswith("torch."):
        return argument(call, 0, "input")
    is_method = isinstance(func, ast.Attribute) and isinstance(func.value, (ast.Call, ast.Name))
    return func.value if is_method and isinstance(func, ast.Attribute) else None


def _is_half(script: Script, node: ast.expr, function: Function) -> bool:
    """Whether a value is cast to float16 in the same expression, or by the assignment just before."""
    name = node.id if isinstance(node, ast.Name) else ""
    if name:
        here = [b for b in script.outline.lookup(name, function) if b.function is function]
        before = [b for b in here if getattr(b.node, "lineno", 0) < node.lineno]
        last = before[-1] if before else None
        if last is None or last.value is None or last.index is not None:
            return False
        # In a branch or a loop that does not contain the reduction, another assignment may be the last one.
        guards = conditions_of(script.outline, node)
        if script.outline.parents.get(last.node) not in set(script.above(node)) or not all(
            guard in guards for guard in conditions_of(script.outline, last.node)
        ):
            return False
        node = last.value
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "half" and not node.args:
            return True
        if node.func.attr in {"to", "type"}:
            values = (*node.args, *(k.value for k in node.keywords if k.arg == "dtype"))
            return any(dtypes_of(script.outline, value, function) == {"float16"} for value in values)
        if node.func.attr not in _PRESERVES_DTYPE:
            return False
        node = node.func.value
    return False


def _cause(script: Script, name: str, call: ast.Call, value: ast.expr, function: Function) -> str:
    """Why a reduction of a training step has a float16 input; empty if nothing shows that it has."""
    if "backward" not in script.outline.calls or in_no_grad(script, call):
        return ""
    layer = _layer_before_region(script, call, value, function)
    if layer is not None:
        return (
            f"`{text_of(layer.func)}` ({script.at(layer)}) returns float16 under the outer autocast, and this region, which turns autocast off, casts "
            "nothing back"
        )
    # HS154 reports the log-probabilities.
    is_output = name in {"softmax", "norm", "sum"} and not in_autocast(script, call, function)
    if is_output and logit_formats(script, value, function, call.lineno) == {"float16"}:
        return f"`{text_of(value)}` comes from a model with float16 weights, and no autocast is active"
    return ""


def _layer_before_region(script: Script, call: ast.Call, value: ast.expr, function: Function) -> ast.Call | None:
    """The linear layer, called before a region that turns autocast off, whose output a reduction in that region gets."""
    regions = regions_around(script.outline, call, function) if len(script.autocasts) > 1 else []
    if not regions or any(a.enabled != "no" for a in regions) or function.name != "forward" or not function.method:
        return None
    active = [a for a in script.autocasts if a.enabled != "no" and not in_no_grad(script, a.node)]
    if not active or any(a.enabled != "yes" or a.dtypes != {"float16"} for a in active):
        return None
    layer = _product_behind(script, value, function, call.lineno)
    return layer if layer is not None and not regions_around(script.outline, layer, function) else None


def _product_behind(
    script: Script, node: ast.expr, function: Function, line: int, steps: int = _MAX_STEPS
) -> ast.Call | None:
    """The call of a linear layer or a convolution that a tensor is computed from by products, constants and reshapes only."""
    outline = script.outline
    while steps:
        steps -= 1
        if isinstance(node, ast.Name):
            bindings = latest(outline, node.id, function, line)
            value = element_of(bindings[0]) if len(bindings) == 1 else None
            if value is None:
                return None
            node, line = value, getattr(bindings[0].node, "lineno", line)
        elif isinstance(node, ast.BinOp) and (
            isinstance(node.op, ast.MatMult) or _is_scale(script, node.right, function)
        ):
            node = node.left
        elif isinstance(node, ast.BinOp) and _is_scale(script, node.left, function):
            node = node.right
        elif isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in {"T", "mT"}):
            node = node.value
        elif isinstance(node, ast.Call) and (inner := selected(outline, node)) is not None:
            node = inner
        elif isinstance(node, ast.Call) and outline.names.full(node.func) in _PRODUCTS and node.args:
            node = node.args[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in RESHAPES:
            node = node.func.value
        else:
            break
    return node if isinstance(node, ast.Call) and is_product(script, node, function) else None


def _is_scale(script: Script, node: ast.expr, function: Function) -> bool:
    """Whether an expression is a number, `self.scale` or `self.head_dim ** -0.5`; a parameter is a float32 tensor."""
    if any(isinstance(n, ast.Call) and not _ROOTS.search(text_of(n.func)) for n in ast.walk(node)):
        return False
    keys = {key_of(n) for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute))}
    values = [v for key in keys if key.startswith("self.") for v in attribute_values(script.outline, key, function)]
    is_parameter = any(isinstance(v, ast.Call) and not _ROOTS.search(text_of(v.func)) for v in values)
    return bool(_NUMBER.search(text_of(node))) and not is_parameter


RULES: tuple[type[Rule], ...] = (ReductionInHalf,)
