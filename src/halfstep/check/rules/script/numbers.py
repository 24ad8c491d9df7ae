"""HS163-HS165, HS167: numbers that 16 bits cannot hold, and asking what the hardware can."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.names import key_of
from halfstep.check.script.outline import Function
from halfstep.check.script.script import Script
from halfstep.check.script.values import DTYPES, argument, constant, dtypes_of

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
_KEEPS = {"abs", "norm", "sum", "mean", "pow", "square", "sqrt", "detach", "cuda", "max", "min", "clone", "contiguous"}


class MaskOverflowsHalf(ScriptRule):
    """An attention mask is filled with a number float16 cannot hold."""

    code = "HS163"
    name = "mask-overflows-half"
    severity = "warning"
    reason = (
        "Float16 ends at 65504. Under autocast the scores of a matmul are float16, and `masked_fill` with -1e9 raises RuntimeError: "
        "value cannot be converted to type c10::Half without overflow."
    )
    bad = (_ATTENTION.format(value="-1e9"),)
    good = (
        _ATTENTION.format(value="torch.finfo(scores.dtype).min"),
        _ATTENTION.format(value="float('-inf')"),
        _ATTENTION.format(value="-1e9").replace("float16", "bfloat16"),
    )
    references = ("https://docs.pytorch.org/docs/stable/type_info.html#torch.torch.finfo",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Fills beyond 65504 of scores that come from a matmul, in scripts that run in float16."""
        regions = [a for a in script.autocasts if a.enabled != "no"]
        if not regions or any(a.dtype != "float16" for a in regions):
            return
        for name in ("masked_fill", "masked_fill_"):
            for call, function in script.outline.calls.get(name, ()):
                value = constant(argument(call, 1, "value"))
                if isinstance(value, (int, float)) and abs(value) > 65504 and abs(value) != float("inf"):
                    receiver = call.func.value if isinstance(call.func, ast.Attribute) else call
                    if _from_matmul(script, receiver, function):
                        yield self.finding(
                            script.where(call),
                            f"{value:g} does not fit in float16 (its largest is 65504): this raises under autocast",
                            instead="torch.finfo(scores.dtype).min",
                        )


def _from_matmul(script: Script, node: ast.expr, function: Function) -> bool:
    """Whether scores are the product of two tensors, scaled or not, and never brought back to float32."""
    options = [node]
    key = key_of(node)
    if key:
        options = [
            b.value for b in script.outline.lookup(key, function) if b.function is function and b.value is not None
        ]
    text = " ".join(ast.unparse(option) for option in options)
    products = ("matmul(", "bmm(", "einsum(", "baddbmm(", " @ ")
    return any(p in text for p in products) and "float" not in text and "softmax" not in text


class EpsUnderflowsHalf(ScriptRule):
    """A small constant meant to keep a float16 value from zero is itself zero in float16."""

    code = "HS164"
    name = "eps-underflows-half"
    severity = "warning"
    reason = (
        "The smallest number float16 holds is 6e-8; 1e-8 rounds to zero. `x.half() + 1e-8` is x, and the division it was to guard "
        "gives inf or NaN."
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
        """Constants below half the smallest float16, added to or clamping a value that is surely float16."""
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
                    f"{number:g} is zero in float16, whose smallest number is 6e-8",
                    instead="compute in float32, or use an eps of at least 1e-7",
                )


def _guards_of(script: Script, node: ast.AST) -> list[tuple[ast.AST, ast.AST | None]]:
    """Additions and clamps that a float16 value goes straight into."""
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
        if parent.attr not in _KEEPS:
            return []
        node = call


class ReductionInHalf(ScriptRule):
    """A softmax, sum or norm is told to compute in float16."""

    code = "HS165"
    name = "reduction-in-half"
    severity = "advice"
    reason = (
        "A float16 sum stops growing at 2048 when ones are added (2048 + 1 rounds to 2048) and overflows at 65504; a softmax over a "
        "long row loses most of its small terms. Autocast runs these in float32 for that reason."
    )
    bad = (
        "import torch\np = torch.softmax(scores, dim=-1, dtype=torch.float16)\n",
        "import torch\ntotal = x.sum(dim=1, dtype=torch.half)\n",
    )
    good = ("import torch\np = torch.softmax(scores, dim=-1, dtype=torch.float32).to(torch.float16)\n",)
    references = ("https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-autocast-to-float32",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Reductions with a dtype written as float16."""
        for name in ("softmax", "log_softmax", "sum", "cumsum", "norm", "prod", "cumprod", "logsumexp"):
            for call, _ in script.outline.calls.get(name, ()):
                dtype = argument(call, None, "dtype")
                if dtype is not None and DTYPES.get(script.outline.names.full(dtype)) == "float16":
                    yield self.finding(
                        script.where(call),
                        f"`{name}` is told to compute in float16",
                        instead="dtype=torch.float32, then cast the result",
                    )


class EmulatedBf16(ScriptRule):
    """bfloat16 is chosen by a question that says yes to GPUs without it."""

    code = "HS167"
    name = "emulated-bf16"
    severity = "advice"
    reason = (
        "`torch.cuda.is_bf16_supported()` counts emulation: on a T4 or V100 it answers True, and bfloat16 then runs by converting to "
        "float32 and back, slower than float32 itself. With including_emulation=False it answers for the hardware."
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
        """Calls of is_bf16_supported without an argument."""
        for call, _ in script.outline.calls.get("is_bf16_supported", ()):
            if (
                script.outline.names.full(call.func) == "torch.cuda.is_bf16_supported"
                and not call.args
                and not call.keywords
            ):
                yield self.finding(
                    script.where(call),
                    "True also on GPUs that only emulate bfloat16, such as a T4",
                    instead="torch.cuda.is_bf16_supported(including_emulation=False)",
                )


RULES: tuple[type[Rule], ...] = (MaskOverflowsHalf, EpsUnderflowsHalf, ReductionInHalf, EmulatedBf16)
