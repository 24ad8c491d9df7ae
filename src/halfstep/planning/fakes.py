"""A job's model without data: built on the meta device, then its tensors replaced by fake CPU tensors.

Building on the meta device allocates nothing, so a model of 70 billion parameters can be built on a laptop. Some models
read tensor data while they are built (to turn a tensor into a list, for example), which is impossible there; those are
built with real data once, which is dropped immediately.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from halfstep.backends.context import RunContext
from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.jobs.job import Job
from halfstep.planning.integers import MAX_NUMEL, is_integer

__all__ = ["build_model", "fake_batch", "new_mode", "to_fake"]

CPU = torch.device("cpu")


def new_mode() -> FakeTensorMode:
    """A mode in which factory functions return fake tensors, and real tensors are treated as fake ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def build_model(job: Job, mode: FakeTensorMode, context: RunContext, *, real: bool = False) -> nn.Module:
    """The job's model on fake tensors, in training mode; `real` builds it with real data first."""
    before = rng_state()
    try:
        if real:
            model: nn.Module = job.call("model", context)
        else:
            with torch.device("meta"):
                model = job.call("model", context)
    finally:
        restore_rng(before)
    to_fake(model, mode)
    return model.train()


def to_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace every parameter, buffer and other tensor of the modules by a fake one; tied tensors stay tied."""
    fakes: dict[int, Tensor] = {}
    replaced: list[Tensor] = []  # kept alive, so that no id is used twice

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            with mode, torch.no_grad():
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
                is_param = isinstance(tensor, nn.Parameter)
                fakes[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_param else empty
            replaced.append(tensor)
        return fakes[id(tensor)]

    for module in model.modules():
        for table in (module._parameters, module._buffers, vars(module)):  # noqa: SLF001 - there is no public access to both
            for name, tensor in list(table.items()):
                if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor) and not _keeps_data(tensor):
                    setattr(module, name, fake(tensor))  # not table[name]: recurrent layers also have a list of them


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """The batch with fake tensors of the same shapes and dtypes; integers keep their data."""

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or _keeps_data(leaf):
            return leaf
        with mode:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=CPU)

    return pytree.tree_map(fake, batch)


def _keeps_data(tensor: Tensor) -> bool:
    return tensor.device == CPU and is_integer(tensor) and tensor.numel() <= MAX_NUMEL
