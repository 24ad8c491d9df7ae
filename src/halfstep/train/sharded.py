"""The model of a job under FSDP2: rank 0 builds it, and each rank allocates its own shards only.

`backends/fsdp/initial.py` explains how. The optimizer is built afterwards, over the sharded parameters: they have the names
and shapes of the whole ones.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from halfstep.backends.base import unwrap
from halfstep.backends.context import RunContext
from halfstep.backends.fsdp import FSDP, is_sharded_model
from halfstep.backends.fsdp.initial import InitialValues, allocate, meta_problem
from halfstep.backends.ranks import Ranks
from halfstep.checkpoint.rng import seed_everything
from halfstep.engine.setup import check_module
from halfstep.errors import SettingError
from halfstep.events import log_info
from halfstep.hardware.units import few
from halfstep.jobs.job import Job, read_arguments
from halfstep.precision.policy import Policy

__all__ = ["build_on_rank_0", "shard_model"]

_META = torch.device("meta")


def build_on_rank_0(job: Job, run: RunContext, ranks: Ranks) -> nn.Module:
    """The job's model: on the CPU of rank 0, and on the other ranks on the meta device where its constructor works there.

    A failure on one rank is an error on all of them.
    """
    _check_fields(job)
    built: list[nn.Module] = []

    def build() -> str:
        model, reason = _build_on_meta(job, run) if run.rank else (None, "")
        built.append(job.call("model", run) if model is None else model)
        return reason

    outcomes = ranks.together(build)
    if reasons := [each for each in outcomes if each]:
        log_info(
            f"{len(reasons)} of {len(outcomes)} ranks built the whole model on the CPU, as rank 0 does: {few(list(dict.fromkeys(reasons)), 1)}. "
            "It needs more host memory and is not an error."
        )
    return built[0]


def _build_on_meta(job: Job, run: RunContext) -> tuple[nn.Module | None, str]:
    """The model without values, or None and the reason; the generators are seeded again in that case."""
    try:
        with _META, warnings.catch_warnings():
            # Weights that the constructor loads: rank 0 has them.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*", category=UserWarning)
            model: nn.Module = job.call("model", run, device=_META)
        problem = meta_problem(unwrap(model))
        if not problem:
            return model, ""
        reason = f"on the meta device, {problem}"
    except Exception as error:
        cause = error.__cause__ or error
        reason = f"its constructor does not work on the meta device ({type(cause).__name__}: {_first_line(cause)})"
    seed_everything(run.seed)
    return None, reason


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]


def shard_model(model: nn.Module, job: Job, run: RunContext, policy: Policy) -> FSDP:
    """Shard the model over all ranks, with the values of rank 0; returns the backend for the Engine."""
    from torch.distributed.device_mesh import init_device_mesh

    module = unwrap(model)
    if is_sharded_model(module):
        if job.shard:
            raise SettingError(
                "Job(shard=...) has no effect on a model that the job passes to fully_shard itself. Omit one of them."
            )
        return FSDP()
    module.to("cpu" if run.rank == 0 else next(module.parameters()).device)  # a job may put it on `device` itself
    backend = FSDP(job.shard, mesh=init_device_mesh(run.device.type, (run.world_size,)))
    check_module(backend, model, policy)
    values = InitialValues(module)
    backend.shard(module)
    allocate(module, run.device)
    values.send(module, run.device, rank=run.rank, group=run.process_group)
    return backend


def _check_fields(job: Job) -> None:
    """Raise for a loss or metric over parameters: FSDP2 has them whole during a forward only."""
    for which in ("loss", "metric"):
        function = getattr(job, which)
        if function is None:
            continue
        names = [name for name in ("params", "named_params") if name in read_arguments(function).names]
        if names:
            raise SettingError(
                f"{job.describe(which)} names {few(names)}, which are shards with backend=fsdp, and each rank would compute with its own. Use "
                "weight_decay of the optimizer, compute it inside the model's forward, or use --backend ddp."
            )
