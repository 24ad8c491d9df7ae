"""Cross-entropy of 16-bit or fp32 logits, computed in fp32 without a copy of them.

torch makes the log-probabilities (as large as the logits), under autocast an fp32 copy of those, and in backward the
gradients of both. With a vocabulary of 50 thousand these are the largest tensors of a step. Here

    forward     reads the logits once and keeps, for each position, the largest logit and the sum of exponentials:
                    max, sum = max_c x_c, sum_c exp(x_c - max)                        both fp32, in one pass
                    loss     = w_t (log sum - (x_t - max))
    backward    reads the logits again and writes their gradient, once, in their dtype:
                    dx_c     = g w_t (exp(x_c - max) / sum - [c = t])

so that the gradient is the only new tensor of the size of the logits. The largest logit and the sum are stored separately,
not as one logarithm: of logits around 10^4 that would have an error of 5 * 10^-4, and all probabilities with it.

With class weights w and label smoothing e over C classes, as in torch:

    loss        = (1 - e) w_t (-log p_t)  +  e / C * sum_c w_c (-log p_c)
    dloss / dx  = ((1 - e) w_t + e / C * sum w) p_c  -  (1 - e) w_t [c = t]  -  e / C * w_c
    mean        = sum of losses / sum of w_t over the positions that are not ignored; NaN if there is none

Arguments and results are those of `aten::cross_entropy_loss` on fp32 logits, with three differences. A target outside
[0, C) gives a NaN loss and NaN gradients of its position, where torch's CUDA kernel ends the process. An ignored position
has gradient 0 whatever its logits are; torch gives NaN if they are. And the logits are saved for backward, so changing
them in place after the loss raises; torch saves log-probabilities.

Few logits, and whatever the kernels do not support (class probabilities as targets, fp64, other devices, tensor subclasses, transforms of
torch.func, forward-mode derivatives, tracing and torch.compile) goes to torch in fp32. `reference` and
`reference_gradient` state the arithmetic in torch; the second one also serves derivatives of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.cross_entropy_launch import (
    MEAN,
    NONE,
    SUM,
    Settings,
    class_dim,
    layouts,
    run_backward,
    run_forward,
)
from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["Settings", "cross_entropy", "cross_entropy_as_on_cuda", "reference", "reference_gradient"]


# Below this, torch in fp32: a copy of 4 MiB at most. For 128 x 1000 logits next to an H200 the host needs 0.77 ms for both
# passes of our kernels and 0.25 ms for torch's (0.31 under autocast).
FEW_LOGITS = 2**20


class Implementation(NamedTuple):
    """Loss with what backward needs, and gradient."""

    forward: Callable[[Tensor, Tensor, Tensor | None, Settings], tuple[Tensor, Tensor | None]]
    backward: Callable[..., Tensor | None]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The arguments and result of `aten::cross_entropy_loss`, computed in fp32 (fp64 logits: fp64)."""
    settings = Settings(reduction, ignore_index, label_smoothing)
    if (
        not torch.compiler.is_compiling()
        and logits.numel() >= FEW_LOGITS
        and triton_runs_on(logits.device)
        and _untransformed(logits, target, weight)
        and _fits(logits, target, weight, settings)
    ):
        return apply(logits, target, weight, settings, FUSED)
    return _by_torch(logits, target, weight, settings)


