"""HS158: operations that torch does not implement for 16-bit tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.objects.formats import SIXTEEN_BIT
from halfstep.check.script.objects.lowered import formats_of_tensor
from halfstep.check.script.objects.values import argument
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES"]

_EVALUATE = """\
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(64, 32)
        self.head = torch.nn.Linear(32, 1)
    def forward(self, x):
        return self.head(self.body(x).relu()).squeeze(1)
model = Net().cuda().eval()
scores = []
for x in loader:
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(x.cuda())
    scores.extend({value}.cpu().numpy())
"""
_POSES = """\
import torch
with torch.autocast("cuda", dtype=torch.float16):
    cameras = rotation @ intrinsics
    rays = torch.linalg.inv({value}) @ pixels
"""
# Decompositions and solvers, as torch.linalg.name, torch.name or tensor.name(); none of them has a 16-bit kernel.
_LINALG = frozenset({
    "cholesky", "cholesky_ex", "det", "eig", "eigh", "eigvals", "eigvalsh", "inv", "inv_ex", "lstsq", "lu", "lu_factor", "pinv", "qr",
    "slogdet", "solve", "svd", "svdvals",
})  # fmt: skip
_TORCH = frozenset({"cholesky", "det", "inverse", "logdet", "pinverse", "qr", "quantile", "slogdet", "svd"})


class UnsupportedInSixteenBits(ScriptRule):
    """An operation without a 16-bit implementation is called on a 16-bit tensor."""

    code = "HS158"
    name = "unsupported-in-16-bits"
    severity = "error"
    reason = (
        "NumPy has no bfloat16: `tensor.numpy()` raises TypeError: Got unsupported ScalarType BFloat16. Decompositions and solvers "
        "(`inv`, `det`, `svd`, `eigh`, `cholesky`, `qr`, `solve`) and `quantile` raise RuntimeError for both 16-bit formats, and autocast does "
        "not convert their input. The output of a linear layer and of every product is 16-bit in an autocast region and after it; a "
        "sigmoid keeps it. The same code runs in float32, so a test without mixed precision passes."
    )
    bad = (
        _EVALUATE.format(value="logits.sigmoid()"),
        _POSES.format(value="cameras"),
        "import torch\npoints = features.to(torch.bfloat16).cpu().numpy()\n",
        "import torch\nu, s, v = torch.svd(weight.half())\n",
    )
    good = (
        _EVALUATE.format(value="logits.float().sigmoid()"),
        _POSES.format(value="cameras.float()"),
        "import torch\npoints = features.to(torch.float16).cpu().numpy()\n",
        "import torch\nu, s, v = torch.svd(weight.half().float())\n",
    )
    references = (
        "https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior",
        "measured: torch 2.13.0 on the CPU",
    )
    lines = (".numpy()", "linalg", "quantile(")

    def check(self, script: Script) -> Iterator[Finding]:
        """Calls of these operations on a value that the text shows to be 16-bit."""
        outline = script.outline
        for name in sorted((_LINALG | _TORCH | {"numpy"}) & outline.calls.keys()):
            for call, function in outline.calls[name]:
                value = _operand(script, call, name)
                formats = formats_of_tensor(script, value, function) if value is not None else frozenset()
                formats &= frozenset({"bfloat16"}) if name == "numpy" else SIXTEEN_BIT
                if formats and value is not None:
                    yield self._report(script, call, name, formats, function, value)

    def _report(
        self, script: Script, call: ast.Call, name: str, formats: frozenset[str], function: Function, value: ast.expr
    ) -> Finding:
        dtype = " or ".join(sorted(formats))
        every = formats_of_tensor(script, value, function)
        when = f"when the dtype is {dtype}, " if len(every) > len(formats) else ""
        fault = "NumPy has no bfloat16" if name == "numpy" else f"`{name}` has no 16-bit implementation"
        error = "TypeError" if name == "numpy" else "RuntimeError"
        return self.finding(
            script.where(call),
            f"{when}this tensor is {dtype}, and {fault}: the call raises {error}",
            instead="convert it first with .float()",
            severity="warning" if when else None,
        )


def _operand(script: Script, call: ast.Call, name: str) -> ast.expr | None:
    """The tensor that an operation reads; None for a function of another library."""
    full = script.outline.names.full(call.func)
    if full.startswith(("torch.linalg.", "torch.")):
        return argument(call, 0, "A" if "linalg" in full else "input") if name != "numpy" else None
    is_method = isinstance(call.func, ast.Attribute) and not full and (name == "numpy" or name in _TORCH)
    return call.func.value if is_method and isinstance(call.func, ast.Attribute) else None


RULES: tuple[type[Rule], ...] = (UnsupportedInSixteenBits,)
