"""What a format does to the gradients of one step: which share underflows, and in which layer.

How it works. An element has underflowed if it is 0 as the row stores it, between the backward pass and the optimizer, and is not 0 in fp32.
Stored gradients are multiplied by the loss scale, so what the scale saved does not count, and neither do the zeros that the model has in any
precision: an embedding that the batch does not use, a unit that is off, a pixel that is always black. Both gradients are of the
same weights, batch and random numbers; those in fp32 come from a copy of the model that is dropped again. The dtype of the stored gradient alone
would not do: under autocast it is fp32, but it was computed in 16 bits and is 0 where that underflowed.

If a gradient is inf or NaN, nothing is known about underflow, and the worst layer is where that began: as found by computing the step again,
or else the first module whose output is not finite, or the last whose gradient is not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.comparison.measurements import Numerics, SkipCause
from halfstep.jobs.job import trainable
from halfstep.kernels.exponents import count_exponents
from halfstep.kernels.gradstats import dense_values
from halfstep.precision.formats import format_name
from halfstep.watching.activations import ActivationTable
from halfstep.watching.sample import Header, Rows, Sample

__all__ = ["MODEL", "judge_sample", "num_underflows", "take_sample", "where_not_zero"]

MODEL = "model"  # the name of the outermost module


def where_not_zero(model: nn.Module, compute_loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """For each parameter, where its gradient in fp32 is not 0; the model itself is left as it is."""
    reference = copy.deepcopy(model).float()
    kind = next(reference.parameters()).device.type
    with torch.autocast(kind, enabled=False):
        compute_loss(reference).backward()  # type: ignore[no-untyped-call]
    return {name: _dense(p.grad) != 0 for name, p in trainable(reference) if p.grad is not None}


def num_underflows(named: Sequence[tuple[str, Tensor]], not_zero: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """For each module, how many elements of its gradients are 0 and not 0 in fp32, and how many are not 0 in fp32."""
    counts: dict[str, list[Tensor]] = {}
    for name, param in named:
        if param.grad is None or name not in not_zero:
            continue
        pair = torch.stack([((_dense(param.grad) == 0) & not_zero[name]).sum(), not_zero[name].sum()])
        counts.setdefault(_module_of(name), []).append(pair)
    sums = {module: torch.stack(pairs).sum(0).tolist() for module, pairs in counts.items()}
    return {module: (lost, total) for module, (lost, total) in sums.items()}


@torch.no_grad()
def take_sample(
    step: int, named: Sequence[tuple[str, Tensor]], scale: float, activations: ActivationTable | None
) -> Sample:
    """The exponents of the gradients as they are now, divided by the loss scale, and of the activations that were counted."""
    grads = {name: param.grad for name, param in named if param.grad is not None}
    values = [dense_values(grad) for grad in grads.values()]
    header = Header(tuple(grads), tuple(v.numel() for v in values), tuple(format_name(v.dtype) for v in values))
    nothing = Header().rows(np.empty(0, dtype=np.int64))
    gradients = outputs = nothing
    if values:
        divisor = torch.tensor(scale, device=values[0].device)
        gradients = header.rows(count_exponents(list(grads.values()), divisor).table.cpu().numpy(), scale)
    if activations is not None:
        shape = Header(activations.names, activations.numels, activations.dtypes)
        outputs = shape.rows(activations.table.cpu().numpy())
    return Sample(step, None, scale, gradients, nothing, outputs, {})


def judge_sample(
    sample: Sample, underflows: Mapping[str, tuple[int, int]] | None, cause: SkipCause | None = None
) -> Numerics:
    """Underflow and the worst layer of a sample.

    `underflows` is what `num_underflows` returned, None where fp32 is not known; `cause` why the step was skipped, if it was examined.
    """
    if owners := _owners(sample.gradient_rows):
        outputs = list(sample.activation_rows.num_nonfinite())  # in the order of the forward pass
        if cause is not None and cause.cause != "not reproduced":
            place, kind = "loss" if cause.module is None else cause.module or MODEL, cause.cause
        else:
            place, kind = (outputs[0], "output") if outputs else (owners[0], "gradient")
        return Numerics(sample.step, sample.scale, worst_layer=place, overflowed=kind)
    if not underflows:
        return Numerics(sample.step, sample.scale)
    lost, total = (sum(pair[i] for pair in underflows.values()) for i in (0, 1))
    shares = {module: part / whole for module, (part, whole) in underflows.items() if part}
    worst = max(shares, key=shares.__getitem__, default=None)
    return Numerics(
        sample.step,
        sample.scale,
        underflow=lost / total if total else 0.0,
        worst_layer=worst,
        worst_underflow=None if worst is None else shares[worst],
    )


def _owners(rows: Rows) -> list[str]:
    """The modules whose gradients are not finite, last ones first, as the backward pass reaches them."""
    return list(dict.fromkeys(_module_of(name) for name in reversed(list(rows.num_nonfinite()))))


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or MODEL


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.layout != torch.strided else grad
