"""The rows of the zoo benchmark: training loops around one model, each with a step that takes no arguments.

All rows use AdamW with the same settings and clip the gradient norm to 1.0; the batch is the same fp32 batch on the device, and a
row that trains a 16-bit model casts it inside the step. torch AMP is the loop of its documentation with a fused AdamW. The pure
rows are 16-bit models under torch's fused AdamW with no master weights: the upper bound of what a precision tool can reach, not a
recipe. Pure fp16 multiplies its loss by a constant and uses eps=1e-4, so that its moments in fp16 do not divide by zero; it is
there for speed only. Loss scales start at 256 in every fp16 row, so that no timed step is skipped.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfstep.backends.context import RunContext
from halfstep.engine.compiling import BLOCKS, compile_model
from halfstep.engine.engine import Engine
from halfstep.jobs.job import Job
from halfstep.scaling.scaler import LossScaler

__all__ = [
    "COMPILED_ROWS",
    "EAGER_ROWS",
    "RESIDUAL_ROW",
    "SCALE",
    "Loop",
    "Row",
    "cast_batch",
    "make_loop",
    "unavailable",
]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LR, MAX_NORM, SCALE = 1e-5, 1.0, 2.0**8  # a small rate: the work of a step must not depend on what was learned


@dataclass(frozen=True)
class Row:
    """One way to train: torch AMP, a pure 16-bit model, FlashOptim, or a preset of Halfstep."""

    name: str
    kind: str  # "amp", "pure", "flashoptim" or "engine"
    format: str  # "bf16" or "fp16"
    precision: str = ""  # the policy of an engine
    compile: bool | str = False

    @property
    def has_master(self) -> bool:
        """Whether updates are accumulated in more than 16 bits."""
        return self.kind != "pure"


EAGER_ROWS = tuple(
    row
    for name in ("bf16", "fp16")
    for row in (
        Row(f"torch AMP {name}", "amp", name),
        Row(name, "engine", name, name),
        Row(f"pure {name}", "pure", name),
        Row(f"{name}-lean", "engine", name, f"{name}-lean"),
        *(
            (
                Row("bf16-lean,states=8bit", "engine", name, "bf16-lean,states=8bit"),
                Row("FlashOptim bf16", "flashoptim", name),
            )
            if name == "bf16"
            else ()
        ),
    )
)
RESIDUAL_ROW = Row("bf16-lean,residual=fp32", "engine", "bf16", "bf16-lean,residual=fp32")  # runs only if it is named
COMPILED_ROWS = (
    Row("torch AMP bf16 + compile", "amp", "bf16", compile=True),
    Row("pure bf16 + compile", "pure", "bf16", compile=True),
    Row("FlashOptim bf16 + compile", "flashoptim", "bf16", compile=True),
    Row("bf16-lean + compile", "engine", "bf16", "bf16-lean", compile=True),
    Row("bf16-lean,states=8bit + compile", "engine", "bf16", "bf16-lean,states=8bit", compile=True),
    Row("bf16-lean + compile=blocks", "engine", "bf16", "bf16-lean", compile=BLOCKS),
)


def unavailable(row: Row, device: torch.device) -> str:
    """Why a row cannot run here, or ""."""
    if row.kind == "flashoptim" and device.type != "cuda":
        return "needs CUDA"
    if row.kind == "flashoptim" and importlib.util.find_spec("flashoptim") is None:
        return "flashoptim is not installed"
    return ""


@dataclass(frozen=True)
class Loop:
    """A model being trained: `step` returns the detached loss, `skipped` counts skipped updates, `close` reverts the set-up."""

    model: nn.Module
    step: Callable[[], Tensor]
    skipped: Callable[[], int]
    close: Callable[[], None]


def cast_batch(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point tensors in `dtype`."""
    return pytree.tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, batch)


def make_loop(row: Row, template: nn.Module, job: Job, batch: Any, context: RunContext) -> Loop:
    """The training loop of a row around a copy of `template`, an fp32 model in training mode."""
    model = copy.deepcopy(template)

    def loss_of(inputs: Any) -> Tensor:
        return job.call("loss", context, model=model, batch=inputs, split="train", epoch=0)

    make = {"amp": _amp, "pure": _pure, "flashoptim": _flashoptim, "engine": _engine}[row.kind]
    return make(row, model, loss_of, batch, context.device)


def _fused(model: nn.Module, device: torch.device, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=device.type == "cuda", **settings)


def _amp(row: Row, model: nn.Module, loss_of: Callable[[Any], Tensor], batch: Any, device: torch.device) -> Loop:
    compile_model(model, row.compile)
    optimizer, params = _fused(model, device), list(model.parameters())
    scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, enabled=row.format == "fp16")
    dtype, scales = DTYPES[row.format], scaler.is_enabled()

    def step() -> Tensor:
        with torch.autocast(device.type, dtype=dtype):
            loss = loss_of(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Loop(model, step, lambda: int(scales and scaler.get_scale() < SCALE), lambda: None)


def _pure(row: Row, model: nn.Module, loss_of: Callable[[Any], Tensor], batch: Any, device: torch.device) -> Loop:
    dtype = DTYPES[row.format]
    model.to(dtype)
    compile_model(model, row.compile)
    scale = SCALE if row.format == "fp16" else 1.0
    optimizer = _fused(model, device, eps=1e-4 if row.format == "fp16" else 1e-8)
    return _plain(model, loss_of, batch, dtype, optimizer, scale)


def _flashoptim(
    row: Row, model: nn.Module, loss_of: Callable[[Any], Tensor], batch: Any, _device: torch.device
) -> Loop:
    """FlashOptim as its README writes it: `cast_model`, 24-bit master weights, 8-bit moments; clipped by torch."""
    from flashoptim import FlashAdamW, cast_model

    dtype = DTYPES[row.format]
    cast_model(model, dtype=dtype)
    compile_model(model, row.compile)
    return _plain(model, loss_of, batch, dtype, FlashAdamW(model.parameters(), lr=LR), 1.0)


def _plain(
    model: nn.Module,
    loss_of: Callable[[Any], Tensor],
    batch: Any,
    dtype: torch.dtype,
    optimizer: torch.optim.Optimizer,
    scale: float,
) -> Loop:
    """A loop without autocast; the gradients stay multiplied by `scale`, which AdamW cancels, and are clipped accordingly."""
    params = list(model.parameters())

    def step() -> Tensor:
        loss = loss_of(cast_batch(batch, dtype))
        (loss if scale == 1.0 else loss * scale).backward()
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM * scale)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Loop(model, step, lambda: 0, lambda: None)


def _engine(row: Row, model: nn.Module, loss_of: Callable[[Any], Tensor], batch: Any, _device: torch.device) -> Loop:
    scaler = LossScaler(init_scale=SCALE) if row.format == "fp16" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    engine = Engine(model, optimizer, row.precision, max_norm=MAX_NORM, compile=row.compile, scaler=scaler)

    def step() -> Tensor:
        with engine.forward():
            loss = loss_of(batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def skipped() -> int:
        with engine.evaluate():  # waits for the outcomes that are on their way
            return engine.progress.attempts - engine.progress.applied

    return Loop(model, step, skipped, engine.close)
