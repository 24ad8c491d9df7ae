"""Expressions about tensors: the variable inside `loss.detach().float()`, the dtype of a new weight, and calls that read every gradient."""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.formats import SIXTEEN_BIT, cast_formats, formats_of, keyword_of
from halfstep.check.script.objects.parameters import is_model_name, may_freeze
from halfstep.check.script.objects.values import argument, constant
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import CallSite

__all__ = [
    "SHOWS_GRADIENTS",
    "adds_unscaled",
    "created_formats",
    "dtype_of_weight",
    "grad_of",
    "is_gradient",
    "joins_gradients",
    "low_layer",
    "makes_model",
    "part_dtype",
    "reads_gradients",
    "tensor_of",
]

_SAME_VALUE = {"detach", "float", "clone", "cpu", "double", "mean", "squeeze"}
_OF_ALL = {"torch.nn.utils.get_total_norm", "torch._foreach_norm", "torch._foreach_max"}  # of a list of gradients
_READS = {
    "norm",
    "clamp",
    "vector_norm",
    "nan_to_num",
    "nan_to_num_",
}  # functions of torch that take a gradient
# Functions of other files that read every gradient: `get_grad_norm`, `compute_gradient_norm`, `total_grad_norm_`.
_GRAD_NORM = regex(r"^_?(?!clip|log)(\w+_)?(grad|gradient|grads|gradients)_?(l2_?)?norms?_?(fp32)?$", re.IGNORECASE)

# Those that log them, of a logger too: `plot_grad_flow(model.named_parameters())`, `logger.log_gradients(model)`.
SHOWS_GRADIENTS = regex(
    r"^_*(log|plot|record|write|track|visuali[sz]e|show|print|monitor|add|report)_(model_)?grad(ient)?s?"
    r"(_?(norms?|hist(ogram)?s?|flow|stats?|statistics|tb|tensorboard|wandb|values?|distributions?))*$",
    re.IGNORECASE,
)
_HISTOGRAMS = {"add_histogram", "Histogram", "histogram"}  # of TensorBoard and W&B
_PARAMETERS = {"parameters", "named_parameters"}
# Tensors into one, or a list.
_JOINS = {"cat", "concat", "concatenate", "hstack", "stack", "_flatten_dense_tensors", "list", "tuple"}
_SHAPES = {"view", "view_as", "flatten", "reshape", "ravel", "contiguous"}

# Functions of other files that create a model, and variables that are one.
_FACTORY = regex(r"^_*(create|build|load|make|get|init|initialize|setup)_\w*(model|policy|transformer|unet|network)$")
_MAKES = regex(r"^_*(create|build|load|make|get|init|initialize|setup|prepare)_")
_OTHER = regex(r"data|load(er|ing)$|batch|input|token|process|config|optim|sched|state|checkpoint|weights|noise|mask")
_RESULT = regex(r"(^|[._])(model|net|unet|transformer|policy)$")


def tensor_of(node: ast.expr) -> ast.expr:
    """The tensor in `loss.detach().data.float()`."""
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SAME_VALUE:
            node = node.func.value
        elif isinstance(node, ast.Attribute) and node.attr == "data":
            node = node.value
        else:
            return node


# `torch.randn_like(p.grad) * sigma`, `weight_decay * p.data`; another gradient has the same scale.
_UNSCALED = regex(r"\brandn(_like)?\(|\bnormal(_like)?\(|noise|weight_decay|\bwd\b")


def grad_of(node: ast.expr) -> bool:
    """Whether an expression is the gradient of a parameter, also in another shape: `p.grad.flatten()`."""
    node = tensor_of(node)
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SHAPES:
        node = tensor_of(node.func.value)
    return isinstance(node, ast.Attribute) and node.attr == "grad"


def joins_gradients(value: ast.expr) -> bool:
    """Whether a value has all gradients: a list of `p.grad`, or the tensor `torch.cat([p.grad.flatten() for p in params])`."""
    joined = _joined(value) or value
    return isinstance(joined, (ast.ListComp, ast.GeneratorExp)) and grad_of(joined.elt)


def _joined(value: ast.expr) -> ast.expr | None:
    """What a call makes one tensor or list of, if it does."""
    is_join = isinstance(value, ast.Call) and last_name(key_of(value.func)) in _JOINS and value.args
    return value.args[0] if isinstance(value, ast.Call) and is_join else None


def is_gradient(outline: Outline, node: ast.expr, function: Function) -> bool:
    """Whether an expression is a gradient, also through a variable: `g = p.grad.detach()`, `for g in grads`."""
    inner = tensor_of(node)
    if not isinstance(inner, ast.Name):
        return grad_of(inner) or _joins_gradients(outline, inner, function)
    bindings = [b for b in outline.lookup(inner.id, function) if b.function is function]
    if not bindings:
        return any(_are_gradients(outline, source, function) for source in _sources_around(outline, inner))
    loops = [b.node for b in bindings if isinstance(b.node, ast.For)]
    values = [b.value for b in bindings if b.value is not None and b.index is None and not isinstance(b.node, ast.For)]
    arms = [
        arm for value in values for arm in ((value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,))
    ]
    arms = [arm for arm in arms if not (isinstance(arm, ast.Constant) and arm.value is None)]
    known = [grad_of(arm) or _joins_gradients(outline, arm, function) for arm in arms]
    known += [_are_gradients(outline, loop.iter, function) for loop in loops if isinstance(loop.target, ast.Name)]
    return bool(known) and all(known) and len(values) + len(loops) == len(bindings)


