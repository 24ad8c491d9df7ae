"""The formats of tensors, as far as one function decides them: cast explicitly, or computed in an autocast region.

A product in an enabled region has the region's dtype, and so has the output of a model that ends in a linear layer.
Elementwise operations keep it; a softmax, a sum or a norm returns float32 inside the region and keeps it outside.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from halfstep.check.script.objects.formats import SIXTEEN_BIT
from halfstep.check.script.objects.modules import created_classes
from halfstep.check.script.objects.values import argument, autocasts_of, constant
from halfstep.check.script.objects.weights import Creation, cast_formats
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import Binding

if TYPE_CHECKING:
    from halfstep.check.script.script import Script

__all__ = ["PRODUCTS", "RAISED", "formats_of_tensor", "has_dtype_of", "names_with_dtype", "region_formats"]

MAX_STEPS = 10  # operations and assignments between a cast and the value in question
PRODUCTS = frozenset({"matmul", "mm", "bmm", "einsum", "baddbmm", "addmm"})
_KEEPS = frozenset({
    "abs", "clamp", "clip", "clone", "contiguous", "cpu", "cuda", "detach", "expand", "flatten", "gather", "index_select", "max", "mean",
    "min", "neg", "permute", "relu", "repeat", "reshape", "sigmoid", "sqrt", "square", "squeeze", "t", "tanh", "transpose", "unsqueeze",
    "view", "swapaxes",
})  # fmt: skip
# Autocast computes these in float32.
RAISED = frozenset({"softmax", "log_softmax", "sum", "norm", "pow", "exp", "log", "cumsum", "prod"})
_LAYERS = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")
_SHAPES = frozenset({"squeeze", "view", "flatten", "reshape"})
_NONE: frozenset[str] = frozenset()


def formats_of_tensor(script: Script, node: ast.expr, function: Function) -> frozenset[str]:
    """The formats that a value may have where it stands, all of them 16-bit; empty if the text does not decide it."""
    outline = script.outline
    entry: object = ...  # what is read of the outputs of a model
    for _ in range(MAX_STEPS):
        if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in {"T", "mT", "data"}):
            entry = constant(node.slice) if isinstance(node, ast.Subscript) else entry
            node = node.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            return region_formats(script, node, function)
        elif isinstance(node, ast.BinOp) and isinstance(constant(node.right), (int, float)):
            node = node.left
        elif isinstance(node, ast.BinOp) and isinstance(constant(node.left), (int, float)):
            node = node.right
        elif isinstance(node, ast.Name):
            passed = _passed(script, node.id, function)
            if passed:
                return passed
            binding = _only_binding(outline, node, function)
            if binding is None or binding.value is None:
                return _NONE
            node = binding.value
        elif isinstance(node, ast.Call):
            cast = cast_formats(outline, node, function)
            if cast:
                return cast if cast <= SIXTEEN_BIT else _NONE
            last = key_of(node.func).rsplit(".", 1)[-1] or getattr(node.func, "attr", "")
            is_torch = outline.names.full(node.func).startswith("torch.")
            if last in PRODUCTS and (is_torch or isinstance(node.func, ast.Attribute)):
                return region_formats(script, node, function)
            if last in RAISED and region_formats(script, node, function):
                return _NONE
            if last in _KEEPS | RAISED and argument(node, None, "dtype") is None:
                inner = argument(node, 0, "input") if is_torch else getattr(node.func, "value", None)
                if inner is None:
                    return _NONE
                node, entry = inner, ...
            else:
                return (
                    region_formats(script, node, function) if _ends_in_layer(script, node, function, entry) else _NONE
                )
        else:
            return _NONE
    return _NONE


def _passed(script: Script, name: str, function: Function) -> frozenset[str]:
    """The formats of what every call in this file passes for a parameter that its function does not assign."""
    outline = script.outline
    if name not in function.params or any(b.function is function for b in outline.bindings.get(name, ())):
        return _NONE
    passed = [p for p in outline.passed(name, function) if p[1] is not function]
    formats = [formats_of_tensor(script, value, caller) for value, caller in passed[:MAX_STEPS]]
    return frozenset().union(*formats) if formats and all(formats) else _NONE


def names_with_dtype(function: Function, param: str) -> frozenset[str]:
    """A parameter and the variables made from it, all of whose assignments keep its dtype; empty if it is cast in place."""
    bound: dict[str, list[ast.expr | None]] = {param: []}
    for node in ast.walk(function.node):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            bound.setdefault(node.targets[0].id, []).append(node.value)
    assigned = {
        id(t) for n in ast.walk(function.node) if isinstance(n, ast.Assign) and len(n.targets) == 1 for t in n.targets
    }
    for node in ast.walk(function.node):
        if isinstance(node, ast.Name) and not _is_load(node) and id(node) not in assigned:
            bound.setdefault(node.id, []).append(None)  # of a loop, a tuple or `x += y`
    names = frozenset(bound)
    while True:
        same = frozenset(n for n in names if all(v is not None and has_dtype_of(v, names) for v in bound[n]))
        if same == names or param not in same:
            return same if param in same else _NONE
        names = same


def has_dtype_of(node: ast.expr, names: frozenset[str]) -> bool:
    """Whether a value outside autocast has the dtype of these variables: shapes, parts, arithmetic among them and with numbers."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Subscript):
        return has_dtype_of(node.value, names)
    if isinstance(node, ast.BinOp):
        sides = [side for side in (node.left, node.right) if not isinstance(constant(side), (int, float))]
        return bool(sides) and all(has_dtype_of(side, names) for side in sides)
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Attribute)
        or node.func.attr not in _KEEPS | RAISED
    ):
        return False
    is_torch = key_of(node.func.value) == "torch"
    inner = argument(node, 0, "input") if is_torch else node.func.value
    return inner is not None and argument(node, None, "dtype") is None and has_dtype_of(inner, names)


