"""A ds_config.json in a training run: what it decides, the optimizer and scheduler it describes, and the backend.

The file decides what the command line and `TrainConfig` leave open: precision, clipping, micro-batches and their size. Its
`optimizer` and `scheduler` blocks replace those of the job, unless all their values are "auto". Everything that the run does
otherwise than the file is logged once, when the backend is prepared.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from halfstep.backends.base import Backend
from halfstep.backends.context import RunContext
from halfstep.backends.deepspeed import deepspeed_backend
from halfstep.backends.deepspeed.blocks import build_optimizer, build_scheduler, is_left_open
from halfstep.backends.deepspeed.settings import read_config
from halfstep.check.deepspeed import merge_deepspeed
from halfstep.events import log_once
from halfstep.jobs.job import Job, trainable
from halfstep.precision.deepspeed_keys import is_auto
from halfstep.precision.policy import Policy
from halfstep.train.config import TrainConfig

__all__ = ["ZeroFile", "settings_of_file"]

_OWN = "torch.optim.AdamW"  # stands for the optimizer of a job that is not built yet


def settings_of_file(
    path: Path, decided: Mapping[str, Any], precision: str | None, world_size: int
) -> tuple[dict[str, Any], str]:
    """The fields of TrainConfig that the file decides, and the precision; of which `decided` has some already.

    The file is checked first. Numbers that are "auto" in the file have the defaults of `TrainConfig`.
    """
    values = read_config(path)
    usual = TrainConfig()
    norm, accumulate, batch = decided.get("max_norm", "file"), decided.get("accumulate"), decided.get("batch")
    if norm == "file" and is_auto(values.get("gradient_clipping")):
        norm = usual.max_norm
    if accumulate is None and is_auto(values.get("gradient_accumulation_steps")):
        accumulate = usual.accumulate
    merged = merge_deepspeed(
        path,
        policy=None if precision is None else Policy.parse(precision),
        max_norm=norm,
        accumulate=accumulate,
        batch_size=None if batch is None or batch % world_size else batch // world_size,
        world_size=world_size,
        optimizer=None if _describes(values, "optimizer") else _OWN,
        driver="halfstep",
    )
    fields = {"backend": "deepspeed", "max_norm": merged.max_norm, "accumulate": merged.accumulate}
    if merged.batch_size is not None:
        fields["batch"] = merged.batch_size * world_size
    return {**fields, **decided}, precision or str(merged.policy)


def _describes(values: Mapping[str, Any], name: str) -> bool:
    return values.get(name) is not None and not is_left_open(values[name])


class ZeroFile:
    """The file of one run, or none: then the job has the objects, and ZeRO its default stage."""

    def __init__(self, config: TrainConfig, job: Job) -> None:
        self._config, self._job = config, job
        self._values = {} if config.ds_config is None else read_config(config.ds_config)

    def optimizer(self, run: RunContext, model: nn.Module) -> Any:
        """The optimizer of the file, else of the job."""
        if not _describes(self._values, "optimizer"):
            return self._job.call("optimizer", run, model=model)
        block = self._values.pop("optimizer")
        built = build_optimizer(block, [param for _, param in trainable(model)])
        log_once(f"{self._config.ds_config}: its optimizer {type(built).__name__} is used instead of the job's.")
        return built

    def scheduler(self, run: RunContext, model: nn.Module, optimizer: Any) -> Any:
        """The scheduler of the file, else of the job."""
        if not _describes(self._values, "scheduler"):
            return self._job.call("scheduler", run, optimizer=optimizer, model=model)
        block = self._values.pop("scheduler")
        if self._job.scheduler is not None:
            log_once(f"{self._config.ds_config}: its scheduler {block.get('type')} is used instead of the job's.")
        return build_scheduler(block, optimizer)

    def backend(self, run: RunContext, policy: Policy, optimizer: Any) -> Backend:
        """The backend; called after the blocks of the file were built."""
        config = self._config
        if config.ds_config is None:
            return deepspeed_backend()
        merged = merge_deepspeed(
            self._values,
            policy=policy,
            max_norm=config.max_norm,
            accumulate=config.accumulate,
            batch_size=run.batch_size,
            world_size=run.world_size,
            optimizer=_class_name(optimizer),
            driver="halfstep",
        )
        return deepspeed_backend(merged)


def _class_name(optimizer: Any) -> str:
    first = optimizer if isinstance(optimizer, Optimizer) else optimizer[0]
    return f"{type(first).__module__}.{type(first).__qualname__}"
