"""Guards: gradients that changed outside the Engine, and gradients in the way of a forward.

Gradients between `backward` and `step` are multiplied by the loss scale. A bare `loss.backward()` adds unscaled ones to
them, and clipping or editing them by hand works on numbers that are 65536 times too large; both continue training,
silently wrong. Every tensor has a version that counts its in-place changes, so the Engine records the version of each
gradient after its own backward and compares before it continues. That costs no device work.

During a forward the gradients of its window are sometimes in the way, and are set aside. A model compiled into CUDA
graphs writes its gradients to the same memory at every replay: they are valid until the next forward, so a step over one
micro-batch uses them in place, but those that must outlive a forward (accumulation, a second loss) are copied out once
per window, and from then on autograd adds to the copy. And torch.compile cannot trace a 16-bit weight that has an fp32
gradient: it falls back to eager at every layer. So where gradients are summed in fp32, weights have none during a forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.hardware.units import few

__all__ = ["GradientGuard"]


class GradientGuard:
    """Detects gradients that changed outside the Engine, and parameters added to optimizers after it was built."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        in_graphs: bool = False,
        hide: bool = False,
    ) -> None:
        self._params, self._in_graphs, self._hide = params, in_graphs, hide
        self._optimizers, self._num_owned = optimizers, _num_owned(optimizers)
        self._recorded: dict[str, tuple[Tensor, int]] = {}  # gradient and its version
        self._copied: set[str] = set()  # out of a graph's memory
        self._aside: dict[str, Tensor] = {}

    def record(self) -> None:
        """Take the gradients as they are for the Engine's own."""
        self._recorded = {n: (p.grad, p.grad._version) for n, p in self._params.items() if p.grad is not None}  # noqa: SLF001

    def forget(self) -> None:
        """Expect no gradients."""
        self._recorded, self._copied, self._aside = {}, set(), {}

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Keep the gradients out of the way of a forward; one that was edited is still detected."""
        if self._in_graphs:
            self._copy_out()
        if self._hide:
            for name, param in self._params.items():
                if param.grad is not None:
                    self._aside[name], param.grad = param.grad, None
        try:
            yield
        finally:
            self._put_back()

    def _put_back(self) -> None:
        """Return the gradients to their weights; one that was made in between stays, and is detected."""
        for name, grad in self._aside.items():
            if self._params[name].grad is None:
                self._params[name].grad = grad
        self._aside.clear()

    def _copy_out(self) -> None:
        for name, param in self._params.items():
            old = param.grad
            if old is None or name in self._copied:
                continue
            param.grad = old.clone()
            self._copied.add(name)
            recorded = self._recorded.get(name)
            if recorded is not None and recorded[0] is old and recorded[1] == old._version:  # noqa: SLF001
                self._recorded[name] = (param.grad, param.grad._version)  # noqa: SLF001

    def check(self, caller: str) -> None:
        """Raise if a gradient appeared, changed or disappeared since `record`, or an optimizer has new parameters."""
        self._put_back()  # in case this is called inside the block of a forward
        added = _num_owned(self._optimizers) - self._num_owned
        if added:
            raise SettingError(
                f"{caller}(): the optimizer has {added:+d} parameters since the Engine was built (add_param_group?); the Engine would not "
                "check or clip them. Give the optimizer every parameter at the start (one with requires_grad=False waits until it is "
                "unfrozen), or close() this engine and build a new one."
            )
        changed, gone = [], []
        for name, param in self._params.items():
            grad, recorded = param.grad, self._recorded.get(name)
            if grad is None:
                if recorded is not None:
                    gone.append(name)
            elif recorded is None or recorded[0] is not grad or recorded[1] != grad._version:  # noqa: SLF001
                changed.append(name)
        if gone:
            raise SettingError(
                f"{caller}(): the gradients of {few(gone)} were cleared since engine.backward(). The Engine clears gradients itself "
                "after a step; remove optimizer.zero_grad() from the loop."
            )
        if changed and not self._recorded:
            raise SettingError(
                f"{caller}(): there are gradients that engine.backward() did not compute ({few(changed)}): a bare loss.backward(), another "
                "engine's backward through this model, or left over from before. Write engine.backward(loss), freeze this model "
                "(requires_grad_(False)) where another is trained through it, and clear old gradients with model.zero_grad()."
            )
        if changed:
            raise SettingError(
                f"{caller}(): the gradients of {few(changed)} changed since engine.backward(): clipped or edited by hand, a bare "
                "loss.backward(), another engine's backward through this model, or a backward that failed halfway. They are still "
                "multiplied by the loss scale. Use Engine(max_norm=...) to clip, or call engine.unscale() before you edit them; "
                "engine.reset_window() drops this window and starts a new one."
            )

    def check_present(self, caller: str) -> None:
        """Raise if every gradient is gone: after unscale() the Engine allows edits, but an update needs gradients."""
        if all(param.grad is None for param in self._params.values()):
            raise SettingError(
                f"{caller}(): all gradients were cleared since engine.unscale(), so nothing would be updated. Remove optimizer.zero_grad() "
                "from the loop; engine.reset_window() drops a window."
            )


def _num_owned(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    return sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)
