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

__all__ = ["dense_values", "flag_and_norm", "known_sums", "total_norm"]

_KERNEL_DTYPES = (torch.float32, *DTYPES_16_BIT)


def dense_values(grad: Tensor) -> Tensor:
    """The real, dense elements behind a gradient; in-place changes to them change the gradient."""
    if grad.is_sparse:
        grad = grad._values()  # noqa: SLF001 - the documented values() rejects uncoalesced tensors and autograd's own
    if grad.is_complex():
        return torch.view_as_real(grad.conj() if grad.is_conj() else grad)
    return grad


def known_sums(grads: Sequence[Tensor], tables: dict[Any, Any] | None) -> Tensor | None:
    """The sums of squares, by one launch, if all gradients are of the kind of those in the last `total_norm`.

    That is the usual step. If the allocator even returned the same memory, the host need not examine each gradient.
    """
    known = None if tables is None or not grads else tables.get("all")
    if known is None:
        return None
    if known.knows(grads):
        same: Tensor = known.same_sums(grads)
        return same
    device, dtype = known.device, known.dtype
    if not all(
        g.dtype is dtype and g.layout is torch.strided and g.is_contiguous() and g.device == device for g in grads
    ):
        return None
    sums: Tensor = known.sums(grads)
    return sums


def total_norm(grads: Sequence[Tensor], device: torch.device, tables: dict[Any, Any] | None = None) -> Tensor:
    """The 2-norm over all elements of all gradients, in fp32 on `device` (fp64 gradients: computed in fp64).

    `tables` is a dictionary that the caller passes at every step: the tables of the one-launch kernel are stored in it,
    and without it the kernel is not used.
    """
    norms: list[Tensor] = []
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        values = dense_values(grad)
        if values.numel():
            groups.setdefault((values.device, values.dtype), []).append(values)
    for key, group in groups.items():
        norms.append(copied_to(_group_norm(key, group, tables), device, torch.float32))
    if tables is not None:
        only = len(groups) == 1 and len(group) == len(grads) and not any(g.is_sparse or g.is_complex() for g in grads)
        tables["all"] = tables.get(key) if only else None
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=device)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def flag_and_norm(grads: Sequence[Tensor], tables: dict[Any, Any]) -> tuple[Tensor, Tensor]:
    """Whether an element is not finite (1.0 or 0.0) and the 2-norm of gradients of one device, in fp32 and on it.

    `tables` is as for `total_norm`. Gradients of several dtypes need two launches per dtype and one for all of them.
    """
    device = grads[0].device
    if not triton_runs_on(device) or not all(_kernel_reads(g) for g in grads):
        norm = total_norm(grads, device, tables)
        return (~norm.isfinite()).to(torch.float32), norm
    from halfstep.kernels.gradstats_triton import GradStats, judge

    groups: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.dtype, []).append(grad)
    sums = torch.empty(len(grads), dtype=torch.float32, device=device)
    parts = torch.split(sums, [len(group) for group in groups.values()])
    for (dtype, group), part in zip(groups.items(), parts, strict=True):
        stats: GradStats | None = tables.get((device, dtype))
        if stats is None:
            stats = tables[device, dtype] = GradStats()
        stats.sums(group, part)
    one = tables.get("one")
    if one is None:
        one = tables["one"] = torch.ones((), dtype=torch.float32, device=device)
    flag, norm, _ = judge(sums, one, None)
    return flag, norm


def _kernel_reads(grad: Tensor) -> bool:
    return grad.layout is torch.strided and grad.dtype in _KERNEL_DTYPES and grad.is_contiguous()


def _group_norm(key: tuple[torch.device, torch.dtype], group: list[Tensor], tables: dict[Any, Any] | None) -> Tensor:
    device, dtype = key
    if (
        tables is not None
        and dtype in _KERNEL_DTYPES
        and triton_runs_on(device)
        and all(g.is_contiguous() for g in group)
    ):
        from halfstep.kernels.gradstats_triton import GradStats

        stats: GradStats | None = tables.get(key)
        if stats is None:
            stats = tables[key] = GradStats()
        norm: Tensor = stats.sums(group).sum().sqrt()
        return norm
    accumulate = torch.float64 if dtype is torch.float64 else torch.float32
    parts = torch._foreach_norm(group, 2, dtype=accumulate)  # noqa: SLF001 - what torch's own clip_grad_norm_ calls
    total: Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return total
