"""The DeepSpeed library itself: the only file that imports it.

DeepSpeed is an extra, and importing it takes seconds, so it is imported when a function here is called.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from halfstep.errors import MissingError, SettingError
from halfstep.events import log_info

__all__ = ["OLDEST", "check_process", "gathered", "require_version", "start_engine", "version"]

OLDEST = (
    0,
    19,
    8,
)  # the first release whose ZeRO stages close a window on request (finalize_gradient_accumulation_boundary)


def version() -> str:
    """The installed version of DeepSpeed; raises where it is not installed."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        raise MissingError('backend="deepspeed" needs DeepSpeed: pip install "halfstep[deepspeed]".') from None


def require_version() -> str:
    """The installed version; raises for one that this backend does not know."""
    installed = version()
    numbers = tuple(int(part) for part in installed.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise SettingError(
            f"DeepSpeed {installed} is installed, and the Engine drives {oldest} and later: older ones close a window of gradients only on "
            f'their own count of micro-batches. Run: pip install "deepspeed>={oldest}".'
        )
    return installed


def check_process() -> None:
    """Raise where another engine of this process has changed what every later one does."""
    name = "deepspeed.runtime.torch_autocast"
    if name in sys.modules and sys.modules[name].is_autocast_initialized():
        raise SettingError(
            "A DeepSpeed engine with torch_autocast was started in this process, and DeepSpeed applies its scaler and its reduction format to "
            "every engine after it. Train with Halfstep in a process of its own."
        )


def start_engine(module: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> Any:
    """The DeepSpeedEngine of `deepspeed.initialize`; its optimizer steps the user's on fp32 partitions."""
    deepspeed: Any = importlib.import_module("deepspeed")
    device = next(module.parameters()).device
    _set_local_rank(device)
    # torch 2.13 has new names for collectives that DeepSpeed calls in every step.
    warnings.filterwarnings("ignore", message=r"`torch.distributed.\w+` is deprecated", category=FutureWarning)
    with _quiet(), _adapted_to_cpu(device):
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=dict(config))
    return engine


def gathered(params: Sequence[nn.Parameter], *, write: bool) -> AbstractContextManager[None]:
    """Inside this block parameters of ZeRO stage 3 are whole; with `write`, the values of rank 0 are partitioned again."""
    deepspeed: Any = importlib.import_module("deepspeed")
    block: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(
        list(params), modifier_rank=0 if write else None
    )
    return block


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed logs and prints about forty lines while it starts, and calls functions that torch has deprecated."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


def _set_local_rank(device: torch.device) -> None:
    """Let DeepSpeed use the device that the model is on: it reads the index from LOCAL_RANK, at any time."""
    before = os.environ.get("LOCAL_RANK")
    index = str(device.index) if device.index is not None else before or "0"
    if before is not None and before != index:
        log_info(f"LOCAL_RANK={before} was set to {index}, the device of the model, for DeepSpeed.")
    os.environ["LOCAL_RANK"] = index


@contextlib.contextmanager
def _adapted_to_cpu(device: torch.device) -> Iterator[None]:
    """On a CPU, use gloo's own sums, and start in fp16 on every one.

    The first start on a CPU compiles a shared-memory sum, which takes 50 s and fails where there is no C++ compiler. And
    DeepSpeed rejects fp16 on CPUs for which oneDNN has no fp16 products, where torch computes them in another way.
    """
    if device.type != "cpu":
        yield
        return
    comm: Any = importlib.import_module("deepspeed.comm.torch")
    accelerator: Any = importlib.import_module("deepspeed.accelerator").get_accelerator()
    build, comm.build_shm_op = comm.build_shm_op, lambda: None
    asks, accelerator.is_fp16_supported = accelerator.is_fp16_supported, lambda: True
    try:
        yield
    finally:
        comm.build_shm_op, accelerator.is_fp16_supported = build, asks
