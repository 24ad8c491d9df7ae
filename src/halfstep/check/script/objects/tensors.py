"""Expressions about tensors: the variable inside `loss.detach().float()`, and calls that read every gradient."""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex

__all__ = ["grad_of", "reads_gradients", "tensor_of"]

_SAME_VALUE = {"detach", "float", "clone", "cpu", "double", "mean", "squeeze"}
_READS = {
    "norm",
    "clamp",
    "vector_norm",
    "_foreach_norm",
    "nan_to_num",
    "nan_to_num_",
}  # functions of torch that take a gradient
# Functions of other files that read every gradient: `get_grad_norm`, `compute_gradient_norm`, `total_grad_norm_`.
_GRAD_NORM = regex(r"^_?(?!clip|log)(\w+_)?(grad|gradient|grads|gradients)_?(l2_?)?norms?_?(fp32)?$", re.IGNORECASE)


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
    """Whether an expression is the gradient of a parameter."""
    node = tensor_of(node)
    return isinstance(node, ast.Attribute) and node.attr == "grad"


def adds_unscaled(value: ast.AST) -> bool:
    """Whether a value that is added to a gradient has no loss scale: noise, or the decay of a weight."""
    return bool(_UNSCALED.search(ast.unparse(value)))


def reads_gradients(call: ast.Call, name: str, last: str) -> bool:
    """Whether a call of a function, not of a method, computes a norm of gradients."""
    if last in _READS and name.startswith("torch."):
        return bool(call.args) and grad_of(call.args[0])
    is_function = isinstance(call.func, ast.Name) or bool(name)
    return is_function and bool(call.args) and bool(_GRAD_NORM.match(last))