def _only_binding(outline: Outline, name: ast.Name, function: Function) -> Binding | None:
    """The last assignment before a use, if it is not in a branch that the use is not in."""
    here = [b for b in outline.lookup(name.id, function) if b.function is function and b.index is None]
    before = [b for b in here if getattr(b.node, "lineno", 0) < name.lineno]
    if not before or len(before) != len(here):
        return None  # assigned again later: in a loop, that may be the value
    binding = before[-1]
    block = outline.parents.get(binding.node)
    around = set()
    parent: ast.AST | None = name
    while parent is not None:
        around.add(parent)
        parent = outline.parents.get(parent)
    while isinstance(block, (ast.With, ast.AsyncWith)):  # a region always runs
        block = outline.parents.get(block)
    return binding if block in around or isinstance(block, ast.Module) else None


def region_formats(script: Script, node: ast.AST, function: Function) -> frozenset[str]:
    """The dtypes of the innermost autocast region around a node; empty if there is none, or if it may be off or float32."""
    parent = script.outline.parents.get(node)
    while parent is not None:
        contexts: list[ast.expr] = []
        if isinstance(parent, (ast.With, ast.AsyncWith)):
            contexts = [item.context_expr for item in parent.items]
        elif isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            contexts = parent.decorator_list
        regions = [a for context in contexts for a in autocasts_of(script.outline, context, function)]
        if regions:
            dtypes = frozenset().union(*(a.dtypes for a in regions))
            on_gpu = all(a.device in {"cuda", None} for a in regions)
            return dtypes if on_gpu and dtypes <= SIXTEEN_BIT and all(a.enabled != "no" for a in regions) else _NONE
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return _NONE
        parent = script.outline.parents.get(parent)
    return _NONE


def _ends_in_layer(script: Script, call: ast.Call, function: Function, entry: object) -> bool:
    """Whether a call runs a model whose forward returns what a linear layer or a convolution computes, or does so for an entry."""
    if not key_of(call.func) or script.outline.names.full(call.func):
        return False
    creations = script.training.model(call.func, function).creations
    return bool(creations) and all(_returns_layer(script, creation, entry) for creation in creations)


def _returns_layer(script: Script, creation: Creation, entry: object) -> bool:
    outline = script.outline
    full = outline.names.full(creation.node.func)
    if full in _LAYERS or full.startswith("torchvision.models."):
        return True
    classes = created_classes(outline, creation.node)
    return bool(classes) and all(_last_layer(outline, name, entry) for name in classes)


def _last_layer(outline: Outline, name: str, entry: object) -> bool:
    """Whether the forward of a class of this file returns `self.layer(...)`, a layer that autocast lowers."""
    methods = outline.classes.get(name, {})
    forward, init = methods.get("forward"), methods.get("__init__")
    if forward is None or init is None:
        return False
    returns = [n.value for n in ast.walk(forward.node) if isinstance(n, ast.Return) and n.value is not None]
    made = {
        key_of(target): node.value
        for node in ast.walk(init.node)
        if isinstance(node, ast.Assign)
        for target in node.targets
    }
    values = [_entry(_assigned_once(forward, value), entry) for value in map(_unshaped, returns)]
    for value in (_unshaped(_assigned_once(forward, _unshaped(value))) for value in values):
        layer = made.get(key_of(value.func)) if isinstance(value, ast.Call) else None
        if isinstance(layer, ast.Call) and outline.names.full(layer.func) == "torch.nn.Sequential" and layer.args:
            layer = layer.args[-1]
        if not isinstance(layer, ast.Call) or outline.names.full(layer.func) not in _LAYERS:
            return False
    return bool(returns)


def _entry(value: ast.expr, entry: object) -> ast.expr:
    """What a model returns under a key, or at a position; a tensor as it is."""
    if isinstance(value, ast.Dict):
        pairs = zip(value.keys, value.values, strict=True)
        return next((part for key, part in pairs if key is not None and constant(key) == entry), value)
    if isinstance(value, ast.Call) and key_of(value.func) == "dict":
        return next((keyword.value for keyword in value.keywords if keyword.arg == entry), value)
    is_part = isinstance(value, ast.Tuple) and type(entry) is int and -len(value.elts) <= entry < len(value.elts)
    return value.elts[entry] if is_part else value  # type: ignore[attr-defined]


def _assigned_once(function: Function, value: ast.expr) -> ast.expr:
    """What a returned variable is assigned, if that happens once: `logits = self.head(x)`, `return logits`."""
    name = value.id if isinstance(value, ast.Name) else ""
    stores = [n for n in ast.walk(function.node) if isinstance(n, ast.Name) and n.id == name and not _is_load(n)]
    assigns = [n for n in ast.walk(function.node) if isinstance(n, ast.Assign) and n.targets == stores]
    return assigns[0].value if name and name not in function.params and len(assigns) == 1 else value


def _is_load(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _unshaped(node: ast.expr) -> ast.expr:
    """The value in `self.fc(x).squeeze(1)`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SHAPES:
        node = node.func.value
    return node
