"""ZeRO under the Engine: DeepSpeed partitions, gathers and reduces; Halfstep scales, clips, decides and saves.

How it works. `deepspeed.initialize` gets the model, whose weights have the policy's dtype, and the user's optimizer. From
then on its optimizer stores fp32 masters and states as flat partitions, one per rank (`partition.py`), and reduces gradients
into partitions of fp32. Who does what was decided by measuring, on two gloo ranks, stages 1 to 3 in fp32, bf16 and fp16:

    scale       Halfstep. DeepSpeed runs with a static loss scale of 1, so it neither scales nor divides: its dynamic scaler
                updates the scale before it divides by it, which halves the gradient whenever the scale grows.
    accumulate  DeepSpeed, in fp32 partitions (stages 2 and 3, reduced by every backward), or in fp32 on each rank, reduced when
                the window closes (stage 1). The Engine closes windows, so step(last=True) works.
    decide      Halfstep reads the partitions once: norm, flag and window weight travel in one message, as under FSDP2.
    clip        Halfstep, as one more factor in the divisor of the partitions. DeepSpeed's gradient_clipping is 0.
    step        DeepSpeed's, or nothing at all for a skipped update: partitions are dropped before it would look at them.
    autocast    Halfstep's own region around the model. DeepSpeed's torch_autocast is never enabled: it clips scaled gradients,
                and stops updating after an overflow. The module is called directly, and not through DeepSpeed's engine,
                which would disable autocast.
    stage 0     not here: 16-bit stage 0 takes a step with zero gradients while it is built, and fp16 is divided by a scale
                that was never applied. `ZeroStage0` is Halfstep's own data parallelism.

Masters start from the exact fp32 weights; DeepSpeed alone starts from their 16-bit rounding. The first update is checked
against gradients that are computed another way (`selftest.py`).

Every rank must run the same number of micro-batches, as each backward of stages 2 and 3 reduces. A parameter that a window
does not use has a gradient of 0, not none: its moments decay, and so does its weight under weight decay.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

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
from halfstep.backends.ddp import DataParallel
from halfstep.backends.deepspeed.checks import (
    adapt_policy,
    check_launched,
    check_model,
    check_optimizers,
    check_options,
)
from halfstep.backends.deepspeed.library import check_process, gathered, require_version, start_engine
from halfstep.backends.deepspeed.optimizer import ZeroOptimizer
from halfstep.backends.deepspeed.partition import Partition, partition_of
from halfstep.backends.deepspeed.rows import engine_rows
from halfstep.backends.deepspeed.selftest import FirstStep
from halfstep.backends.deepspeed.settings import check_zero, engine_config, log_decisions, read_config, stage_of
from halfstep.backends.parts import Parts
from halfstep.backends.ranks import ProcessRanks, Ranks
from halfstep.check.deepspeed import TESTED_VERSION
from halfstep.errors import HalfstepError, SettingError
from halfstep.hardware.units import few
from halfstep.kernels.gradstats import total_norm
from halfstep.precision.deepspeed_merge import Merged
from halfstep.precision.policy import Policy

__all__ = ["DeepSpeed", "ZeroStage0", "deepspeed_backend"]


def deepspeed_backend(
    config: Mapping[str, Any] | Merged | str | Path | None = None, *, stage: int | None = None
) -> Backend:
    """The backend of a ZeRO stage: of the configuration, the argument, or 2 without either.

    `config` is a DeepSpeed configuration, as a dictionary or the path of its JSON file, or the result of `merge_deepspeed`.
    """
    source = config if isinstance(config, Merged) else read_config(config)
    own = source.stage if isinstance(source, Merged) else stage_of(source, stage)
    return ZeroStage0(source) if own == 0 else DeepSpeed(source, stage=stage)


class ZeroStage0(DataParallel):
    """ZeRO stage 0 partitions nothing: Halfstep's own data parallelism, without DeepSpeed."""

    def __init__(self, config: Mapping[str, Any] | Merged | None = None) -> None:
        super().__init__()
        self._source = config or {}
        self._engine_settings: dict[str, Any] = {}

    def compare(self, settings: Mapping[str, Any]) -> None:
        """Remember the Engine's settings, to compare the configuration with them."""
        super().compare(settings)
        self._engine_settings = dict(settings)

    def check(self, model: nn.Module, policy: Policy) -> None:
        """As data parallelism; and reject keys that contradict the Engine."""
        super().check(model, policy)
        if self._source:
            log_decisions(_merge(self._source, self._engine_settings, policy, 0), "DeepSpeed configuration")

    def truth_rows(self) -> Mapping[str, str]:
        """As data parallelism, and that DeepSpeed is not used."""
        return {**super().truth_rows(), "backend": "ZeRO stage 0: data parallelism by Halfstep, DeepSpeed is not used"}


