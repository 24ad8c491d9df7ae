"""Gradients of lean regions that torch's own formulas would compute out of fp16's range, or in fp32 throughout.

`x ** 3` in fp16: torch's gradient is `grad * (3 * x**2)`. From |x| = 256 on x**2 is inf, and where the gradient is 0 (the tanh of
GELU has long reached 1) the product is NaN. Multiplied from the left it has no power of x that could be inf.

`x /= s` in fp16, with an fp32 sum s: the result is fp16, because it is written into x, but torch clones x and computes both
gradients in fp32 by six operations, each on a tensor of the size of x. The result is enough for both:

    grad_x = grad / s            rounded where it is written
    grad_s = -sum(grad * x) / s  x is the quotient; in fp32
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Cube", "QuotientInPlace", "can_differentiate"]

_CUBE = 3


def can_differentiate() -> bool:
    """Whether a function of this module can be applied: torch.func cannot transform one below its own kernels."""
    return torch._C._functorch.peek_interpreter_stack() is None  # noqa: SLF001 - torch.func has no public test


class Cube(torch.autograd.Function):
    """x ** 3 whose gradient has no power of x in it that could be inf where the gradient is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The cube."""
        ctx.save_for_backward(x)
        return x**_CUBE

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """3 grad x x, from the left."""
        x: Tensor = ctx.saved_tensors[0]
        return grad * x * x * _CUBE


class QuotientInPlace(torch.autograd.Function):
    """`x /= by` for an fp16 tensor and a smaller fp32 one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor) -> Tensor:
        """Divide x, and return it."""
        ctx.mark_dirty(x)
        x.div_(by)
        ctx.save_for_backward(x, by)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Both gradients from the quotient."""
        x, by = ctx.saved_tensors
        to_x = to_by = None
        if ctx.needs_input_grad[0]:
            once = not torch.is_grad_enabled()  # what is written into a given tensor cannot be differentiated again
            to_x = torch.div(grad, by, out=torch.empty_like(grad)) if once else (grad / by).to(grad.dtype)
        if ctx.needs_input_grad[1]:
            to_by = -(grad * x.float()).sum_to_size(by.shape) / by
        return to_x, to_by
