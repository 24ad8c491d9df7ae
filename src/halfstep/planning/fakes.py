"""A job's model without its numbers: built on the meta device, then given fake tensors on a pretended CPU.

Building on the meta device allocates nothing, so a model of 70 billion parameters is built on a laptop. Some models read
numbers while they are built (a list made from a tensor, say), which no tensor without numbers can answer; those are built
for real once and their numbers dropped at once.
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
from halfstep.planning.integers import MOST_NUMBERS, is_integer

__all__ = ["build_model", "fake_batch", "new_mode", "to_fake"]

CPU = torch.device("cpu")


def new_mode() -> FakeTensorMode:
    """A mode under which factories make fake tensors, and real ones met on the way are taken for fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def build_model(job: Job, mode: FakeTensorMode, context: RunContext, *, real: bool = False) -> nn.Module:
    """The job's model on fake tensors, in training mode; `real` builds it with its numbers first."""
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
    """Put a fake tensor in the place of every parameter, buffer and other tensor of the modules; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    kept: list[Tensor] = []  # the old ones, so that no id is used twice

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with mode, torch.no_grad():
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
                is_param = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_param else empty
            kept.append(tensor)
        return made[id(tensor)]

    for module in model.modules():
        for table in (module._parameters, module._buffers, vars(module)):  # noqa: SLF001 - there is no public way to both
            for name, tensor in list(table.items()):
                if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor) and not _keeps_numbers(tensor):
                    setattr(module, name, fake(tensor))  # not table[name]: recurrent layers keep a list as well


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """The batch with fake tensors of the same shapes and dtypes; integers that have numbers keep them."""

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or _keeps_numbers(leaf):
            return leaf
        with mode:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=CPU)

    return pytree.tree_map(fake, batch)


def _keeps_numbers(tensor: Tensor) -> bool:
    return tensor.device == CPU and is_integer(tensor) and tensor.numel() <= MOST_NUMBERS
