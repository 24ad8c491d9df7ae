"""HS155, HS167: queries for hardware support, and fp8 everywhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.exercise import is_test
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.support import behind_ampere_test, is_described

__all__ = ["RULES"]

_CONVERT = """\
import torch
from torchao.float8 import convert_to_float8_training
model = Transformer().cuda()
convert_to_float8_training(model{filter})
"""
_RECORDS = regex(
    r"(^|[._])(print|info|debug|warning|log|dump|dumps|(write|save|dump)_(json|yaml|metadata|manifest|report))$"
)


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
        looked_up = [site for site in script.outline.calls.get("getattr", ()) if len(site[0].args) > 1]
        for query, function in (c for c in looked_up if constant(c[0].args[1]) == "is_bf16_supported"):
            call = script.outline.parents.get(query)  # `getattr(torch.cuda, "is_bf16_supported", lambda: False)()`
            is_query = isinstance(call, ast.Call) and call.func is query and not call.args and not call.keywords
            if isinstance(call, ast.Call) and is_query and _chooses(script, call, function):
                yield self._report(script, call)
        for call, function in _named_queries(script):
            if not call.args and not call.keywords and _chooses(script, call, function):
                yield self._report(script, call)
        for call, function in script.outline.calls.get("is_bf16_supported", ()):
            # A module that a function receives has no full name: `torch_module.cuda.is_bf16_supported()`.
            name = script.outline.names.full(call.func) or text_of(call.func)
            is_query = name.endswith(".cuda.is_bf16_supported") and not call.args and not call.keywords
            if is_query and _chooses(script, call, function):
                yield self._report(script, call)

    def _report(self, script: Script, call: ast.Call) -> Finding:
        return self.finding(
            script.where(call),
            "is_bf16_supported() is also True on GPUs that only emulate bfloat16, such as the T4",
            instead="torch.cuda.is_bf16_supported(including_emulation=False)",
        )


def _named_queries(script: Script) -> Iterator[tuple[ast.Call, Function]]:
    """The calls of a variable that is the query itself: `supported = getattr(torch.cuda, "is_bf16_supported", None)`."""
    outline = script.outline
    for key, bindings in outline.bindings.items() if "is_bf16_supported" in script.source.text else ():
        if not any(b.value is not None and _is_query(script, b.value) for b in bindings):
            continue
        for call, function in outline.calls.get(key.rpartition(".")[2], ()):
            bound = outline.lookup(key, function) if key_of(call.func) == key else []
            if bound and all(b.value is not None and _is_query(script, b.value) for b in bound):
                yield call, function


def _is_query(script: Script, value: ast.expr) -> bool:
    """Whether an expression is the function that asks for bfloat16, with or without getattr, and does not call it."""
    if isinstance(value, ast.Call) and key_of(value.func) == "getattr" and len(value.args) > 1:
        return text_of(value.args[0]).endswith("cuda") and constant(value.args[1]) == "is_bf16_supported"
    return script.outline.names.full(value) == "torch.cuda.is_bf16_supported"


def _chooses(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether the answer may choose bfloat16 for a run on a GPU that emulates it."""
    if is_test(script) or _is_recorded(script, call) or is_described(script.outline, call, function):
        return False
    return not behind_ampere_test(script.outline, call, function)


def _is_recorded(script: Script, call: ast.Call) -> bool:
    """Whether the answer is only printed, or written into a file as an entry of a dictionary, and so chooses nothing."""
    statement = next((n for n in script.above(call) if isinstance(n, ast.stmt)), None)
    if isinstance(statement, ast.If):
        calls = [s.value for s in (*statement.body, *statement.orelse) if isinstance(s, ast.Expr)]
        is_shown = all(isinstance(c, ast.Call) and _RECORDS.search(text_of(c.func)) for c in calls)
        return is_shown and len(calls) == len(statement.body) + len(statement.orelse)
    inside: ast.AST = call
    for node in script.above(call):
        if isinstance(node, ast.Call):
            return inside is not node.func and bool(_RECORDS.search(text_of(node.func)))
        chosen = isinstance(node, (ast.IfExp, ast.BoolOp)) and inside is not getattr(node, "body", None)
        if isinstance(node, (ast.stmt, ast.Lambda)) or chosen:
            return False
        inside = node
    return False


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


RULES: tuple[type[Rule], ...] = (EmulatedBf16, Fp8EveryLayer)
