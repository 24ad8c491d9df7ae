"""What a step must know about its gradients: whether all are finite, and their norm.

The norm is computed from the gradients as they are, still multiplied by the loss scale, in fp32 whatever their dtype
(squares of fp16 values overflow fp16). It is inf or NaN exactly if an element is, or if the sum of squares leaves
fp32's range, which is just as unusable; so one reduction answers both questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.table import copied_to
from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["dense_values", "flag_and_norm", "sums_of_squares", "total_norm"]

_KERNEL_DTYPES = (torch.float32, *DTYPES_16_BIT)


def dense_values(grad: Tensor) -> Tensor:
    """The real, dense elements behind a gradient; in-place changes to them change the gradient."""
    if grad.is_sparse:
        grad = grad._values()  # noqa: SLF001 - the documented values() rejects uncoalesced tensors and autograd's own
    if grad.is_complex():
        return torch.view_as_real(grad.conj() if grad.is_conj() else grad)
    return grad


def sums_of_squares(grads: Sequence[Tensor], tables: dict[Any, Any] | None) -> Tensor | None:
    """The sum of squares of each gradient, in fp32, by one launch for each dtype; None where kernels cannot read all of them.

    `tables` is a dictionary that the caller passes at every step: the kernels' tables are stored in it, and without it
    the kernels are not used. If the allocator returned the memory of one of the last steps, the host need not examine each gradient.
    """
    if tables is None or not grads:
        return None
    stats = tables.get("stats")
    known: Tensor | None = None if stats is None else stats.known_sums(grads)
    if known is not None:
        return known
    device = grads[0].device
    if not triton_runs_on(device) or not all(_kernel_reads(g) and g.device == device for g in grads):
        return None
    if stats is None:
        from halfstep.kernels.gradstats_triton import GradStats

        stats = tables["stats"] = GradStats()
    return stats.sums(grads)


def total_norm(grads: Sequence[Tensor], device: torch.device, tables: dict[Any, Any] | None = None) -> Tensor:
    """The 2-norm over all elements of all gradients, in fp32 on `device` (fp64 gradients: computed in fp64).

    `tables` is as for `sums_of_squares`.
    """
    sums = sums_of_squares(grads, tables)
    if sums is not None:
        return copied_to(sums.sum().sqrt(), device)
    norms: list[Tensor] = []
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        values = dense_values(grad)
        if values.numel():
            groups.setdefault((values.device, values.dtype), []).append(values)
    for key, group in groups.items():
        own_tables = None if tables is None else tables.setdefault(key, {})
        norms.append(copied_to(_norm_of_one_kind(group, own_tables), device, torch.float32))
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=device)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _norm_of_one_kind(group: list[Tensor], tables: dict[Any, Any] | None) -> Tensor:
    """The norm of values of one device and dtype."""
    sums = sums_of_squares(group, tables)
    if sums is not None:
        return sums.sum().sqrt()
    accumulate = torch.float64 if group[0].dtype is torch.float64 else torch.float32
    parts = torch._foreach_norm(group, 2, dtype=accumulate)  # noqa: SLF001 - what torch's own clip_grad_norm_ calls
    total: Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return total


def flag_and_norm(grads: Sequence[Tensor], tables: dict[Any, Any]) -> tuple[Tensor, Tensor]:
    """Whether an element is not finite (1.0 or 0.0) and the 2-norm of gradients of one device, in fp32 and on it.

    `tables` is as for `sums_of_squares`.
    """
    device = grads[0].device
    sums = sums_of_squares(grads, tables)
    if sums is None:
        norm = total_norm(grads, device, tables)
        return (~norm.isfinite()).to(torch.float32), norm
    from halfstep.kernels.gradstats_triton import judge

    one = tables.get("one")
    if one is None:
        one = tables["one"] = torch.ones((), dtype=torch.float32, device=device)
    flag, norm, _ = judge(sums, one, None)
    return flag, norm


def _kernel_reads(grad: Tensor) -> bool:
    return grad.dtype in _KERNEL_DTYPES and grad.layout is torch.strided and grad.is_contiguous()
