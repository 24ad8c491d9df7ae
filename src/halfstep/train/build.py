"""The context, the model and the Engine of a run.

All ranks build the model from the same seed, or with FSDP2 rank 0 alone (`sharded.py`); afterwards every rank except rank 0
continues with random numbers of its own, so that dropout and augmentation differ between ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from halfstep.backends.base import Backend
from halfstep.backends.consistency import compare_ranks, describe_model
from halfstep.backends.context import RunContext
from halfstep.backends.fsdp import FSDP
from halfstep.backends.ranks import Ranks
from halfstep.checkpoint.rng import seed_everything
from halfstep.engine.engine import Engine
from halfstep.errors import SettingError
from halfstep.jobs.data.loader import mix
from halfstep.jobs.job import Job
from halfstep.precision.choice import resolve
from halfstep.train.config import DEFAULT_BATCH, TrainConfig
from halfstep.train.optimizer import replace_optimizer
from halfstep.train.sharded import build_on_rank_0, shard_model
from halfstep.train.zero_file import ZeroFile

__all__ = ["batch_per_rank", "build_engine", "resolve_backend", "run_context", "seed_rank"]


def resolve_backend(name: str, world_size: int) -> str:
    """The backend that "auto" chooses; raises for ranks that would each do the whole run."""
    if name == "auto":
        return "single" if world_size == 1 else "ddp"
    if name == "single" and world_size > 1:
        raise SettingError(
            f"backend=single, but a launcher started {world_size} processes, and each of them would do the whole run. Use "
            "--backend ddp or fsdp, or start it without the launcher."
        )
    return name


def run_context(config: TrainConfig, ranks: RunContext | None) -> RunContext:
    """The context of this process, with the seed and its part of the batch; `ranks` is that of its process group."""
    batch = config.batch or DEFAULT_BATCH
    if ranks is None:
        return RunContext.single(config.device, seed=config.seed, batch_size=batch)
    return replace(ranks, seed=config.seed, batch_size=batch_per_rank(batch, ranks.world_size))


def batch_per_rank(batch: int, world_size: int) -> int:
    """The examples of each rank; raises for a micro-batch that cannot be divided."""
    if batch % world_size:
        lower = batch - batch % world_size
        nearest = f"{lower} or {lower + world_size}" if lower else str(world_size)
        raise SettingError(
            f"batch={batch} is the micro-batch of all ranks together and cannot be divided among {world_size} of them; use "
            f"--batch {nearest}."
        )
    return batch // world_size


def seed_rank(seed: int, rank: int) -> None:
    """Give every rank except rank 0 random numbers of its own."""
    if rank:
        seed_everything(mix("rank", seed, rank))


def build_engine(
    job: Job, run: RunContext, config: TrainConfig, precision: str, watch: Any, ranks: Ranks
) -> tuple[nn.Module, Engine]:
    """The job's model on the run's device, and the engine over it; compared with those of the other ranks."""
    backend: Backend | str = resolve_backend(config.backend, run.world_size)
    policy = resolve(precision)[0]
    shards = backend == FSDP.name
    model = build_on_rank_0(job, run, ranks) if shards else job.call("model", run).to(run.device)
    compare_ranks(describe_model(model) | {"policy": str(policy)}, ranks)
    if shards:
        backend = shard_model(model, job, run, policy)
    zero = ZeroFile(config, job)
    optimizer = zero.optimizer(run, model)
    if config.optimizer is not None:
        optimizer = replace_optimizer(config.optimizer, optimizer)
    scheduler = zero.scheduler(run, model, optimizer)
    if backend == "deepspeed":
        backend = zero.backend(run, policy, optimizer)
    engine = Engine(
        model,
        optimizer,
        precision,
        max_norm=config.max_norm,
        accumulate=config.accumulate,
        scheduler=scheduler,
        ema=config.ema,
        compile=config.compile,
        deterministic=config.deterministic,
        gradient_release=config.gradient_release,
        recompute=config.recompute,
        watch=watch,
        backend=backend,
    )
    return model, engine
