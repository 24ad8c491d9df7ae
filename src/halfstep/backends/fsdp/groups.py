"""What the Engine reads and sets in FSDP2's groups: their dtypes, and the gradients that they have not reduced yet.

`fully_shard` makes a group of each module's parameters, which are gathered and reduced together. torch has public setters
for some of its state, and they are used where there are. Three things have none:

    dtype of shards' gradients    a group rounds its sum to the dtype of the weights. With 16-bit weights whose gradients are summed
                                  in fp32 it must not, so the dtype it rounds to is set before each backward.
    gradients not yet reduced     under accumulation a rank keeps the whole gradient of each group, in `unsharded_accumulated_grad`
                                  (fp32) or as the gradient of the gathered parameter.
    reduction without backward    what runs at the end of a backward reduces whatever a group has kept, and it is called here for
                                  windows whose last backward did not reduce.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.optim.shards import is_sharded, local

__all__ = ["Groups", "Unit", "is_sharded_model", "replicas"]


def is_sharded_model(model: nn.Module) -> bool:
    """Whether a model was passed to `fully_shard`, in parts or as a whole, or has DTensors as parameters."""
    return any(map(is_sharded, model.parameters())) or any(_states(model))


def _states(model: nn.Module) -> Iterator[Any]:
    """FSDP2's state of each module that has one, the outer ones first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes long, and without it there are none
    if fsdp is None:
        return
    known: set[int] = set()
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            state = module._get_fsdp_state()  # noqa: SLF001 - the public methods are built on it
            if id(state) not in known:
                known.add(id(state))
                yield state


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 and later may have several per module
    if several is not None:
        return list(several)
    return [group for group in (state._fsdp_param_group,) if group is not None]  # noqa: SLF001


@dataclass(frozen=True)
class Unit:
    """One group of parameters and the name of its module."""

    name: str
    group: Any

    @property
    def params(self) -> list[Tensor]:
        """The sharded parameters."""
        return [p.sharded_param for p in self.group.fsdp_params]

    @property
    def num_ranks(self) -> int:
        """Of the sum of its gradients: those of a shard times its replicas."""
        mesh = self.group.mesh_info
        return int(getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1))

    @property
    def trained(self) -> list[Tensor]:
        """Those that require gradients."""
        return [p for p in self.params if p.requires_grad]


class Groups:
    """The groups of a model; of none, where only tensor parallelism has sharded it."""

    def __init__(self, model: nn.Module) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        self._states = list(_states(model))
        self.units = [Unit(names[id(group.modules[0])], group) for state in self._states for group in _groups(state)]
        self._grad_dtypes: dict[int, torch.dtype] = {}
        self._native = True  # whether all groups sum over ranks in the dtype of their weights

    def data_parallel_groups(self) -> list[Any]:
        """The process groups whose ranks have the same weights and other data: those of the outermost unit."""
        if not self.units:
            return []
        mesh = self.units[0].group.mesh_info
        names = ("shard_process_group", "replicate_process_group")  # of HSDP both
        return [group for group in (getattr(mesh, name, None) for name in names) if group is not None]

    def set_reduction(self, dtype: torch.dtype, *, widens: bool) -> None:
        """Let groups sum over ranks in `dtype`; `widens`: gradients are summed over micro-batches, and stored, in fp32.

        Of 16-bit weights this is called before the first forward, which is when groups read their settings.
        """
        for unit in self.units:
            stored = {p.dtype for p in unit.trained}
            # A sum over one rank is exact in every dtype: no copies in another one.
            native = (len(stored) == 1 if unit.num_ranks == 1 else stored == {dtype}) and not widens
            self._native = self._native and native
            wide = None if native else torch.float32
            unit.group.mp_policy = replace(unit.group.mp_policy, reduce_dtype=wide)
            if hasattr(unit.group, "_orig_dtype"):  # an Engine before this one has trained it
                unit.group._init_mp_dtypes()  # noqa: SLF001
            if dtype is not torch.float32 and not native:
                unit.group._reduce_scatter_comm = narrow_reduce_scatter(dtype)  # noqa: SLF001 - as its public setter does
            if widens and stored != {torch.float32}:
                self._grad_dtypes[id(unit.group)] = torch.float32

    def replicas_of(self, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """How many copies of each shard there are (of HSDP several), and the dtype of their sum where groups reduce in `dtype`.

        FSDP2 sends the result of the reduce-scatter as it is, in the dtype in which a group sums, and has no hook to narrow it.
        """
        sizes = (getattr(unit.group.mesh_info, "replicate_mesh_size", 1) for unit in self.units)
        return max(sizes, default=1), dtype if self._native else torch.float32

    def keep_gradient_dtypes(self) -> None:
        """Before a backward: groups that were initialised in the meantime round to the right dtype."""
        for unit in self.units:
            dtype = self._grad_dtypes.get(id(unit.group))
            if dtype is not None:
                unit.group._orig_dtype = dtype  # noqa: SLF001

    def reduce_in_backward(self, *, enabled: bool) -> None:
        """Whether the next backward reduces."""
        for unit in self.units:
            unit.group.reduce_grads = enabled

    def retained(self) -> list[Tensor]:
        """The gradients that are not reduced yet, whole ones of this rank."""
        return [local(grad) for param in self._params() if (grad := _retained(param)) is not None]

    def reduce_retained(self) -> None:
        """Reduce them, in the same order on every rank."""
        self.reduce_in_backward(enabled=True)
        self.keep_gradient_dtypes()
        for state in self._states:
            if state._is_root:  # noqa: SLF001
                state._root_post_backward_final_callback()  # noqa: SLF001

    def drop_retained(self) -> None:
        """Forget them."""
        for unit in self.units:
            unit.group._partial_reduce_output = None  # noqa: SLF001 - of HSDP
        for param in self._params():
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None  # noqa: SLF001

    def reshard(self) -> None:
        """Free gathered parameters: their shards have changed or are about to."""
        for unit in self.units:
            unit.group.reshard()

    def _params(self) -> Iterator[Any]:
        return (param for unit in self.units for param in unit.group.fsdp_params)


def replicas(params: Iterable[Any]) -> list[tuple[Any, list[Tensor]]]:
    """The parts that the ranks of a process group store alike, by group: of DTensors with a replicated dimension."""
    parts: dict[tuple[Any, int], list[Tensor]] = {}
    for param in filter(is_sharded, params):
        for number, place in enumerate(param.placements):
            if place.is_replicate():
                parts.setdefault((param.device_mesh, number), []).append(local(param).detach())
    return [(mesh.get_group(number), tensors) for (mesh, number), tensors in parts.items()]


def _retained(param: Any) -> Tensor | None:
    if param.unsharded_accumulated_grad is not None:
        summed: Tensor = param.unsharded_accumulated_grad
        return summed
    gathered = getattr(param, "_unsharded_param", None)
    return None if gathered is None else gathered.grad


def narrow_reduce_scatter(dtype: torch.dtype) -> Any:
    """A reduce-scatter that sends 16 bits where a group sums in fp32."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    class _NarrowReduceScatter(ReduceScatter):
        def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(tuple(size), dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> Any:
            reduce = (
                getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            )  # its name before torch 2.13
            # Divided before it is rounded: the sum of fp16 values could overflow where their mean does not.
            factor = dist.get_world_size(group) if op == dist.ReduceOp.AVG else 1
            parts = (input_tensor / factor).to(dtype)
            mean = torch.empty_like(output_tensor, dtype=dtype)
            reduce(output=mean, input=parts, op=dist.ReduceOp.SUM, group=group)
            output_tensor.copy_(mean)

    return _NarrowReduceScatter()
