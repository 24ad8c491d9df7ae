"""HS611: timesteps and positions that are rounded to 16 bits before they are used."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.sources import latest
from halfstep.check.script.objects.formats import SIXTEEN_BIT, cast_formats, formats_of
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES"]

_DIFFUSE = """\
import torch
for latents in loader:
    latents = latents.to(torch.bfloat16)
    timesteps = torch.randint(0, 1000, (latents.shape[0],))
    pred = model(add_noise(latents, timesteps), {t})
    loss_fn(pred.float(), latents.float()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_NUMBERED = regex(r"(^|_)(timesteps?|positions?|position_ids|pos_ids)$")
_POSITIONS = regex(r"seq|len|pos|context|block|tokens|ctx")
_MOVES = {"to", "expand", "repeat", "view", "reshape", "unsqueeze", "flatten", "clone", "cuda", "expand_as", "long"}
_EXACT = {"bfloat16": 256, "float16": 2048}  # integers up to here have no rounding error
_TIMESTEPS = 999  # of the schedulers of diffusers, where nothing else is written


class RoundedIntegers(ScriptRule):
    """Timesteps or positions are cast to a 16-bit dtype that has no exact value for them."""

    code = "HS611"
    name = "rounded-integers"
    severity = "warning"
    reason = (
        "bfloat16 has 8 significant bits: integers above 256 are rounded, those between 512 and 1024 to multiples of 4. A model that gets "
        "`timesteps.to(torch.bfloat16)` is conditioned on 999 as 1000 and on 514 as 512, while the noise has the exact timestep; "
        "positions above 256 coincide. float16 is exact up to 2048. Keep them in float32, and cast their embedding."
    )
    bad = (
        _DIFFUSE.format(t="timesteps.to(torch.bfloat16)"),
        _DIFFUSE.format(t="timesteps.to(device, dtype=latents.dtype)"),
        "import torch\nfrom torch import nn\nclass Rotary(nn.Module):\n    def forward(self, x):\n"
        "        with torch.autocast('cuda', enabled=False):\n"
        "            t = torch.arange(self.max_seq_len, dtype=torch.bfloat16)\n        return torch.outer(t, self.inv_freq)\n",
    )
    good = (
        _DIFFUSE.format(t="timesteps.float()"),
        _DIFFUSE.format(t="timesteps.to(torch.float16)"),
        _DIFFUSE.format(t="timesteps.to(torch.bfloat16) / 1000"),
        _DIFFUSE.format(t="timesteps.to(torch.bfloat16)").replace("0, 1000", "0, 256"),
    )
    references = ("https://docs.pytorch.org/docs/stable/type_info.html",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Casts of a number whose values the file shows to exceed those that the format has exactly."""
        outline = script.outline
        # A model may have been trained with the rounded numbers that its pipeline gives it.
        trains = script.has("backward", "owned_backward")
        for name in ("to", "type", "half", "bfloat16") if trains else ():
            for call, function in outline.calls.get(name, ()):
                # A cast of a model is a statement of its own.
                if not isinstance(call.func, ast.Attribute) or isinstance(outline.parents.get(call), ast.Expr):
                    continue
                formats = _formats_of_cast(script, call, function)
                top = _largest(script, call.func.value, function, call.lineno) if formats else 0
                if formats and top > min(_EXACT[f] for f in formats) and not _is_divided(script, call, function):
                    yield self._report(script, call, text_of(call.func.value), formats)
        for call, function in outline.calls.get("arange", ()):
            formats = formats_of(outline, argument(call, None, "dtype"), function)
            if formats and formats <= SIXTEEN_BIT and _end_of_range(call) > min(_EXACT[f] for f in formats):
                yield self._report(script, call, "torch.arange", formats)

    def _report(self, script: Script, call: ast.Call, value: str, formats: frozenset[str]) -> Finding:
        name = min(formats, key=lambda f: _EXACT[f])
        return self.finding(
            script.where(call),
            f"`{value}` is rounded to {name}, in which integers above {_EXACT[name]} are not exact"
            + (": from 512 to 1024 only multiples of 4" if name == "bfloat16" else ""),
            instead="leave them in float32, and cast what is computed from them",
        )


def _formats_of_cast(script: Script, call: ast.Call, function: Function) -> frozenset[str]:
    """The 16-bit formats that a cast gives its receiver, also as the dtype of a tensor that the function makes: `.to(x.dtype)`."""
    outline = script.outline
    formats = cast_formats(outline, call, function)
    if formats:
        return formats if formats <= SIXTEEN_BIT else frozenset()
    for value in (*call.args, *(k.value for k in call.keywords if k.arg == "dtype")):
        if not isinstance(value, ast.Attribute) or value.attr != "dtype" or not isinstance(value.value, ast.Name):
            continue
        made = [b.value for b in latest(outline, value.value.id, function, call.lineno)]
        parts = [
            cast_formats(outline, m, function) or formats_of(outline, argument(m, None, "dtype"), function)
            if isinstance(m, ast.Call)
            else frozenset()
            for m in made
        ]
        if parts and all(p and p <= SIXTEEN_BIT for p in parts):
            return frozenset().union(*parts)
    return frozenset()


def _largest(script: Script, node: ast.expr, function: Function, line: int, depth: int = 4) -> int:
    """The largest timestep or position that a value may be, as far as the text shows; 0 if it does not, or if they are divided."""
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Call) and _is_moved(node)):
        node = node.value if isinstance(node, ast.Subscript) else node.func.value  # type: ignore[attr-defined]
    if isinstance(node, ast.Attribute) and node.attr == "timesteps":
        return _TIMESTEPS
    if isinstance(node, ast.Name) and depth:
        bindings = latest(script.outline, node.id, function, line)
        if not bindings:
            return 0
        loops = [b.node.iter for b in bindings if isinstance(b.node, ast.For)]
        iterated = [text_of(i).removeprefix("enumerate(").partition(")")[0].partition(",")[0] for i in loops]
        if loops:
            return _TIMESTEPS if all(_NUMBERED.search(last_name(text)) for text in iterated) else 0
        values = [b.value for b in bindings if b.index is None]
        tops = [_largest(script, v, function, line, depth - 1) for v in values if v is not None]
        return min(tops) if tops and len(tops) == len(bindings) else 0
    if not isinstance(node, ast.Call):
        return 0
    name = script.outline.names.full(node.func)
    if name == "torch.randint" and node.args:
        high = argument(node, 1, "high")
        end = node.args[0] if isinstance(high, (ast.Tuple, ast.List)) or high is None else high
        top = constant(end)
        return top - 1 if isinstance(top, int) else _TIMESTEPS if _NUMBERED.search(last_name(text_of(end))) else 0
    if name == "torch.arange":
        return _end_of_range(node)
    if name in {"torch.tensor", "torch.as_tensor"} and node.args and depth:
        inner = node.args[0].left if isinstance(node.args[0], ast.BinOp) else node.args[0]
        elements = inner.elts if isinstance(inner, (ast.List, ast.Tuple)) else [inner]
        return min((_largest(script, e, function, line, depth - 1) for e in elements), default=0)
    return 0


def _is_divided(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether a cast, or the variable that it is assigned to, is divided: the models that want this cast again in their forward."""
    parent = script.outline.parents.get(call)
    if isinstance(parent, ast.BinOp):
        return True
    keys = [key_of(t) for t in parent.targets] if isinstance(parent, ast.Assign) else []
    operands = [n.left for n in ast.walk(function.node) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
    return any(key_of(operand) in keys for operand in operands if key_of(operand))


def _is_moved(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr in _MOVES


def _end_of_range(call: ast.Call) -> int:
    """The last number of an arange of positions: its constant, or that of a length, which may be any."""
    end = call.args[1] if len(call.args) > 1 else argument(call, 0, "end")
    top = constant(end)
    if isinstance(top, int):
        return top - 1 if len(call.args) < 3 else 0
    return _EXACT["float16"] if end is not None and len(call.args) < 3 and _POSITIONS.search(text_of(end)) else 0


RULES: tuple[type[Rule], ...] = (RoundedIntegers,)
