"""HS607: losses of chunks that are added to a 16-bit tensor."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.exercise import is_exercise
from halfstep.check.script.objects.formats import SIXTEEN_BIT, formats_of
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES"]

_CHUNKS = """\
import torch
import torch.nn.functional as F

def chunked_loss(hidden, labels, head, size=1024):  # hidden: bfloat16 under autocast
    total = {start}
    for i in range(0, len(hidden), size):
        {add}
    return total / len(hidden)
"""
_LOSS = "F.cross_entropy(head(hidden[i : i + size]), labels[i : i + size], reduction='sum')"
_LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "kl_div", "binary_cross_entropy_with_logits")
_LOW = regex(r"bfloat16|float16|bf16|fp16|autocast|mixed_precision|\.half\(")
_ACTIVATION = regex(r"hidden|logit|embed|output|feature|activation|model\b|\bx\b", re.IGNORECASE)
_CREATES = frozenset({"zeros", "tensor", "full", "new_zeros", "new_tensor"})


class LossSummedLow(ScriptRule):
    """The losses of chunks are added to a tensor in the dtype of the activations."""

    code = "HS607"
    name = "loss-summed-low"
    severity = "warning"
    reason = (
        "A sum keeps the dtype of the tensor with more dimensions, and `+=` that of its target: `torch.zeros(1, dtype=hidden.dtype)` plus a "
        "float32 loss of no dimension is bfloat16. The sum of thousands of token losses then has 8 bits: above 2048 it is a multiple of 16, and a "
        "chunk that adds less than half of that adds nothing; in float16 it is inf above 65504. The gradients are scaled by a "
        "rounded factor only, but the loss is what the log, the scheduler and early stopping see."
    )
    bad = (
        _CHUNKS.format(
            start="torch.zeros(1, device=hidden.device, dtype=hidden.dtype)", add=f"total = total + {_LOSS}"
        ),
        _CHUNKS.format(start="torch.zeros((), dtype=torch.bfloat16)", add=f"total += {_LOSS}"),
        _CHUNKS.format(start="hidden.new_zeros(())", add=f"loss = {_LOSS}\n        total += loss"),
    )
    good = (
        _CHUNKS.format(start="torch.zeros((), dtype=torch.float32)", add=f"total += {_LOSS}"),
        _CHUNKS.format(start="torch.zeros((), dtype=hidden.dtype)", add=f"total = total + {_LOSS}"),
        _CHUNKS.format(start="0.0", add=f"total += {_LOSS}"),
        _CHUNKS.format(start="torch.zeros(1, dtype=labels.dtype)", add=f"total = total + {_LOSS}"),
    )
    references = (
        "https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc",
        "measured: torch 2.13, eight losses of about 2000: 16256 in bfloat16, 16219.7 in float32",
    )
    lines = _LOSSES

    def check(self, script: Script) -> Iterator[Finding]:
        """Additions in a loop of a loss to a tensor that is created with the dtype of an activation, or of 16 bits."""
        if is_exercise(script) or not _LOW.search(script.source.text):
            return
        sites = [site for name in _LOSSES for site in script.outline.calls.get(name, ())]
        for function in dict.fromkeys(function for _, function in sites):
            losses = [call for call, f in sites if f is function]
            names = {key_of(t) for c in losses for t in _targets(script, c)} - {""}
            for statement in (n for n in ast.walk(function.node) if isinstance(n, (ast.Assign, ast.AugAssign))):
                added = _added(statement)
                if added is None or not any(isinstance(n, (ast.For, ast.While)) for n in script.above(statement)):
                    continue
                target, value = added
                if not any(n in losses or key_of(n) in names for n in _terms(value)):
                    continue
                created = _created(script, target, function)
                dtype = _dtype(script, created, function) if created is not None else ""
                if created is None or not dtype or not (isinstance(statement, ast.AugAssign) or _is_vector(created)):
                    continue
                yield self.finding(
                    script.where(statement),
                    f"`{target}` has {dtype} ({script.at(created)}) and keeps it: the sum of the losses is rounded to 16 bits",
                    instead=f"create `{target}` in float32",
                )


def _targets(script: Script, call: ast.Call) -> list[ast.expr]:
    parent = script.outline.parents.get(call)
    return parent.targets if isinstance(parent, ast.Assign) else []


def _added(statement: ast.Assign | ast.AugAssign) -> tuple[str, ast.expr] | None:
    """The variable and what is added to it, by `total += value` or `total = total + value`."""
    if isinstance(statement, ast.AugAssign):
        return (key_of(statement.target), statement.value) if isinstance(statement.op, ast.Add) else None
    target, value = key_of(statement.targets[0]), statement.value
    if not target or not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return None
    other = [side for side in (value.left, value.right) if key_of(side) != target]
    return (target, other[0]) if len(other) == 1 else None


def _terms(value: ast.expr) -> list[ast.expr]:
    """A value, and the factors of a product: `loss * weight`."""
    return [*_terms(value.left), *_terms(value.right)] if isinstance(value, ast.BinOp) else [value]


def _created(script: Script, name: str, function: Function) -> ast.Call | None:
    """The call of this function that creates the tensor before the loop."""
    values = [b.value for b in script.outline.bindings.get(name, ()) if b.function is function and b.value is not None]
    calls = [
        v for v in values if isinstance(v, ast.Call) and isinstance(v.func, ast.Attribute) and v.func.attr in _CREATES
    ]
    return calls[0] if len(calls) == 1 else None


def _dtype(script: Script, created: ast.Call, function: Function) -> str:
    """The dtype in words, if it may have 16 bits; "" otherwise."""
    dtype = argument(created, None, "dtype")
    owner = created.func.value if isinstance(created.func, ast.Attribute) else None
    if dtype is None:
        is_copy = owner is not None and created.args and not script.outline.names.full(created.func)
        return (
            f"the dtype of `{text_of(owner)}`"
            if owner is not None and is_copy and _ACTIVATION.search(text_of(owner))
            else ""
        )
    formats = formats_of(script.outline, dtype, function)
    if formats and formats <= SIXTEEN_BIT:
        return "/".join(sorted(formats))
    is_of_activation = (
        isinstance(dtype, ast.Attribute) and dtype.attr == "dtype" and _ACTIVATION.search(text_of(dtype.value))
    )
    return f"the dtype `{text_of(dtype)}`" if is_of_activation else ""


def _is_vector(created: ast.Call) -> bool:
    """Whether a tensor has one element and one dimension: `torch.zeros(1)`, `torch.tensor([0.0])`."""
    first = created.args[0] if created.args else None
    if isinstance(first, (ast.List, ast.Tuple)):
        return len(first.elts) == 1
    is_tensor = isinstance(created.func, ast.Attribute) and created.func.attr in {"tensor", "new_tensor"}
    return constant(first) == 1 and not is_tensor if first is not None else False


RULES: tuple[type[Rule], ...] = (LossSummedLow,)
