"""The process group of a run: opened from a Launch, and closed when the run ends, also by an error.

The backend follows from the device: gloo on CPUs, and on GPUs both (`cpu:gloo,cuda:nccl`), because the ranks also exchange
values of the host, such as the request to stop, which must not wait for the device.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from halfstep.backends.context import RunContext
from halfstep.backends.launch import Launch
from halfstep.errors import HalfstepError, SettingError
from halfstep.hardware.accelerator import pick_device

__all__ = ["open_group", "pick_rank_device"]

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
_SECONDS_TO_CLOSE = 10.0  # NCCL may wait for a message that a dead rank never sends


def pick_rank_device(launch: Launch, name: str = "auto") -> torch.device:
    """The device of this rank: its local rank among the visible ones; raises if there are fewer than local ranks."""
    device = pick_device(name)
    if launch.world_size == 1 or device.type == "cpu":
        return device
    if ":" in str(device):
        raise SettingError(
            f"device={name!r} would put all {launch.world_size} ranks on one device; write {device.type}, and each rank uses the one "
            "of its local rank."
        )
    count = torch.accelerator.device_count()
    index = launch.local_rank
    if index >= count and count == 1 and _has_own_device(launch):
        index = 0  # srun --gpus-per-task=1: every task sees its own GPU only
    elif launch.local_world_size > count:
        raise SettingError(
            f"{launch.launcher} started {launch.local_world_size} ranks on this machine, and torch sees {count} {device.type} devices "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}). Start at most {count}, or use --set device=cpu."
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def _has_own_device(launch: Launch) -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return launch.launcher in {"slurm", "openmpi"} and bool(visible) and "," not in visible


@contextlib.contextmanager
def open_group(
    launch: Launch, device: torch.device, *, timeout_seconds: float, always: bool = False
) -> Iterator[RunContext]:
    """The context of this rank inside its process group, which is destroyed at the end of the block.

    One process that no launcher started gets a group only with `always`. A group that the program opened itself is used and
    left open.
    """
    if launch.world_size == 1 and not always:
        yield RunContext(device)
        return
    if not dist.is_available():
        raise SettingError(f"torch {torch.__version__} is built without torch.distributed; install another build.")
    backend = _BACKENDS.get(device.type)
    if backend is None:
        raise SettingError(
            f"Several ranks cannot exchange tensors on {device.type}; use --set device=cpu or CUDA GPUs."
        )
    opened = not dist.is_initialized()
    if opened:
        _connect(launch, backend, timedelta(seconds=timeout_seconds))
    failed = True
    try:
        yield RunContext(device, launch.rank, launch.world_size, launch.local_rank, process_group=dist.group.WORLD)
        failed = False
    finally:
        if opened and dist.is_initialized():
            _close(limit=_SECONDS_TO_CLOSE if failed and device.type != "cpu" else None)


def _connect(launch: Launch, backend: str, timeout: timedelta) -> None:
    try:
        if launch.launcher == "none":
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _agent_store(launch, timeout)
            dist.init_process_group(
                backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
            )
        elif launch.launcher == "torchrun":
            os.environ.setdefault("MASTER_ADDR", launch.address or "")
            os.environ.setdefault("MASTER_PORT", str(launch.port))
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(
                backend,
                init_method=f"tcp://{launch.address}:{launch.port}",
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timeout,
            )
    except (RuntimeError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HalfstepError(
            f"Rank {launch.rank} of {launch.world_size} did not reach the others at {launch.address}:{launch.port} within "
            f"{timeout.total_seconds():g} s: {first_line} Check that all {launch.world_size} processes were started, and that "
            "the host of rank 0 accepts connections at this port."
        ) from error


def _agent_store(launch: Launch, timeout: timedelta) -> Any:
    """The store that torchrun's agent hosts, which survives the ranks.

    With its static rendezvous, the default, the store also survives restarts (torch 2.13 assumes that it does not), and ranks
    would connect to the addresses of the processes before. That rendezvous restarts one machine only, and there all
    ranks have the same count of restarts.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        str(launch.address), launch.port or 0, launch.world_size, is_master=False, timeout=timeout
    )
    if launch.local_world_size < launch.world_size:
        return store
    return dist.PrefixStore(f"halfstep/restart{launch.restarts}", store)  # type: ignore[attr-defined]


def _close(*, limit: float | None) -> None:
    if limit is None:
        dist.destroy_process_group()
        return
    thread = threading.Thread(target=_destroy_quietly, daemon=True)
    thread.start()
    thread.join(limit)


def _destroy_quietly() -> None:
    with contextlib.suppress(Exception):  # the error that ended the run is the one to show
        dist.destroy_process_group()
