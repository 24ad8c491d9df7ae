"""The dtype of what a model returns: logits that leave an autocast region, and classes that cast their own output."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, NamedTuple

from halfstep.check.script.objects.formats import SIXTEEN_BIT
from halfstep.check.script.objects.modules import created_classes
from halfstep.check.script.objects.values import UNKNOWN, autocasts_of
from halfstep.check.script.objects.weights import Creation
from halfstep.check.script.syntax.names import chain, key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import Binding

if TYPE_CHECKING:
    from halfstep.check.script.script import Script

__all__ = ["Exit", "in_no_grad", "keeps_dtype", "leaves_autocast"]

MAX_STEPS = 6  # assignments and reshapes between the output of a model and its loss
_RESHAPES = {
    "view",
    "reshape",
    "flatten",
    "transpose",
    "permute",
    "contiguous",
    "squeeze",
    "unsqueeze",
    "swapaxes",
    "cuda",
}
_CASTS = re.compile(r"float\(|float32|fp32|softmax|upcast|\.double\(")
# A function or module with such a name is no model whose last layer is a matrix product.
_MODEL = re.compile(
    r"model|net|classifier|head|backbone|student|encoder|decoder|policy|actor|gpt|llm|\blm\b|vit|bert", re.IGNORECASE
)
_LIBRARIES = ("torchvision.models.", "timm.", "torch.nn.")
_FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning", "deepspeed", "lightning_fabric")


class Exit(NamedTuple):
    """Logits that a model computes under autocast and that are used after the region."""

    model: str
    formats: frozenset[str]
    is_certain: bool  # the text shows that the model casts nothing back


def in_no_grad(script: Script, node: ast.AST) -> bool:
    """Whether a `with` or a decorator around a node turns gradients off."""
    contexts: list[ast.expr] = []
    parent = script.outline.parents.get(node)
    while parent is not None:
        if isinstance(parent, (ast.With, ast.AsyncWith)):
            contexts += [item.context_expr for item in parent.items]
        elif isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            contexts += parent.decorator_list
        parent = script.outline.parents.get(parent)
    return any(re.search(r"no_grad|inference_mode", ast.unparse(context)) for context in contexts)


def keeps_dtype(script: Script, creation: Creation) -> bool:
    """Whether a class returns what its last layer computes: one of this file without a cast, or a library's."""
    outline = script.outline
    if outline.names.full(creation.node.func).startswith(_LIBRARIES):
        return True
    classes = created_classes(outline, creation.node)
    return bool(classes) and all(_casts_nothing(outline, name) for name in classes)


def _casts_nothing(outline: Outline, name: str) -> bool:
    forward = outline.classes.get(name, {}).get("forward")
    return forward is not None and not _CASTS.search(ast.unparse(forward.node))


def leaves_autocast(script: Script, logits: ast.expr, function: Function, line: int) -> Exit | None:
    """The autocast region that logits come from, if they are the output of a model and nothing casts them since."""
    outline = script.outline
    if outline.names.uses(*_FRAMEWORKS):
        return None
    node = logits
    inside: ast.AST | None = None  # the statement that computes the value
    for _ in range(MAX_STEPS):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _RESHAPES:
            node = node.func.value
        elif isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "logits"):
            node = node.value
        elif isinstance(node, ast.Name):
            binding = _last_binding(outline, node.id, function, line)
            if binding is None or binding.value is None or binding.index not in {None, 0}:
                return None
            node, inside, line = binding.value, binding.node, binding.node.lineno  # type: ignore[attr-defined]
        else:
            break
    if not isinstance(node, ast.Call) or inside is None or not chain(node.func):
        return None
    model = key_of(node.func).removesuffix(".forward")
    formats = _formats_around(script, inside, function)
    if not formats or outline.names.full(node.func) or not _MODEL.search(model):
        return None
    target = outline.call_target(node, function)
    if target is not None and _CASTS.search(ast.unparse(target.node)):
        return None
    creations = script.training.model(node.func, function).creations
    own = [c for c in creations if created_classes(outline, c.node)]
    if any(not keeps_dtype(script, c) for c in own):
        return None
    certain = bool(creations) and all(keeps_dtype(script, c) for c in creations)
    return Exit(model, formats, certain)


def _last_binding(outline: Outline, name: str, function: Function, line: int) -> Binding | None:
    here = [b for b in outline.lookup(name, function) if b.function is function]
    before = [b for b in here if getattr(b.node, "lineno", 0) < line]
    # In the branches of a condition the earlier one may be the one that runs.
    return before[-1] if before else None


def _formats_around(script: Script, node: ast.AST, function: Function) -> frozenset[str]:
    """The 16-bit formats of the innermost autocast region around a statement."""
    parent = script.outline.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if isinstance(parent, ast.With):
            regions = [a for item in parent.items for a in autocasts_of(script.outline, item.context_expr, function)]
            if regions:
                dtypes = frozenset().union(*(a.dtypes for a in regions))
                enabled = all(a.enabled != "no" for a in regions)
                return dtypes if enabled and dtypes <= SIXTEEN_BIT and UNKNOWN not in dtypes else frozenset()
        parent = script.outline.parents.get(parent)
    return frozenset()