def cross_entropy_as_on_cuda(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`cross_entropy` on fake tensors: the same tensors are allocated, saved and freed, and no kernel runs."""
    settings = Settings(reduction, ignore_index, label_smoothing)
    if logits.numel() >= FEW_LOGITS and _fits(logits, target, weight, settings):
        return apply(logits, target, weight, settings, WITHOUT_LAUNCHES)
    return _by_torch(logits, target, weight, settings)


def apply(
    logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings, implementation: Implementation
) -> Tensor:
    """The loss by one implementation, recorded by autograd."""
    loss: Tensor = _CrossEntropy.apply(logits, target, weight, settings, implementation)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits themselves and two numbers for each position."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        settings: Settings,
        implementation: Implementation,
    ) -> Tensor:
        target = target.contiguous()
        loss, scratch = implementation.forward(logits, target, weight, settings)
        ctx.save_for_backward(logits, target, weight, scratch)
        ctx.settings, ctx.implementation = settings, implementation
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, weight, scratch = ctx.saved_tensors
        result: Tensor | None = None
        if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):  # create_graph, or compiled autograd
            result = ctx.implementation.backward(grad, logits, target, weight, scratch, ctx.settings)
        if result is None:
            result = reference_gradient(grad, logits, target, weight, ctx.settings)
        return result, None, None, None, None


# --- which calls the kernels support


def _untransformed(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors with memory, outside of transforms and tracing, so that a kernel may read them."""
    if not all(t is None or type(t) in _PLAIN for t in tensors):
        return False
    c = torch._C  # noqa: SLF001 - none of these questions has a public name
    infra = (c._TorchDispatchModeKey.FAKE, c._TorchDispatchModeKey.PROXY, c._TorchDispatchModeKey.FUNCTIONAL)  # noqa: SLF001
    return not (
        c._are_functorch_transforms_active()  # noqa: SLF001
        or forward_ad._current_level >= 0  # noqa: SLF001
        or c._get_tracing_state() is not None  # noqa: SLF001
        or any(c._get_dispatch_mode(mode) is not None for mode in infra)  # noqa: SLF001
    )


_PLAIN = (Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, *DTYPES_16_BIT)


def _fits(logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings) -> bool:
    """Whether these are class indices over logits that the kernels can read; torch has the messages for the others."""
    dim = class_dim(logits)
    shape = logits.shape
    # torch takes bytes as class indices too, except for images.
    index_dtypes = (torch.int64, torch.uint8) if logits.dim() <= 2 else (torch.int64,)
    return (
        logits.dim() > 0
        and logits.dtype in _DTYPES
        and target.dtype in index_dtypes
        and target.device == logits.device
        and logits.layout is target.layout is torch.strided
        and not (logits.is_nested or target.is_nested)
        and target.shape == (*shape[:dim], *shape[dim + 1 :])
        and logits.numel() > 0
        and settings.reduction in {NONE, MEAN, SUM}
        and 0 <= settings.label_smoothing <= 1
        and (weight is None or _weight_fits(weight, logits))
        and layouts(logits) is not None
    )


def _weight_fits(weight: Tensor, logits: Tensor) -> bool:
    return (
        weight.shape == (logits.shape[class_dim(logits)],)
        and weight.dtype in _DTYPES
        and weight.device == logits.device
        and weight.layout is torch.strided
        and not weight.requires_grad  # torch explains that it has no derivative
    )


def _by_torch(logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings) -> Tensor:
    """torch's own operation on fp32 values."""
    if logits.dtype in DTYPES_16_BIT:
        logits = logits.float()
    if target.dtype in DTYPES_16_BIT:  # probabilities, which label smoothing would compute in their dtype
        target = target.float()
    if weight is not None and weight.dtype in DTYPES_16_BIT:
        weight = weight.float()
    loss: Tensor = torch.ops.aten.cross_entropy_loss.default(
        logits, target, weight, settings.reduction, settings.ignore_index, settings.label_smoothing
    )
    return loss


# --- the reference


def reference(logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings) -> Tensor:
    """The loss, in torch: fp32, or fp64 for fp64 logits."""
    terms = _terms(logits, target, weight, settings)
    log_p = torch.log_softmax(terms.logits, terms.dim)
    losses = -terms.target_weight * log_p.gather(terms.dim, terms.classes.unsqueeze(terms.dim)).squeeze(terms.dim)
    if settings.label_smoothing:
        smooth = -(log_p * terms.class_weights).sum(terms.dim)
        losses = (1 - settings.label_smoothing) * losses + terms.each * smooth
    losses = losses.masked_fill(terms.ignored, 0.0)
    match settings.reduction:
        case 0:
            return losses
        case 1:
            return losses.sum() / terms.total
        case _:
            return losses.sum()


def reference_gradient(
    grad: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings
) -> Tensor:
    """The gradient of the logits, in differentiable operations of torch."""
    terms = _terms(logits, target, weight, settings)
    p = torch.softmax(terms.logits, terms.dim)
    hard = ((1 - settings.label_smoothing) * terms.target_weight).unsqueeze(terms.dim)
    factor = hard + terms.each * terms.class_weights.sum()
    one_hot = torch.zeros_like(p).scatter(terms.dim, terms.classes.unsqueeze(terms.dim), hard)
    result = factor * p - one_hot - terms.each * terms.class_weights
    if settings.reduction == MEAN:
        grad = grad / terms.total
    scaled = (grad.unsqueeze(terms.dim) if settings.reduction == NONE else grad) * result
    return scaled.masked_fill(terms.ignored.unsqueeze(terms.dim), 0.0).to(logits.dtype)


class _Terms(NamedTuple):
    logits: Tensor  # fp32 or fp64
    dim: int  # of the classes
    ignored: Tensor
    classes: Tensor  # the target, 0 where it is outside the classes
    target_weight: Tensor  # NaN where the target is outside the classes, 0 where it is ignored
    class_weights: Tensor  # broadcasts over the logits
    total: Tensor  # sum of target weights
    each: float  # e / C


def _terms(logits: Tensor, target: Tensor, weight: Tensor | None, settings: Settings) -> _Terms:
    dim = class_dim(logits)
    num_classes = logits.shape[dim]
    wide = logits if logits.dtype is torch.float64 else logits.float()
    classes = torch.ones(num_classes, dtype=wide.dtype, device=wide.device) if weight is None else weight.to(wide.dtype)
    target = target.long()
    ignored = target == settings.ignore_index
    inside = (target >= 0) & (target < num_classes)
    index = torch.where(inside, target, 0)
    target_weight = classes[index].masked_fill(~inside, torch.nan).masked_fill(ignored, 0.0)
    broadcast = classes.reshape([-1 if at == dim else 1 for at in range(logits.dim())])
    each = settings.label_smoothing / num_classes
    return _Terms(wide, dim, ignored, index, target_weight, broadcast, target_weight.sum(), each)


REFERENCE = Implementation(
    lambda logits, target, weight, settings: (reference(logits, target, weight, settings), None),
    lambda grad, logits, target, weight, _scratch, settings: reference_gradient(grad, logits, target, weight, settings),
)
FUSED = Implementation(partial(run_forward, launch=True), partial(run_backward, launch=True))
WITHOUT_LAUNCHES = Implementation(partial(run_forward, launch=False), partial(run_backward, launch=False))