def _joins_gradients(outline: Outline, node: ast.expr, function: Function) -> bool:
    """Whether an expression is one tensor of all gradients, also through a variable for the list of them."""
    joined = _joined(node)
    return joined is not None and _are_gradients(outline, joined, function)


def _sources_around(outline: Outline, name: ast.Name) -> list[ast.expr]:
    """What a comprehension around a variable takes it from."""
    parent = outline.parents.get(name)
    while parent is not None and not isinstance(parent, ast.stmt):
        for loop in getattr(parent, "generators", ()):
            if isinstance(loop.target, ast.Name) and loop.target.id == name.id:
                return [loop.iter]
        parent = outline.parents.get(parent)
    return []


def _are_gradients(outline: Outline, node: ast.expr, function: Function) -> bool:
    """Whether an expression is a list of gradients: `[p.grad for p in params]`."""
    options = [node]
    if isinstance(node, ast.Name):
        options = [b.value for b in outline.lookup(node.id, function) if b.function is function and b.value is not None]
    lists = [option for option in options if isinstance(option, (ast.ListComp, ast.GeneratorExp))]
    return bool(lists) and len(lists) == len(options) and all(grad_of(option.elt) for option in lists)


def adds_unscaled(value: ast.AST) -> bool:
    """Whether a value that is added to a gradient has no loss scale: noise, or the decay of a weight."""
    return bool(_UNSCALED.search(ast.unparse(value)))


def reads_gradients(outline: Outline, call: ast.Call, function: Function, name: str, last: str) -> bool:
    """Whether a call of a function, not of a method, computes a norm of gradients, or is named for logging those of a model."""
    if SHOWS_GRADIENTS.match(last):
        return any(_has_gradients(value) for value in arguments_of(call))
    if last in _HISTOGRAMS:
        return any(is_gradient(outline, value, function) for value in arguments_of(call))
    if name in _OF_ALL:
        return bool(call.args) and _are_gradients(outline, call.args[0], function)
    if last in _READS and name.startswith("torch."):
        return bool(call.args) and is_gradient(outline, call.args[0], function)
    is_function = isinstance(call.func, ast.Name) or bool(name)
    return is_function and bool(call.args) and bool(_GRAD_NORM.match(last))


def _has_gradients(value: ast.expr) -> bool:
    """Whether an argument is a model, or its parameters."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return value.func.attr in _PARAMETERS
    return is_model_name(key_of(value))


def created_formats(outline: Outline, call: ast.Call, function: Function) -> frozenset[str]:
    """The formats of the weights that a call creates, `nn.Linear(..., dtype=...)` or `nn.Parameter(torch.zeros(..., dtype=...))`.

    Empty if no dtype is written, or the parameter is not trained.
    """
    tensor = _tensor_of_parameter(outline, call, function)
    if tensor is not None and (formats := cast_formats(outline, tensor, function)):
        return formats
    dtype = dtype_of_weight(outline, call, function)
    return formats_of(outline, dtype, function) if dtype is not None else frozenset()


def dtype_of_weight(outline: Outline, call: ast.Call, function: Function) -> ast.expr | None:
    """The dtype that is written for the weights which a call creates."""
    made: ast.Call | None = call
    if outline.names.full(call.func) == "torch.nn.Parameter":
        made = _tensor_of_parameter(outline, call, function)
    return keyword_of(outline, made, function, "dtype", "torch_dtype") if made is not None else None


def part_dtype(outline: Outline, call: ast.Call, function: Function, name: str) -> ast.expr | None:
    """The dtype that a loader gets for one of the models it returns, `unet_dtype=` of what is assigned to `self._unet`."""
    part = last_name(name).strip("_")
    return keyword_of(outline, call, function, f"{part}_dtype", f"{part}_weight_dtype") if part.isidentifier() else None


def makes_model(last: str, name: str) -> bool:
    """Whether a function of another file creates a model, by its name or by that of its result: `model, tok = load_chat(...)`."""
    is_result = bool(_MAKES.search(last) and _RESULT.search(name)) and ("model" in last or not _OTHER.search(last))
    return bool(_FACTORY.search(last)) or is_result


def _tensor_of_parameter(outline: Outline, call: ast.Call, function: Function) -> ast.Call | None:
    """The call that creates the tensor of a parameter that is trained, also through a variable."""
    if outline.names.full(call.func) != "torch.nn.Parameter":
        return None
    if constant(argument(call, 1, "requires_grad")) is False:
        return None
    tensor = argument(call, 0, "data")
    values = outline.values(key_of(tensor), function) if tensor is not None and key_of(tensor) else [tensor]
    return values[0] if len(values) == 1 and isinstance(values[0], ast.Call) else None


def low_layer(outline: Outline, node: ast.AST, function: Function, depth: int = 3) -> CallSite | None:
    """The first layer or parameter that is created in 16 bits below a node, also by the classes of this file that it creates."""
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or call is node:
            continue
        if outline.names.full(call.func).startswith("torch.nn."):
            formats = created_formats(outline, call, function)
            if formats and formats <= SIXTEEN_BIT:
                return CallSite(call, function)
        target = outline.call_target(call, function)
        is_part = target is not None and target.name == "__init__" and target is not function
        if is_part and target is not None and depth and not may_freeze(outline):  # nothing of the model is frozen
            inner = low_layer(outline, target.node, target, depth - 1)
            if inner is not None:
                return inner
    return None
