"""HS155: fp8 converters that convert layers which should stay in 16 bits."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.script import Script
from halfstep.check.script.values import argument, constant

__all__ = ["RULES"]

_CONVERT = """\
import torch
from torchao.float8 import convert_to_float8_training
model = Transformer().cuda()
convert_to_float8_training(model{filter})
"""


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


RULES: tuple[type[Rule], ...] = (Fp8EveryLayer,)
