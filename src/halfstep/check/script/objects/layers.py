"""Layers that a loop over the modules of a model casts, and optimizers that a file defines itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from halfstep.check.regex import regex
from halfstep.check.script.objects.formats import SIXTEEN_BIT
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.objects.weights import Cast, VariableCast, conditions_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Outline

__all__ = ["cast_layers", "defines_optimizer"]

_MATRICES = regex(r"isinstance\(\w+, .*(Linear|Conv[123]d)")
# Names of the bits that 16-bit weights do not have, in optimizers that keep them elsewhere.
_LOW_BITS = regex(r"mantissa|low_bits|error_feedback|compensat", re.IGNORECASE)


def cast_layers(outline: Outline, casts: Iterable[VariableCast]) -> Iterator[tuple[Cast, str]]:
    """`for m in model.modules(): if isinstance(m, nn.Linear): m.bfloat16()`, each with the name of the model.

    Embeddings alone are left out: their updates are sparse and large, and some recipes choose 16 bits for them.
    """
    for call, function, key, formats in casts:
        if not formats <= SIXTEEN_BIT:
            continue
        guards = conditions_of(outline, call)
        loop = outline.parents.get(call)
        while loop is not None and not isinstance(loop, (ast.For, ast.FunctionDef, ast.AsyncFunctionDef)):
            loop = outline.parents.get(loop)
        source = loop.iter if isinstance(loop, ast.For) else None
        func = source.func if isinstance(source, ast.Call) else None
        if not isinstance(func, ast.Attribute) or func.attr not in {"modules", "named_modules"}:
            continue
        names = {key_of(n) for n in ast.walk(loop.target)} if isinstance(loop, ast.For) else set()
        is_layer = key in names or (key.partition(".")[0] in names and key.endswith((".weight", ".weight.data")))
        if is_layer and len(guards) == 1 and guards[0].is_true and _MATRICES.search(guards[0].text):
            yield Cast(call, function, key.removesuffix(".data"), formats, "cast"), key_of(func.value)


def defines_optimizer(outline: Outline) -> bool:
    """Whether a class of this file is an optimizer that is used, and none keeps the low bits of 16-bit weights."""
    bases = outline.bases.items()
    own = {name for name, parents in bases if any(text_of(base).endswith("Optimizer") for base in parents)}
    own &= outline.calls.keys()
    methods = [method.node for name in own for method in outline.classes.get(name, {}).values()]
    return bool(own) and not any(_LOW_BITS.search(ast.unparse(node)) for node in methods)
