"""Data parallelism with a reducer of Halfstep's own: the model stays as it is, and its gradients are averaged over ranks.

Every rank computes other micro-batches on the same weights. Gradients are averaged once per window, by the buckets of
`buckets.py`, during the backward of the micro-batch that fills it. Where that is not possible they are averaged when the
window closes: in a short window, after a forward outside `engine.forward()`, while micro-batches have several backwards, and in
the first window, whose number of backwards no rank knows yet. Both send the same messages in the same order, so each rank may
do either.

At the start ranks compare what they will train (`consistency.py`), and rank 0 broadcasts parameters and buffers. Buffers that
forwards change, such as batch-norm statistics, are those of rank 0 after each update.

An optimizer that exchanges values by itself (`optim/exchange.py`) is asked in each window whether it needs the mean. If not,
gradients stay those of this rank, and ranks agree on the window's weight and on the overflow flag only.

A DistributedDataParallel of the user can be around the model. Its own reducer is then switched off.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.backends.agreement import Agreement
from halfstep.backends.base import unwrap
from halfstep.backends.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, GradientReducer, Reductions
from halfstep.backends.consistency import (
    broadcast_tensors,
    check_experts,
    check_together,
    compare_ranks,
    describe_model,
    describe_optimizers,
)
from halfstep.backends.ranks import ProcessRanks
from halfstep.backends.replicas import Replicas
from halfstep.backends.wrapped import find_ddp, reject_join
from halfstep.errors import SettingError
from halfstep.hardware.units import bytes_text, few
from halfstep.optim.exchange import Exchanging, exchanging_of
from halfstep.optim.trainable import check_model
from halfstep.precision.formats import COMPUTE_DTYPES
from halfstep.precision.policy import Policy

__all__ = ["DataParallel"]


class DataParallel(Replicas):
    """The same model on every rank of the default process group; with one rank nothing is hooked and nothing is sent.

    `reduce_alone=True` reduces with one rank as well, which shows what the reduction costs without a network.
    """

    def __init__(
        self,
        *,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        bucket_bytes: int = BUCKET_BYTES,
        reduce_alone: bool = False,
    ) -> None:
        super().__init__()
        self._reduce_alone = reduce_alone
        self._sizes = {"first_bucket_bytes": first_bucket_bytes, "bucket_bytes": bucket_bytes}
        self._policy = Policy()
        self._settings: dict[str, str] = {}
        self._reducer: GradientReducer | None = None  # None with one rank
        self._wrapper: nn.parallel.DistributedDataParallel | None = None
        self._last = False  # whether the micro-batch in progress fills its window
        self._num_last = 0  # backwards of that micro-batch
        self._several = False  # whether this window needs a second reduction
        self._exchanging: Exchanging | None = None  # an optimizer that does not need reduced gradients in every window
        self._dense: bool | None = None  # whether this window is reduced; None until it is asked for

    # --- once ---------------------------------------------------------------------------------------------------

    def check(self, model: nn.Module, policy: Policy) -> None:
        """Reject a missing process group, sparse gradients, and a wrapper that cannot be switched off."""
        self._policy = policy
        if not (dist.is_available() and dist.is_initialized()):
            raise SettingError(_no_group())
        check_model(unwrap(model))
        if dist.get_world_size(self.group_of(model)) > 1:
            check_experts(unwrap(model), self.name)
        sparse = [name for name, m in model.named_modules() if getattr(m, "sparse", False) is True]
        if sparse and self._context.world_size > 1:
            raise SettingError(
                f'Modules that make sparse gradients, which backend="ddp" does not reduce: {few(sparse)}. Build them with sparse=False.'
            )
        wrapper = find_ddp(model)
        if wrapper is not None:
            _check_wrapper(wrapper, policy)

    def check_together(self, model: nn.Module, checks: Callable[[], None]) -> None:
        """Run the checks; an error of one rank is an error on all."""
        check_together(model, checks, getattr(find_ddp(model), "process_group", None))

    def compare(self, settings: Mapping[str, Any]) -> None:
        """Remember the Engine's settings; `prepare` compares them with those of the other ranks."""
        self._settings = {key: str(value) for key, value in settings.items()}

    def group_of(self, model: nn.Module) -> Any:
        """The group of a wrapper, else that of all ranks; None without torch.distributed, which `check` rejects."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        wrapper = find_ddp(model)
        return dist.group.WORLD if wrapper is None else wrapper.process_group

    def prepare(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
        """Compare the ranks, give all of them the parameters and buffers of rank 0, and start to reduce."""
        module, wrapper = super().prepare(model, optimizers), find_ddp(model)
        group = self.group_of(model)
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._context = replace(
            self._context, rank=rank, world_size=num_ranks, local_rank=local_rank, process_group=group
        )
        if num_ranks == 1 and not self._reduce_alone:
            return module
        device = self._context.device
        versions = {"torch": torch.__version__, **{key: str(size) for key, size in self._sizes.items()}}
        described = describe_model(module) | describe_optimizers(optimizers, module)
        self._exchanging = exchanging_of(optimizers)
        if self._exchanging is not None:
            described["schedule of the optimizer"] = self._exchanging.settings_text()
        ranks = ProcessRanks(group, device=device)
        compare_ranks(versions | self._settings | described, ranks)
        broadcast_tensors((*module.parameters(), *module.buffers()), group)
        owned = {p for o in optimizers for param_group in o.param_groups for p in param_group["params"]}
        self._agreement = Agreement(group, device)
        self._reducer = GradientReducer(
            {name: p for name, p in module.named_parameters() if p in owned},
            group,
            COMPUTE_DTYPES.get(self._policy.reduce, torch.float32),
            compare=lambda layout: compare_ranks(layout, ranks),
            **self._sizes,
        )
        if wrapper is not None:
            self._wrapper, wrapper.require_backward_grad_sync = wrapper, False
        return module

    # --- each micro-batch ---------------------------------------------------------------------------------------

    def forward_context(self, *, last: bool) -> AbstractContextManager[None]:
        """Note whether the backward that follows fills the window."""
        if self._wrapper is not None:
            reject_join(self._wrapper)
        self._last = self._last or last
        return contextlib.nullcontext()

    def agree_reference(self, reference: float | Tensor, *, weighted: bool, closing: bool) -> float | Tensor:
        """The largest of all ranks, right before gradients are reduced."""
        if self._agreement is not None and not closing:
            self._armed = self._last and not self._num_last and self._agreement.one_backward() and self._reduces()
        return super().agree_reference(reference, weighted=weighted, closing=closing)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Backpropagate; that of the micro-batch that fills the window reduces meanwhile."""
        if self._reducer is None:
            super().backward(loss, retain_graph=retain_graph)
            return
        armed, self._armed = self._armed, False
        self._reducer.observe()
        if armed:
            self._reducer.arm()
        super().backward(loss, retain_graph=retain_graph)
        self._num_last += self._last
        self._due = self._reducer.finish() if armed else True
        self._several = self._several or self._num_last > 1 or (armed and self._due)

    def _reduces(self) -> bool:
        """Whether the gradients of this window are averaged over ranks."""
        if self._dense is None:
            self._dense = self._exchanging is None or self._exchanging.needs_dense_gradients
        return self._dense

    # --- each update --------------------------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Reduce what the last backward did not, unless the optimizer works on the gradients of this rank."""
        if self._due and self._reducer is not None:
            if self._reduces():
                self._reducer.reduce()
            self._due = False

    def agree(self, found_inf: Tensor) -> Tensor:
        """1 on every rank if it is on any."""
        if self._agreement is None or self._reduces():
            return super().agree(found_inf)
        return self._agreement.any_flag(found_inf)

    def reduce_weight(self, weight: float | Tensor) -> float | Tensor:
        """The mean over ranks, as gradients are averaged."""
        if self._agreement is None or self._reducer is None:
            return weight
        flags = torch.zeros(self._context.world_size, device=self._context.device)  # one for each rank
        found_inf = self._reducer.found_inf if self._reduces() else self._agreement.broken
        if found_inf is not None:
            flags[self._context.rank].copy_(found_inf)
        return self._agreement.weight(weight, flags, several=self._several)

    def share_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Give every rank the buffers of rank 0."""
        if self._agreement is not None:
            broadcast_tensors(buffers, self._context.process_group)

    def reset(self) -> None:
        """Expect no gradients, also after a backward that failed."""
        super().reset()
        self._last, self._num_last, self._several, self._dense = False, 0, False, None
        if self._reducer is not None:
            self._reducer.reset()

    @property
    def overflowed_ranks(self) -> tuple[int, ...]:
        """The ranks whose own gradients of the last update were not finite; waits for the device."""
        sums = None if self._agreement is None else self._agreement.sums
        return () if sums is None else tuple(rank for rank, flag in enumerate(sums.tolist()) if flag)

    @property
    def replay_obstacle(self) -> str | None:
        """Nothing: the model computes without messages, and only an armed reducer sends any."""
        return None

    # --- always -------------------------------------------------------------------------------------------------

    @property
    def reductions(self) -> Reductions:
        """How often gradients were reduced over ranks so far, and the bytes of the messages."""
        return Reductions() if self._reducer is None else self._reducer.reductions

    def truth_rows(self) -> Mapping[str, str]:
        """The format of the messages, the ranks, and the bytes of one reduction."""
        if self._reducer is None:
            return {}
        size = self._reducer.message_bytes
        sent = f", {bytes_text(size)} per step" if size else ""
        when = "" if self._exchanging is None else "; in dense steps only"
        return {"reduction": f"{self._policy.reduce} over {self._context.world_size} ranks{sent}{when}"}

    def close(self) -> None:
        """Remove the hooks; a wrapper reduces again."""
        if self._reducer is not None:
            self._reducer.close()
        if self._wrapper is not None:
            self._wrapper.require_backward_grad_sync = True
            self._wrapper = None


def _no_group() -> str:
    num_ranks = os.environ.get("WORLD_SIZE")
    started = (
        f"WORLD_SIZE={num_ranks} shows that a launcher started this process"
        if num_ranks
        else "Start the script with `torchrun --nproc-per-node NUM_GPUS script.py`"
    )
    return (
        f'backend="ddp" needs a process group, and none is initialised. {started}; write torch.distributed.init_process_group("nccl") '
        '("gloo" on CPUs) before the Engine is built, and move the model to the GPU of LOCAL_RANK.'
    )


def _check_wrapper(wrapper: nn.parallel.DistributedDataParallel, policy: Policy) -> None:
    """Raise for settings of a DistributedDataParallel that have no effect once its reducer is off."""
    settings = {
        "a communication hook": bool(getattr(wrapper, "_comm_hooks", ())),
        "static_graph=True": bool(getattr(wrapper, "static_graph", False)),
        "mixed_precision=...": getattr(wrapper, "mixed_precision", None) is not None,
        "parameters to ignore": bool(getattr(wrapper, "parameters_to_ignore", ())),
    }
    used = [name for name, is_used in settings.items() if is_used]
    if used:
        raise SettingError(
            f"The model is in DistributedDataParallel with {' and '.join(used)}, and under {policy} the Engine reduces gradients itself: its "
            'reducer is switched off. Pass the model without the wrapper, with backend="ddp", or use a preset with fp32 weights and '
            "reduce=fp32."
        )
