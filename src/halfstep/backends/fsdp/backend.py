"""The backend of sharded models: FSDP2 gathers and reduces, Halfstep decides.

How it works. `fully_shard` splits each parameter over ranks (a DTensor), gathers a module's parameters for its forward and
backward, and reduces their gradients to shards. Precision means what it means on one device:

    weights       stored as the policy says: fp32 shards under autocast presets, 16-bit shards with their masters under lean ones.
                  They are gathered as they are stored, and computed with under the Engine's own region (`param_dtype` stays None).
    gradients     whole ones are summed over the micro-batches of a window on each rank, in fp32, and reduced once, in its last
                  backward or when it closes. A shard's gradient has the dtype that the policy says.
    decision      one message per update carries the squares of the gradients, the window's weight and the flag, over all ranks of the
                  run: whatever the placements, all skip together (stock GradScaler looks at the first parameter only).

Every rank must run the same number of micro-batches, because a forward gathers parameters; `backward(loss, weight=0)` counts
nothing. Optimizers step the local shards (`optim.shards`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.backends.agreement import Agreement
from halfstep.backends.base import Backend, unwrap
from halfstep.backends.consistency import (
    broadcast_tensors,
    check_experts,
    check_together,
    compare_ranks,
    describe_model,
    describe_optimizers,
)
from halfstep.backends.context import RunContext
from halfstep.backends.fsdp.checks import check_groups, check_launched, check_shardable
from halfstep.backends.fsdp.groups import Groups, is_sharded_model, replicas
from halfstep.backends.fsdp.norms import counts_here, partial_norms
from halfstep.backends.fsdp.overflows import OverflowLook
from halfstep.backends.fsdp.sharding import check_rebindable, named_units, rebind, scalars, shard_model
from halfstep.backends.ranks import ProcessRanks, Ranks
from halfstep.errors import SettingError
from halfstep.events import log_once
from halfstep.optim.shards import is_sharded, local
from halfstep.precision.formats import COMPUTE_DTYPES, format_name
from halfstep.precision.policy import Policy

__all__ = ["FSDP"]


class FSDP(Backend):
    """FSDP2 around a model that the user has sharded, or that is sharded here.

    `shard` lists the modules that become units, as modules, classes or patterns of names; by default the repeated blocks.
    `mesh` is a DeviceMesh with one dimension, or two of which the first replicates; by default all ranks shard.
    """

    name = "fsdp"
    shards = True

    def __init__(
        self,
        shard: Sequence[nn.Module | type | str] | nn.Module | type | str = (),
        *,
        mesh: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._shard = [shard] if isinstance(shard, nn.Module | type | str) else list(shard)
        self._mesh, self._settings = mesh, settings
        for name in settings.keys() & {"mp_policy", "offload_policy"}:
            raise SettingError(
                f"FSDP({name}=...) is not an option: the Engine's precision= decides what is cast, and CPU offload is not supported."
            )
        self._blocks: list[nn.Module] = []
        self._fp32: list[nn.Module] = []
        self._replicated: set[Tensor] = set()
        self._policy: Policy | None = None
        self._module: nn.Module | None = None
        self._sharded: nn.Module | None = None  # by `shard`
        self._groups: Groups | None = None
        self._agreement: Agreement | None = None  # None with one rank
        self._ranks: ProcessRanks | None = None  # the same
        self._compared: dict[str, str] = {}  # settings of the Engine
        self._counted: frozenset[str] = frozenset()
        self._weight: Tensor | None = None  # of the window, once it is agreed
        self._armed = False  # whether the next backward reduces
        self._reduced = False  # whether a backward of this window has reduced
        self._several = False  # whether micro-batches have several losses: then all gradients are reduced at the end
        self._overflows = OverflowLook()

    # --- once ---------------------------------------------------------------------------------------------------

    def compare(self, settings: Mapping[str, Any]) -> None:
        """Remember the Engine's settings; `prepare` compares them with those of the other ranks."""
        self._compared = {key: str(value) for key, value in settings.items()}

    def suggest_units(self, blocks: Sequence[nn.Module], fp32: Sequence[nn.Module], replicated: set[Tensor]) -> None:
        """Blocks to shard by default, modules that stay in fp32, and parameters that are not worth sharding."""
        self._blocks, self._fp32, self._replicated = list(blocks), list(fp32), replicated

    def check_together(self, model: nn.Module, checks: Callable[[], None]) -> None:
        """Run the checks; an error of one rank is an error on all."""
        check_together(model, checks)

    def check(self, model: nn.Module, policy: Policy) -> None:
        """Reject what FSDP2 would do in another precision than the policy, and settings that have no effect."""
        check_launched()
        self._policy = policy
        if dist.get_world_size() > 1:
            check_experts(unwrap(model), self.name)
        if not is_sharded_model(model):
            module = unwrap(model)
            check_shardable(module, named_units(module, self._shard), self._mesh)
            return
        if self._sharded is not unwrap(model) and (self._shard or self._mesh is not None or self._settings):
            raise SettingError(
                "FSDP(shard=..., mesh=...) has no effect on a model that was passed to fully_shard already. Omit them, or pass the "
                "model as it was before."
            )
        unrounded = {*self._replicated, *(p for module in self._fp32 for p in module.parameters())}
        check_groups(Groups(unwrap(model)), policy, unrounded)

    def prepare(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
        """Shard the model unless it is, and rebind the optimizers' groups."""
        module = unwrap(model)
        if dist.get_world_size() > 1:
            described = describe_model(module) | describe_optimizers(optimizers, module)
            device = next(module.parameters()).device
            compare_ranks({"torch": torch.__version__} | self._compared | described, ProcessRanks(device=device))
        if not is_sharded_model(module):
            check_rebindable(module, optimizers)
            broadcast_tensors((*module.parameters(), *module.buffers()), dist.group.WORLD)
            self.shard(module, optimizers)
        module = super().prepare(model, optimizers)
        self._module, self._groups = module, Groups(module)
        group = dist.group.WORLD
        rank, size = dist.get_rank(), dist.get_world_size()
        self._context = RunContext(
            self._context.device, rank, size, _local_rank(self._context.device), process_group=group
        )
        self._counted = frozenset(name for name, p in module.named_parameters() if counts_here(p, rank))
        if size > 1:
            self._agreement, self._ranks = Agreement(group, self._context.device), ProcessRanks(group)
            self._share_copies()
        return module

    def _share_copies(self) -> None:
        """Make equal what several ranks store: replicated weights, and buffers."""
        assert self._module is not None
        params = list(self._module.parameters())
        broadcast_tensors((p for p in params if not is_sharded(p)), self._context.process_group)
        for group, parts in replicas(params):
            broadcast_tensors(parts, group)
        self.share_buffers(self._module.buffers())

    def shard(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Shard a model; `prepare` does, or the caller before it builds optimizers, after `suggest_units` and `check`."""
        old = {id(p): name for name, p in module.named_parameters()}
        units = named_units(module, self._shard) if self._shard else self._blocks
        if not units:
            log_once(
                f"backend=fsdp: {type(module).__name__} has no repeated blocks and is one unit, gathered as a whole. FSDP(shard=[...]) names units."
            )
        roots = _roots(module)
        settings = dict(self._settings) | ({} if self._mesh is None else {"mesh": self._mesh})
        if (dist.get_world_size() if self._mesh is None else self._mesh.size(-1)) == 1:
            # One rank has everything anyway: gather once, not twice.
            settings.setdefault("reshard_after_forward", False)
        # The old ones, so that no identity is reused. Without optimizers none is needed, and each unit's memory is freed at once.
        keep = list(module.parameters()) if optimizers else []
        shard_model(roots, [*units, *self._fp32], self._replicated | scalars(module), **settings)
        rebind(optimizers, old, dict(module.named_parameters(remove_duplicate=False)))
        del keep
        self._sharded = module

    def settle(self, *, widens: bool) -> None:
        """The weights have their dtypes: choose the dtypes of gradients and their reduction."""
        assert self._groups is not None
        assert self._policy is not None
        reduce = COMPUTE_DTYPES.get(self._policy.reduce, torch.float32)
        self._groups.set_reduction(reduce, widens=widens)
        num_replicas, dtype = self._groups.replicas_of(reduce)
        if num_replicas > 1 and dtype is not reduce:
            log_once(
                f"reduce={self._policy.reduce} is the format of the reductions to shards. FSDP2 sums the {num_replicas} replicas of each shard in "
                f"the format in which it accumulates, {format_name(dtype)}."
            )
        if self._agreement is not None:
            self._overflows.install(self._groups)

    # --- each micro-batch ---------------------------------------------------------------------------------------

    def forward_context(self, *, last: bool) -> AbstractContextManager[None]:
        """Nothing to enter: whether gradients are reduced is decided in the backward."""
        self._armed = last and not self._several
        return contextlib.nullcontext()

    def agree_reference(self, reference: float | Tensor, *, weighted: bool, closing: bool) -> float | Tensor:
        """The largest of all ranks, right before gradients are reduced."""
        if self._agreement is None or not (self._is_due() if closing else self._armed):
            return reference
        return self._agreement.reference(reference, weighted=weighted)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Backpropagate; FSDP2 reduces meanwhile if this is the last micro-batch of its window."""
        groups = self._live_groups()
        groups.reduce_in_backward(enabled=self._armed)
        groups.keep_gradient_dtypes()
        super().backward(loss, retain_graph=retain_graph)
        self._several = self._several or self._reduced
        self._reduced, self._armed = self._reduced or self._armed, False

    def retained_gradients(self) -> list[Tensor]:
        """Whole gradients that groups keep until they reduce."""
        return self._live_groups().retained()

    # --- each update --------------------------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Reduce what no backward has reduced, and average the gradients of plain parameters."""
        groups = self._live_groups()
        if self._is_due():
            groups.reduce_retained()
        self._average_plain()

    def _is_due(self) -> bool:
        return bool(self._live_groups().retained()) or bool(self._plain())

    def _plain(self) -> list[Tensor]:
        """Trained parameters that are not sharded: FSDP2 leaves their gradients alone."""
        assert self._module is not None
        return [p for p in self._module.parameters() if p.requires_grad and not is_sharded(p)]

    def _average_plain(self) -> None:
        params = self._plain() if self._agreement is not None else []
        if not params:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        for dtype in dict.fromkeys(g.dtype for g in grads):  # not a set, whose order differs between ranks
            same = [(p, g) for p, g in zip(params, grads, strict=True) if g.dtype is dtype]
            flat = torch.cat([g.reshape(-1).float() for _, g in same]) / self._context.world_size
            self._overflows.look(flat)
            dist.all_reduce(flat, group=self._context.process_group)
            for (param, grad), mean in zip(same, torch.split(flat, [g.numel() for _, g in same]), strict=True):
                grad.copy_(mean.view_as(grad))
                param.grad = grad

    def norm_of(self, gradients: Mapping[str, Tensor], weight: float | Tensor, tables: dict[Any, Any]) -> Tensor:
        """The norm over all ranks; the window's weight travels with it."""
        counted, copies = partial_norms(gradients, self._counted, self._context.device, tables)
        if self._agreement is None:
            return torch.hypot(counted, copies)
        self._agreement.norm(counted + copies)
        flags = self._overflows.flags(self._context.rank, self._context.world_size, self._context.device)
        self._weight = self._agreement.weight(weight, counted.square(), flags)
        assert self._agreement.sums is not None
        return self._agreement.sums[0].sqrt()

    def reduce_weight(self, weight: float | Tensor) -> float | Tensor:
        """The mean over ranks, as FSDP2 averages gradients."""
        return weight if self._weight is None else self._weight

    def agree(self, found_inf: Tensor) -> Tensor:
        """1 on every rank if it is on any."""
        return found_inf if self._agreement is None else self._agreement.flag(found_inf)

    def share_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Give every rank the buffers of the first one, of those that `fully_shard` has put on other data."""
        if self._agreement is None:
            return
        tensors = list(buffers)
        for group in self._live_groups().data_parallel_groups():
            broadcast_tensors(tensors, group)

    def reset(self) -> None:
        """Drop gradients that were not reduced, and gathered parameters, which are older than their shards now."""
        groups = self._live_groups()
        groups.drop_retained()
        groups.reshard()
        self._armed = self._reduced = False
        self._weight = None
        self._overflows.reset()
        if self._agreement is not None:
            self._agreement.reset()

    def watch_overflows(self, *, enabled: bool) -> None:
        """Look at the gradients before they are reduced, or not."""
        self._overflows.enabled = enabled

    @property
    def overflowed_ranks(self) -> tuple[int, ...]:
        """The ranks whose own gradients of the last update were not finite, while `watch_overflows` is on; waits for the device."""
        sums = None if self._agreement is None else self._agreement.sums
        return () if sums is None else tuple(rank for rank, flag in enumerate(sums[1:].tolist()) if flag)

    @property
    def replay_obstacle(self) -> str | None:
        """A forward gathers parameters, on all ranks together."""
        if self._agreement is None:
            return None
        return (
            f"the model is sharded over {self._context.world_size} ranks, and the forward of one waits for the others"
        )

    def drop_copies(self) -> None:
        """Free gathered parameters."""
        self._live_groups().reshard()

    # --- state --------------------------------------------------------------------------------------------------

    def local(self, tensor: Tensor) -> Tensor:
        """The shard of this rank."""
        return local(tensor)

    def ranks(self) -> Ranks:
        """All ranks: each writes and reads its own shards."""
        return self._ranks or Ranks()

    def truth_rows(self) -> Mapping[str, str]:
        """What is summed over ranks in which format."""
        assert self._policy is not None
        size, reduce = self._context.world_size, self._policy.reduce
        if size == 1:
            return {"reduction": "none, one rank"}
        num_replicas, dtype = self._live_groups().replicas_of(COMPUTE_DTYPES.get(reduce, torch.float32))
        num_shards = size // num_replicas
        parts = [f"{reduce} over {num_shards} ranks, to shards"] if num_shards > 1 else []
        parts += [f"{format_name(dtype)} over {num_replicas} replicas"] if num_replicas > 1 else []
        return {"reduction": "; ".join(parts)}

    def _live_groups(self) -> Groups:
        assert self._groups is not None
        return self._groups


def _roots(module: nn.Module) -> list[nn.Module]:
    """The modules that are called: the model, or each of several."""
    return (
        [module]
        if type(module).forward is not nn.Module.forward
        else [m for m in module.children() if any(True for _ in m.parameters())]
    )


def _local_rank(device: torch.device) -> int:
    return device.index or 0
