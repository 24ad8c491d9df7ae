"""A model that the user wrapped in DistributedDataParallel: it reduces the gradients itself.

The wrapper decides in its forward whether the following backward reduces, so `no_sync` is entered around the forward, as
its documentation shows. Gradients that no backward has reduced when a window closes (a short window, a second loss, a
forward outside the wrapper) are reduced then, by the wrapper's own reducer. What the ranks agree on is in `agreement`.
Weights must stay fp32 and be reduced in fp32: its buckets have the dtype that the weights had when it was built. Under any
other policy `ddp` switches the wrapper's reducer off and reduces by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.backends.agreement import Agreement
from halfstep.backends.consistency import check_together
from halfstep.backends.reducer import check_finished, reduce_now
from halfstep.backends.replicas import Replicas
from halfstep.errors import SettingError
from halfstep.precision.policy import Policy

__all__ = ["WrappedDDP", "find_ddp", "reduces_by_itself", "reject_join"]


class WrappedDDP(Replicas):
    """Hooks around a DistributedDataParallel that is already there."""

    def __init__(self) -> None:
        super().__init__()
        self._wrapper: nn.parallel.DistributedDataParallel | None = None
        self._observer: Any = None  # the handle of `_observe`
        self._reduced = False  # whether a backward of this window has reduced
        self._several = False  # whether micro-batches have several losses: then all gradients are reduced at the end

    def check(self, model: nn.Module, policy: Policy) -> None:
        """Reject precision settings of the wrapper's own."""
        if getattr(find_ddp(model), "mixed_precision", None) is not None:
            raise SettingError(
                "The model is in DistributedDataParallel(mixed_precision=...), which casts weights and gradients on its own. Omit it: the "
                "Engine's precision= decides."
            )
        if not reduces_by_itself(policy):
            raise SettingError(
                f'WrappedDDP reduces fp32 gradients of fp32 weights in fp32, and {policy} needs more. Use backend="auto", which reduces '
                "gradients in the Engine."
            )

    def check_together(self, model: nn.Module, checks: Callable[[], None]) -> None:
        """Run the checks; an error of one rank is an error on all."""
        check_together(model, checks, getattr(find_ddp(model), "process_group", None))

    def prepare(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
        """Remember the wrapper and return the module inside it."""
        module, wrapper = super().prepare(model, optimizers), find_ddp(model)
        self._wrapper, group = wrapper, getattr(wrapper, "process_group", None)
        if wrapper is None or group is None:
            return module
        self._observer = wrapper.register_forward_hook(self._observe)
        if dist.get_world_size(group) > 1:
            _reject_foreign(module, optimizers)
            self._context = replace(self._context, process_group=group)
            self._agreement = Agreement(group, self._context.device)
        return module

    def _observe(self, wrapper: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if torch.is_grad_enabled():
            self._armed = bool(wrapper.require_backward_grad_sync)

    def forward_context(self, *, last: bool) -> AbstractContextManager[None]:
        """`no_sync` for all but the last micro-batch of a window."""
        wrapper = self._wrapper
        if wrapper is None:
            return contextlib.nullcontext()
        reject_join(wrapper)
        if last and not self._several:
            return contextlib.nullcontext()
        self._reject_static_graph("accumulate above 1")
        return wrapper.no_sync()

    def _reject_static_graph(self, cause: str) -> None:
        if getattr(self._wrapper, "static_graph", False):
            raise SettingError(
                f"DistributedDataParallel(static_graph=True) expects a reduction in every backward, which {cause} does not give it. Build it "
                "without static_graph, or use accumulate=1 with one loss per step."
            )

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Backpropagate; after a forward that was not under `no_sync` the wrapper reduces meanwhile."""
        super().backward(loss, retain_graph=retain_graph)
        # A second backward after one that reduced adds gradients of this rank alone, or reduces again. From the next window on
        # all are reduced once, when it closes.
        self._several = self._several or (self._reduced and not getattr(self._wrapper, "static_graph", False))
        self._reduced, self._due, self._armed = self._reduced or self._armed, not self._armed, False

    def reduce_gradients(self) -> None:
        """Reduce what no backward has reduced, and raise if a reduction is incomplete."""
        if self._wrapper is None:
            return
        if self._due:
            self._reject_static_graph("a second loss, or a forward outside it,")
            reduce_now(self._wrapper)
            self._due = False
        elif self._agreement is not None:
            check_finished(self._wrapper)

    def reset(self) -> None:
        """Expect no gradients; after a forward without its backward the reducer is reset as well."""
        if self._armed and self._wrapper is not None:
            self._wrapper.reducer._reset_state()  # noqa: SLF001 - else the next backward under no_sync would reduce
        self._reduced = False
        super().reset()

    def close(self) -> None:
        """Stop observing the wrapper."""
        if self._observer is not None:
            self._observer.remove()
            self._observer = None

    @property
    def replay_obstacle(self) -> str | None:
        """The wrapper's forward may send messages."""
        if self._agreement is None:
            return None
        return 'the model is in DistributedDataParallel, whose forward waits for other ranks; without the wrapper, backend="ddp" replays'

    def truth_rows(self) -> Mapping[str, str]:
        """The wrapper sums fp32 gradients in fp32."""
        return {"reduction": "fp32 over ranks"}


def reduces_by_itself(policy: Policy) -> bool:
    """Whether a DistributedDataParallel that was built on fp32 weights can reduce the gradients under this policy."""
    return policy.params == "fp32" and policy.reduce == "fp32"


def reject_join(wrapper: nn.parallel.DistributedDataParallel) -> None:
    """Raise inside `wrapper.join()`."""
    if getattr(getattr(wrapper, "_join_config", None), "enable", False):
        raise SettingError(
            "DistributedDataParallel.join() does not repeat the Engine's own messages between ranks, and the others would wait for ever. "
            "Train the same number of windows on every rank: their lengths may differ (step(last=True)), and a batch with weight=0 "
            "counts nothing."
        )


def find_ddp(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel around a model, below torch.compile's wrapper or above it."""
    while not isinstance(model, nn.parallel.DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if inner is None:
            return None
        model = inner
    return model


def _reject_foreign(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise for parameters that the wrapper does not reduce: ranks would drift apart."""
    own = set(module.parameters())
    foreign = sum(p not in own for o in optimizers for group in o.param_groups for p in group["params"])
    if foreign:
        raise SettingError(
            f"The optimizers have {foreign} parameters outside the model that is in DistributedDataParallel; their gradients would differ "
            "between ranks. Make them part of the module before you wrap it."
        )
