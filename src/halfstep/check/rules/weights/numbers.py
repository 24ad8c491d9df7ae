"""HS155, HS163-HS165, HS167: constants outside the range of 16 bits, queries for hardware support, and fp8 everywhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.logits import in_autocast
from halfstep.check.script.objects.values import DTYPES, argument, constant, dtypes_of
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
_CONVERT = """\
import torch
from torchao.float8 import convert_to_float8_training
model = Transformer().cuda()
convert_to_float8_training(model{filter})
"""
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

_REDUCTIONS = ("softmax", "log_softmax", "sum", "mean", "cumsum", "norm", "prod", "cumprod", "logsumexp", "var")


class MaskOverflowsHalf(ScriptRule):
    """An attention mask is filled with a value outside the range of float16."""

    code = "HS163"
    name = "mask-overflows-half"
    severity = "warning"
    reason = (
        "The largest float16 value is 65504. Under autocast the scores of a matmul are float16, and `masked_fill` with -1e9 raises RuntimeError: "
        "value cannot be converted to type c10::Half without overflow."
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
        """Fill values beyond 65504 for scores that come from a matmul, in scripts that run in float16."""
        regions = [a for a in script.autocasts if a.enabled != "no"]
        if not any("float16" in a.dtypes for a in regions):
            return
        certain = all(a.dtype == "float16" for a in regions)
        for name in ("masked_fill", "masked_fill_"):
            for call, function in script.outline.calls.get(name, ()):
                number = _number(argument(call, 1, "value"))
                if number is not None and 65504 < abs(number) < float("inf"):
                    receiver = call.func.value if isinstance(call.func, ast.Attribute) else call
                    if _from_matmul(script, receiver, function, call.lineno):
                        yield self.finding(
                            script.where(call),
                            f"{number:g} is outside the range of float16 (maximum 65504): this raises RuntimeError under float16 autocast",
                            instead=f"torch.finfo({key_of(receiver) or 'scores'}.dtype).min",
                            severity=None if certain else "advice",
                        )


def _number(node: ast.expr | None) -> float | None:
    """A number, also written as `float("-1e20")`."""
    if isinstance(node, ast.Call) and key_of(node.func) == "float" and len(node.args) == 1:
        node = node.args[0]
    value = constant(node)
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None


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
    )
    good = (
        "import torch\ny = x / (x.half().abs() + 1e-6)\n",
        "import torch\nz = w.to(torch.float16).float().clamp(min=1e-12)\n",
    )
    references = ("https://github.com/pytorch/pytorch/issues/147437",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Constants that round to zero in float16, added to or clamping a value that is certainly float16."""
        outline = script.outline
        spots: list[tuple[ast.AST, ast.AST | None]] = []
        for name in ("half", "to"):
            for call, _ in outline.calls.get(name, ()):
                if name == "half" or any(DTYPES.get(outline.names.full(a)) == "float16" for a in call.args):
                    spots += _guards_of(script, call)
        for call, function in outline.calls.get("tensor", ()):
            if dtypes_of(outline, argument(call, None, "dtype"), function) == {"float16"}:
                spots.append((call, argument(call, 0, "data")))
        for node, value in spots:
            number = constant(value)
            if isinstance(number, float) and 0 < abs(number) < 2**-25:
                yield self.finding(
                    script.where(node),
                    f"{number:g} rounds to zero in float16, whose smallest positive value is 6e-8",
                    instead="compute in float32, or use an eps of at least 1e-7",
                )


def _guards_of(script: Script, node: ast.AST) -> list[tuple[ast.AST, ast.AST | None]]:
    """Additions and clamps applied directly to a float16 value."""
    parents = script.outline.parents
    while True:
        parent = parents.get(node)
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add):
            return [(parent, parent.right if parent.left is node else parent.left)]
        call = parents.get(parent) if isinstance(parent, ast.Attribute) and parent.value is node else None
        if not isinstance(parent, ast.Attribute) or not isinstance(call, ast.Call):
            return []
        if parent.attr in {"clamp", "clamp_", "clamp_min", "clip"}:
            return [(call, argument(call, 0, "min"))]
        if parent.attr not in _PRESERVES_DTYPE:
            return []
        node = call