class DeepSpeed(Backend):
    """ZeRO stages 1 to 3. `config` is a DeepSpeed configuration, as a dictionary or the path of its JSON file, or merged already.

    `stage` may be given instead of `zero_optimization.stage`; without either it is 2.
    """

    name = "deepspeed"
    shards = True
    owns_optimizers = True

    def __init__(
        self, config: Mapping[str, Any] | Merged | str | Path | None = None, *, stage: int | None = None
    ) -> None:
        super().__init__()
        self._source = config if isinstance(config, Merged) else read_config(config)
        self.stage = self._source.stage if isinstance(self._source, Merged) else stage_of(self._source, stage)
        if self.stage == 0:
            raise SettingError('ZeRO stage 0 partitions nothing; use deepspeed_backend(stage=0) or backend="ddp".')
        self.engine: Any = None  # DeepSpeed's, from `own` on
        self._merged: Merged | None = None  # what it gets, from `prepare` on
        self._settings: dict[str, Any] = {}
        self._policy = Policy()
        self._fp32: list[Tensor] = []
        self._frozen: dict[str, Tensor] = {}  # when DeepSpeed was started
        self._partition: Partition | None = None
        self._optimizer: ZeroOptimizer | None = None
        self._test: FirstStep | None = None
        self._agreement: Agreement | None = None  # None with one rank
        self._ranks: ProcessRanks | None = None  # the same
        self._weight: Tensor | None = None  # of the window, once it is agreed

    @property
    def configuration(self) -> dict[str, Any]:
        """What DeepSpeed got; empty before the Engine is built."""
        return {} if self._merged is None else self._merged.config

    # --- once ---------------------------------------------------------------------------------------------------

    def adapt(self, policy: Policy) -> Policy:
        """fp32 masters for 16-bit weights; raises for what ZeRO cannot store."""
        return adapt_policy(policy, self.stage)

    def compare(self, settings: Mapping[str, Any]) -> None:
        """Remember the Engine's settings; `prepare` compares them with those of the other ranks."""
        self._settings = dict(settings)

    def suggest_units(self, blocks: Sequence[nn.Module], fp32: Sequence[nn.Module], replicated: set[Tensor]) -> None:
        """The parameters that stay in fp32 among 16-bit ones, which DeepSpeed cannot store."""
        self._fp32 = [*replicated, *(p for module in fp32 for p in module.parameters())]

    def check_together(self, model: nn.Module, checks: Callable[[], None]) -> None:
        """Run the checks; an error of one rank is an error on all."""
        check_together(model, checks)

    def check(self, model: nn.Module, policy: Policy) -> None:
        """Reject what ZeRO would do in another precision than the policy, and settings that have no effect."""
        require_version()
        check_launched()
        check_process()
        self._policy = policy
        check_options(self._settings, policy, self.stage)
        check_model(unwrap(model), policy, self._fp32)
        check_experts(unwrap(model), self.name)  # with one rank too: DeepSpeed wants them in groups of their own

    def prepare(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
        """Compare the ranks, and give all of them the parameters and buffers of rank 0."""
        source = self._source
        check_optimizers(optimizers, source.config if isinstance(source, Merged) else source)
        (inner,) = optimizers
        self._merged = _merge(source, self._settings, self._policy, self.stage, type(inner))
        if source:
            log_decisions(self._merged, "DeepSpeed configuration")
        module, group = super().prepare(model, optimizers), dist.group.WORLD
        rank, size = dist.get_rank(), dist.get_world_size()
        local_rank = int(os.environ.get("LOCAL_RANK", self._context.device.index or 0))
        self._context = RunContext(self._context.device, rank, size, local_rank, process_group=group)
        if size > 1:
            settings = {key: str(value) for key, value in self._settings.items()} | {"ZeRO stage": str(self.stage)}
            settings["DeepSpeed configuration"] = json.dumps(self._merged.config, sort_keys=True, default=str)
            described = describe_model(module) | describe_optimizers(optimizers, module)
            versions = {"torch": torch.__version__, "deepspeed": require_version()}
            compare_ranks(versions | settings | described, ProcessRanks(device=self._context.device))
            broadcast_tensors((*module.parameters(), *module.buffers()), group)
            self._agreement, self._ranks = Agreement(group, self._context.device), ProcessRanks(group)
        return module

    def own(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Start DeepSpeed on weights that have their dtype; returns the optimizer over its partitions."""
        (inner,) = optimizers
        names = {id(p): name for name, p in module.named_parameters()}
        groups = [{names[id(p)]: p for p in group["params"]} for group in inner.param_groups]
        members = {name: p for group in groups for name, p in group.items()}
        trained = {name: p for name, p in members.items() if p.requires_grad}
        assert self._merged is not None
        self.engine = start_engine(module, inner, self._merged.config)
        partition = partition_of(self.engine, trained)
        if partition is None or self.engine.optimizer.optimizer is not inner:
            raise HalfstepError(
                f"DeepSpeed {require_version()} chose {type(self.engine.optimizer).__name__} for ZeRO stage {self.stage}, which this backend does not "
                'know. Use another version of DeepSpeed, or backend="fsdp".'
            )
        self._frozen = {name: p for name, p in members.items() if name not in trained}
        self._partition, self._optimizer = partition, ZeroOptimizer(inner, partition, groups)
        self._test = FirstStep(partition)
        self._optimizer.observers.append(self._test.verify)
        return [self._optimizer]

    # --- each micro-batch ---------------------------------------------------------------------------------------

    def agree_reference(self, reference: float | Tensor, *, weighted: bool, closing: bool) -> float | Tensor:
        """The largest of all ranks, before each backward: all of them may reduce."""
        if self._agreement is None or closing:
            return reference
        return self._agreement.reference(reference, weighted=weighted)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Backpropagate through DeepSpeed's hooks, which reduce at stages 2 and 3."""
        engine = self.engine
        if retain_graph and self.stage == 3:
            raise SettingError(
                "backward(retain_graph=True) at ZeRO stage 3: the weights of a module are freed after its backward, so the graph cannot be used again. "
                "Add the losses and call backward once, or use stage 1 or 2."
            )
        # What its forward() and the hooks on its output do, which are not used.
        engine.optimizer.clear_backward_seen_flag()
        engine.set_gradient_accumulation_boundary(False)
        engine._backward_prologue()  # noqa: SLF001
        engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def retained_gradients(self) -> list[Tensor]:
        """Sums of an open window."""
        return [*self._live().pending(), *self._tested().pending()]

    # --- each update --------------------------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Reduce at stage 1; the other stages have, in every backward."""
        unfrozen = [name for name, p in self._frozen.items() if p.grad is not None]
        if unfrozen:
            raise SettingError(
                f"{few(unfrozen)} were frozen when the Engine was built, and ZeRO has no partition for them, so they would never be updated. Unfreeze "
                "them before Engine(...), or close() this engine and build a new one."
            )
        self._live().close_window()

    def gradients(self) -> dict[str, Tensor] | None:
        """The gradients of this rank's fragments; empty ones of the parameters that other ranks step."""
        part = self._live()
        if not part.is_closed:
            return {}
        own, nothing = part.gradients(), part.flats[0].new_empty(0)
        return {name: own.get(name, nothing) for name in part.params}

    def parts(self) -> Parts:
        """The masters of this rank's fragments."""
        return self._live().parts()

    def norm_of(self, gradients: Mapping[str, Tensor], weight: float | Tensor, tables: dict[Any, Any]) -> Tensor:
        """The norm over all ranks, whose fragments are disjoint; the window's weight travels with it."""
        tensors = list(gradients.values())  # on the CPU with offload_optimizer
        own = total_norm(tensors, tensors[0].device, tables).to(self._context.device)
        if self._agreement is None:
            return own
        self._agreement.norm(own)
        self._weight = self._agreement.weight(weight, own.square())
        assert self._agreement.sums is not None
        return self._agreement.sums[0].sqrt()

    def reduce_weight(self, weight: float | Tensor) -> float | Tensor:
        """The mean over ranks, as DeepSpeed averages gradients."""
        return weight if self._weight is None else self._weight

    def agree(self, found_inf: Tensor) -> Tensor:
        """1 on every rank if it is on any."""
        return found_inf if self._agreement is None else self._agreement.flag(found_inf)

    def step(self, optimizer: torch.optim.Optimizer, decision: Any) -> bool:
        """Divide the partitions and let DeepSpeed step them; a skipped update touches nothing."""
        assert self._optimizer is not None
        skip, divisor = torch.stack((decision.found_inf, decision.divisor)).tolist()
        if not skip:
            gradients = list(self._live().gradients().values())
            if divisor != 1 and gradients:
                torch._foreach_div_(gradients, decision.divisor.to(gradients[0].device))
            self._tested().begin(decision.divisor)
            with self._optimizer.own_step():
                self.engine.optimizer.step()
            if self.engine.optimizer.overflow:
                raise HalfstepError(
                    "DeepSpeed skipped an update whose gradients Halfstep had found finite, so ranks may differ now. Please report it; continue "
                    "from the last checkpoint."
                )
        self._tested().end()
        return True

    def share_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Give every rank the buffers of rank 0."""
        if self._agreement is not None:
            broadcast_tensors(list(buffers), self._context.process_group)

    def reset(self) -> None:
        """Drop the gradients of the window."""
        self._live().drop()
        self._tested().end()
        self._weight = None
        if self._agreement is not None:
            self._agreement.reset()

    @property
    def replay_obstacle(self) -> str | None:
        """DeepSpeed's hooks reduce in a backward, and gather in a forward of stage 3."""
        return "ZeRO's hooks exchange messages in every forward or backward, and a replay on one rank would wait for the others"

    # --- state --------------------------------------------------------------------------------------------------

    def local(self, tensor: Any) -> Tensor:
        """The part of a weight that this rank stores: all of it before stage 3."""
        part: Tensor = getattr(tensor, "ds_tensor", tensor)
        return part

    def whole_weights(self, *, write: bool = False) -> AbstractContextManager[None]:
        """Gather the weights of stage 3; before it they are whole."""
        if self.stage < 3:
            return contextlib.nullcontext()
        return gathered(list(self.engine.module.parameters()), write=write)

    def gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copies of weights that are gathered only for now."""
        if self.stage < 3:
            return state
        return {**state, "model": {name: tensor.cpu().clone() for name, tensor in state["model"].items()}}

    def ranks(self) -> Ranks:
        """All ranks: they gather the state together, and rank 0 writes it."""
        return self._ranks or Ranks()

    def truth_rows(self) -> Mapping[str, str]:
        """What DeepSpeed really does, read from its engine."""
        return {} if self.engine is None else engine_rows(self.engine, self._live(), self._tested().outcome)

    def close(self) -> None:
        """Remove DeepSpeed's hooks; weights of stage 3 stay partitioned."""
        if self._test is not None:
            self._test.close()
        if self._optimizer is not None:
            self._optimizer.release()
            self._optimizer = None
            self.engine.destroy()

    def _live(self) -> Partition:
        assert self._partition is not None
        return self._partition

    def _tested(self) -> FirstStep:
        assert self._test is not None
        return self._test


def _merge(
    source: Mapping[str, Any] | Merged, settings: Mapping[str, Any], policy: Policy, stage: int, optimizer: type = AdamW
) -> Merged:
    """The configuration for DeepSpeed, of the user's keys or as a caller has merged them."""
    if isinstance(source, Merged):
        return check_zero(source)
    return engine_config(
        source,
        policy,
        stage,
        max_norm=settings.get("max_norm"),
        accumulate=settings.get("accumulate", 1),
        world_size=dist.get_world_size(),
        optimizer=f"{optimizer.__module__}.{optimizer.__qualname__}",
        version=require_version() if stage else TESTED_VERSION,
    )
