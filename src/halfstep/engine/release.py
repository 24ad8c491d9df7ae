"""Gradient release: each parameter is updated inside backward, and its gradient dropped at once.

Ordinarily all gradients are alive when the step begins: 2 or 4 bytes per parameter. With release only those of one layer
are, because a hook on each parameter steps it as soon as its gradient is complete. The price is that nothing can be
decided from all gradients together. There is no norm to clip by, no loss scale that could undo earlier updates after a
later layer's overflow, no second micro-batch; and a non-finite gradient skips only its own tensor, when others may have
been updated already. So it is an option, allowed where the rest of the step does not need these guarantees, and the truth
table lists what is waived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from halfstep.engine.steps import Decision
from halfstep.errors import SettingError
from halfstep.optim.lean import LeanOptimizer
from halfstep.precision.policy import Policy

__all__ = ["WAIVED_GUARANTEES", "GradientRelease", "check_release"]

WAIVED_GUARANTEES = (
    "gradient release: a non-finite gradient skips only its own tensor, not the step",
    "gradient release: gradients cannot be clipped, only their norm reported",
)


def check_release(
    policy: Policy, max_norm: float | None, accumulate: int, *, compiled: bool, backend: str = "single"
) -> None:
    """Raise where something needs all gradients at once."""
    reason = None
    if policy.scaling.mode != "none":
        reason = f"precision {policy} scales the loss, and an overflow in a later layer could not undo earlier updates"
    elif max_norm is not None:
        reason = f"max_norm={max_norm} needs the norm of all gradients before the first update; use max_norm=None"
    elif accumulate > 1:
        reason = f"accumulate={accumulate} adds gradients up before the update; use accumulate=1 and a larger batch"
    elif backend == "ddp":
        reason = "DistributedDataParallel reduces a gradient after it was used, and the ranks would drift apart"
    elif compiled:
        reason = "compile=True returns all gradients of the compiled backward at once, so none would be released early"
    if reason is not None:
        raise SettingError(f"gradient_release=True cannot be used here: {reason}.")


class GradientRelease:
    """Steps each parameter from a hook in backward; `finish` returns the outcome of the step."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[str, Tensor], undo: contextlib.ExitStack
    ) -> None:
        self._names = {param: name for name, param in names.items()}
        self._norms: dict[Tensor, Tensor] = {}  # of the gradients released in this window
        for optimizer in optimizers:
            assert isinstance(optimizer, LeanOptimizer)  # setup adopts every optimizer under gradient release
            for group in optimizer.param_groups:
                for param in (p for p in group["params"] if p.requires_grad):
                    hook = self._hook(optimizer, group)
                    undo.callback(param.register_post_accumulate_grad_hook(hook).remove)

    def _hook(self, optimizer: LeanOptimizer, group: dict[str, object]):  # type: ignore[no-untyped-def]  # noqa: ANN202
        @torch.no_grad()
        def release(param: Tensor) -> None:
            if param in self._norms:
                raise SettingError(
                    f"The gradient of {self._names[param]} was computed twice in one step: with gradient_release it was used and dropped "
                    "the first time. Call engine.backward(loss) once per step, and use checkpoint(use_reentrant=False)."
                )
            assert param.grad is not None
            norm = torch.linalg.vector_norm(param.grad, dtype=torch.float32)
            optimizer.step_tensor(group, param, (~norm.isfinite()).to(torch.float32))
            self._norms[param] = norm
            param.grad = None

        return release

    def finish(self, device: torch.device) -> Decision:
        """The flag (whether any tensor was skipped) and the norm of the released gradients; starts the next step."""
        norms = [norm.to(device, non_blocking=True) for norm in self._norms.values()]
        self._norms = {}
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)
        return Decision((~norm.isfinite()).to(torch.float32), norm, torch.ones((), device=device))
