"""Clipping for loops that call it themselves: by the norm of the true gradients, in fp32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from halfstep.kernels.gradstats import total_norm

__all__ = ["clip_by_norm"]


@torch.no_grad()
def clip_by_norm(params: Iterable[Tensor], max_norm: float, scale: Tensor | None = None) -> Tensor:
    """Scale gradients down so that their norm, once divided by the loss `scale`, is at most `max_norm`; returns that norm.

    torch's clip_grad_norm_ gives the norm in the dtype of the gradients, which for scaled fp16 ones is often inf. A norm
    that is not finite leaves the gradients as they are: the step is skipped.
    """
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norm = total_norm(grads, grads[0].device)
    if scale is not None:
        norm = norm / scale.to(norm.device, torch.float32)
    factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
    for device in {grad.device for grad in grads}:  # one launch for all of a device, not one for each
        torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device))
    return norm