class ReductionInHalf(ScriptRule):
    """A softmax, sum or norm computes in float16."""

    code = "HS165"
    name = "reduction-in-half"
    severity = "advice"
    reason = (
        "A float16 sum of ones stops growing at 2048 (2048 + 1 rounds to 2048), sums overflow beyond 65504, and a softmax over a "
        "long row loses most of its small terms. Autocast runs these operations in float32 for that reason."
    )
    bad = (
        "import torch\np = torch.softmax(scores, dim=-1, dtype=torch.float16)\n",
        "import torch\ntotal = x.sum(dim=1, dtype=torch.half)\n",
        "import torch\np = scores.half().softmax(-1)\n",
        "import torch\nnorm = torch.norm(grads.to(torch.float16))\n",
    )
    good = ("import torch\np = torch.softmax(scores, dim=-1, dtype=torch.float32).to(torch.float16)\n",)
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
        if script.outline.parents.get(last.node) not in set(script.above(node)):
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


class EmulatedBf16(ScriptRule):
    """bfloat16 is chosen by a query that is also true for GPUs that only emulate it."""

    code = "HS167"
    name = "emulated-bf16"
    severity = "advice"
    reason = (
        "`torch.cuda.is_bf16_supported()` includes emulation: on a T4 or V100 it returns True, but bfloat16 runs there by converting "
        "to float32 and back, slower than float32 itself. With including_emulation=False it reports hardware support only."
    )
    bad = ("import torch\ndtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16\n",)
    good = (
        "import torch\ndtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16\n",
    )
    references = (
        "https://github.com/pytorch/pytorch/pull/148322",
        "https://github.com/MakazhanAlpamys/Soup/issues/387",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Calls of is_bf16_supported without arguments."""
        for call, _ in script.outline.calls.get("is_bf16_supported", ()):
            if (
                script.outline.names.full(call.func) == "torch.cuda.is_bf16_supported"
                and not call.args
                and not call.keywords
            ):
                yield self.finding(
                    script.where(call),
                    "is_bf16_supported() is also True on GPUs that only emulate bfloat16, such as the T4",
                    instead="torch.cuda.is_bf16_supported(including_emulation=False)",
                )


class Fp8EveryLayer(ScriptRule):
    """Every linear layer is converted to fp8, including the output layer."""

    code = "HS155"
    name = "fp8-every-layer"
    severity = "advice"
    reason = (
        "`convert_to_float8_training` converts every nn.Linear unless `module_filter_fn` excludes some. The output layer, a router and small "
        "projections should stay in bfloat16: their results decide the loss or a choice, and fp8 has 3 or 2 mantissa bits. A layer whose "
        "dimensions are not divisible by 16 raises an error in `torch._scaled_mm`. torchao's own example excludes the last layer and such dimensions."
    )
    bad = (_CONVERT.format(filter=""),)
    good = (_CONVERT.format(filter=', module_filter_fn=lambda m, name: name != "output" and m.in_features % 16 == 0'),)
    references = (
        "https://github.com/pytorch/ao/tree/main/torchao/float8#single-gpu-user-api",
        "https://github.com/pytorch/torchtune/issues/2404",
    )
    words = ("convert_to_float8_training", "swap_linear_with_float8_linear")

    def check(self, script: Script) -> Iterator[Finding]:
        """Calls of torchao's converter without a filter."""
        for name in self.words:
            for call, _ in script.outline.calls.get(name, ()):
                full = script.outline.names.full(call.func)
                whole = bool(call.args) and isinstance(call.args[0], (ast.Name, ast.Attribute))
                absent = constant(argument(call, None, "module_filter_fn") or ast.Constant(None)) is None
                if (
                    full.startswith("torchao.")
                    and whole
                    and absent
                    and len(call.args) == 1
                    and all(k.arg for k in call.keywords)
                ):
                    yield self.finding(
                        script.where(call),
                        f"`{ast.unparse(call.args[0])}` is converted to fp8 with every linear layer, also the output layer and layers whose "
                        "dimensions are not divisible by 16, which raise",
                        instead="pass module_filter_fn=... that excludes the output layer and dimensions not divisible by 16",
                    )


RULES: tuple[type[Rule], ...] = (MaskOverflowsHalf, EpsUnderflowsHalf, ReductionInHalf, EmulatedBf16, Fp8EveryLayer)
