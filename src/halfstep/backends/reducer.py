"""DistributedDataParallel's reduction without a forward: for windows whose last forward ran under `no_sync`.

The wrapper prepares its reducer in a forward, and reduces while a backward adds to the gradients. A window that ends early
has no such backward. So the reducer is prepared here, and a backward adds zero to every gradient: its buckets, its order
of messages and the user's communication hook are those of any other reduction, and other ranks cannot tell the
difference. Averaging gradients that were already averaged changes nothing, so it may also follow another reduction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import SettingError

__all__ = ["check_finished", "reduce_now"]


class _AddZero(torch.autograd.Function):
    """A scalar whose gradient with respect to every parameter is zero."""

    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        ctx.params = params
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(_zero_like(param) for param in ctx.params)


def _zero_like(param: Tensor) -> Tensor:
    if param.grad is not None and param.grad.is_sparse:
        return torch.zeros_like(param.grad)
    return param.new_zeros(()).expand_as(param)  # one number in memory


def reduce_now(wrapper: nn.parallel.DistributedDataParallel) -> None:
    """Reduce the gradients as they are, by the wrapper's own reducer."""
    ignored = getattr(wrapper, "parameters_to_ignore", ())
    params = [p for name, p in wrapper.module.named_parameters() if p.requires_grad and name not in ignored]
    # A parameter that no rank used keeps no gradient, if the wrapper looks for such parameters; else it expects them all.
    if wrapper.find_unused_parameters:
        params = [p for p in params if p.grad is not None] or params
    check_finished(wrapper)
    wrapper.reducer._rebuild_buckets()  # noqa: SLF001 - due between the first and the second reduction, as a forward does it
    with torch.enable_grad():
        total = _AddZero.apply(*params)  # type: ignore[no-untyped-call]
    wrapper.require_forward_param_sync = True  # as after any forward that reduces: the next one broadcasts the buffers
    wrapper.reducer.prepare_for_backward([total])
    total.backward()
    check_finished(wrapper)


def check_finished(wrapper: nn.parallel.DistributedDataParallel) -> None:
    """Raise if the last backward left a reduction unfinished, and so different gradients on every rank."""
    try:
        wrapper.reducer._check_reducer_finalized()  # noqa: SLF001 - the next forward would do it, after the update
    except RuntimeError as error:
        raise SettingError(
            "DistributedDataParallel did not finish its reduction: parameters that it expects got no gradient in the last backward, so "
            "gradients differ between ranks. Build it with find_unused_parameters=True, or set requires_grad=False on parameters that the "
            "loss does not use before you wrap the model. TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch name them."
        ) from error
