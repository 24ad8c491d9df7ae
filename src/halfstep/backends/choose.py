"""The backend of a run: an object, a name, or what the model and the process group show.

a model in DistributedDataParallel    its own reducer where it can carry the policy (`wrapped`), else ours (`ddp`)
a model that is sharded               `fsdp`
several ranks, a plain model          `ddp`: replicas that nobody synchronises would drift apart without an error
one process                           `single`

"deepspeed" is never chosen by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from halfstep.backends.base import Backend
from halfstep.backends.ddp import DataParallel
from halfstep.backends.deepspeed import deepspeed_backend
from halfstep.backends.fsdp import FSDP, is_sharded_model
from halfstep.backends.single import SingleDevice
from halfstep.backends.wrapped import WrappedDDP, find_ddp, reduces_by_itself
from halfstep.errors import SettingError, unknown
from halfstep.events import log_once
from halfstep.optim.exchange import exchanging_of
from halfstep.precision.policy import Policy

__all__ = ["BACKENDS", "make_backend"]

# What `Engine(backend=...)` accepts by name, in addition to "auto". WrappedDDP is not among them: it needs a model that the
# user has wrapped, which "auto" and "ddp" recognise.
BACKENDS: dict[str, Callable[[], Backend]] = {
    SingleDevice.name: SingleDevice,
    DataParallel.name: DataParallel,
    FSDP.name: FSDP,
    "deepspeed": deepspeed_backend,
}


def make_backend(
    backend: Backend | str, model: nn.Module, policy: Policy | None = None, optimizers: Sequence[Any] = ()
) -> Backend:
    """The backend object that `Engine(backend=...)` names; "auto" looks at the model and at the process group.

    The reducer of a wrapper runs in every window, which an optimizer that exchanges values by itself does not want.
    """
    if isinstance(backend, Backend):
        return backend
    names = ("auto", *BACKENDS)
    if not isinstance(backend, str):
        raise SettingError(f"backend={backend!r} must be a Backend or one of {', '.join(names)}.")
    if backend not in names:
        raise unknown("backend", backend, names, advice='Use backend="ddp" to train on several GPUs.')
    wrapper = find_ddp(model)
    if wrapper is None and any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()):
        raise SettingError(
            "A part of the model is in DistributedDataParallel. The Engine supports the wrapper around the whole model only: put the parts "
            'into one module and wrap that, pass them without wrappers with backend="ddp", or build one Engine per wrapped part.'
        )
    if wrapper is not None:
        if backend == "single":
            raise SettingError(
                'backend="single", but the model is in DistributedDataParallel. Use backend="auto", or pass model.module.'
            )
        own = reduces_by_itself(policy or Policy()) and exchanging_of(optimizers) is None
        return WrappedDDP() if own else DataParallel()
    return BACKENDS[_recognise(model) if backend == "auto" else backend]()


def _recognise(model: nn.Module) -> str:
    """The name of the backend for a model without a wrapper."""
    if is_sharded_model(model):
        return FSDP.name
    if dist.is_available() and dist.is_initialized():
        num_ranks = dist.get_world_size()
        if num_ranks == 1:
            return SingleDevice.name
        log_once(
            f'backend="ddp" was chosen: the process group has {num_ranks} ranks, and without it each would train a model of its own. '
            'backend="single" trains this process alone.'
        )
        return DataParallel.name
    num_ranks_text = os.environ.get("WORLD_SIZE", "1").strip()
    if num_ranks_text not in {"", "1"} and "RANK" in os.environ:
        raise SettingError(
            f"WORLD_SIZE={num_ranks_text}: a launcher such as torchrun started several processes, and no process group is initialised, so "
            'each would train a model of its own. Write torch.distributed.init_process_group("nccl") ("gloo" on CPUs) before the Engine '
            'is built; backend="single" trains this process alone.'
        )
    return SingleDevice.name
