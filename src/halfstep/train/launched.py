"""A training run that a launcher started: its process group, its directory, and its restarts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfstep.backends.base import Backend
from halfstep.backends.context import RunContext
from halfstep.backends.deepspeed import DeepSpeed
from halfstep.backends.group import open_group, pick_rank_device
from halfstep.backends.launch import Launch
from halfstep.backends.ranks import ranks_of
from halfstep.checkpoint.runlog import read_runlog
from halfstep.events import log_info, quiet
from halfstep.train.build import resolve_backend
from halfstep.train.config import TrainConfig
from halfstep.train.resume import RUN_FILE

__all__ = ["describe_ranks", "open_ranks", "restarted", "same_path"]

# NCCL's own timeout ends the process without a message; the heartbeat comes first.
_NCCL_MARGIN_SECONDS = 60.0


@contextlib.contextmanager
def open_ranks(launch: Launch, config: TrainConfig) -> Iterator[RunContext | None]:
    """The context of this rank in its process group; None for one process that needs none."""
    backend = resolve_backend(config.backend, launch.world_size)
    if backend == "single":
        yield None
        return
    with quiet(unless=launch.is_main):
        device = pick_rank_device(launch, config.device)
        seconds = config.timeout + (0.0 if device.type == "cpu" else _NCCL_MARGIN_SECONDS)
        with open_group(launch, device, timeout_seconds=seconds, always=True) as context:
            yield context


def same_path(path: Path, ranks: RunContext | None, timeout_seconds: float) -> Path:
    """Rank 0's path: names with a time differ between ranks."""
    return path if ranks is None else Path(ranks_of(ranks, timeout_seconds).broadcast(str(path)))


def restarted(out: Path, launch: Launch) -> bool:
    """Whether this launch has restarted and has a run to resume in `out`; one that died before its first record starts again.

    On several machines torchrun counts the restarts of each machine on its own, so the id of the launch, which the run
    file has, decides as well.
    """
    file = out / RUN_FILE
    if not (launch.restarts or launch.run_id) or not file.exists() or not file.stat().st_size:
        return False
    same = launch.run_id is not None and read_runlog(file).header.get("launch") == launch.run_id
    if (same or launch.restarts) and launch.is_main:
        log_info(f"The run in {out} was restarted by {launch.launcher} and resumes from its last checkpoint.")
    return same or launch.restarts > 0


def describe_ranks(context: RunContext, backend: Backend) -> dict[str, Any]:
    """The ranks of a run and the configuration of DeepSpeed, for its run file; logged where there are several."""
    if context.world_size > 1:
        log_info(
            f"{context.world_size} ranks ({backend.name}), micro-batch {context.batch_size * context.world_size}: {context.batch_size} "
            "on each."
        )
    values = {"backend": backend.name, "world_size": context.world_size, "batch_per_rank": context.batch_size}
    return values | ({"deepspeed": backend.configuration} if isinstance(backend, DeepSpeed) else {})
