"""Gradients of the zoo's rows compared with fp64, and the fp32 tensors in their graphs.

Gradient error: the weights and the batch are rounded to the 16-bit format first, so every row of a format (pure, lean, torch AMP)
computes with exactly the same numbers and one fp64 run of the same model is the reference of all. Dropout is off, the model is at
its full depth and in training mode. The error is the L2 norm of the difference over all gradients and batches relative to the
reference's norm; next to it the median over the parameters of the same quotient. fp16 rows share one constant loss scale, the
largest of 2^12, 2^8, 2^4 and 1 at which all of their gradients are finite. Where a library converts to fp32 itself (`.float()`),
the reference does too, which is about 1e-7 and so far below what 16 bits can show. In a mixture of experts a rounding can send a
token to another expert; that is part of its error.

fp32 leaks: the autograd graph of one loss, whose nodes know the dtype and shape of their results. A leak starts at a node whose
result is fp32 and large while none of its inputs is.
"""

from __future__ import annotations

import copy
import statistics
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from zoo_models import Case, without_dropout
from zoo_rows import DTYPES, EAGER_ROWS, Row, cast_batch

from halfstep.backends.context import RunContext
from halfstep.engine.engine import Engine
from halfstep.engine.graph import nodes_of
from halfstep.jobs.job import Job
from halfstep.scaling.scaler import StaticScaler
from halfstep.train.stream import to_device

__all__ = ["build_model", "fp32_results", "gradient_rows", "leak_lines"]

SCALES = (2.0**12, 2.0**8, 2.0**4, 1.0)
ACCURACY_ROWS = tuple(row for row in EAGER_ROWS if row.kind in {"amp", "pure"} or row.precision.endswith("-lean"))


def build_model(job: Job, context: RunContext) -> nn.Module:
    """The job's model with the weights of seed 0, in training mode on the context's device."""
    torch.manual_seed(0)
    with context.device:
        model: nn.Module = job.call("model", context)
    return model.to(context.device).train()  # torch.Tensor(...) ignores the block above


def gradient_rows(case: Case, rows: tuple[Row, ...], device: torch.device, *, tiny: bool, batch_size: int, num_batches: int) -> list[dict[str, Any]]:  # fmt: skip
    """One entry per row with its error over all gradients and the median over the parameters."""
    job, context = case.job(tiny=tiny), RunContext(device, batch_size=batch_size)
    source = without_dropout(build_model(job, context))
    entries = []
    for name, dtype in DTYPES.items():
        chosen = [row for row in rows if row.format == name]
        if not chosen:
            continue
        rounded = copy.deepcopy(source)
        with torch.no_grad():
            for param in rounded.parameters():
                param.copy_(param.to(dtype))
        batches = [cast_batch(_batch(job, context, seed), dtype) for seed in range(num_batches)]
        batches = [cast_batch(batch, torch.float32) for batch in batches]
        exact = [_exact_gradients(rounded, job, batch, context) for batch in batches]
        for scale in SCALES if name == "fp16" else (1.0,):
            results = [_row_entry(row, rounded, job, batches, exact, context, scale) for row in chosen]
            if all(entry.get("finite", True) for entry in results):
                break
        entries += results
    return entries


def _batch(job: Job, context: RunContext, seed: int) -> Any:
    loader = job.call("data", context, split="train", epoch=0, seed=seed)
    return to_device(next(iter(loader)), context.device)


def _loss(job: Job, model: nn.Module, batch: Any, context: RunContext) -> Tensor:
    loss: Tensor = job.call("loss", context, model=model, batch=batch, split="train", epoch=0)
    return loss


def _gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def _exact_gradients(source: nn.Module, job: Job, batch: Any, context: RunContext) -> dict[str, Tensor]:
    model = copy.deepcopy(source).double()
    _loss(job, model, cast_batch(batch, torch.float64), context).backward()
    return _gradients_of(model)


def _row_gradients(
    row: Row, source: nn.Module, job: Job, batch: Any, context: RunContext, scale: float
) -> dict[str, Tensor]:
    """The gradients of a row, still multiplied by `scale`."""
    model, dtype, device = copy.deepcopy(source), DTYPES[row.format], context.device
    if row.kind == "engine":
        scaler = StaticScaler(scale) if row.format == "fp16" else None
        with Engine(model, torch.optim.AdamW(model.parameters()), row.precision, scaler=scaler) as engine:
            with engine.forward():
                loss = _loss(job, model, batch, context)
            engine.backward(loss)
            return _gradients_of(model)
    if row.kind == "amp":
        with torch.autocast(device.type, dtype=dtype):
            loss = _loss(job, model, batch, context)
    else:
        loss = _loss(job, model.to(dtype), cast_batch(batch, dtype), context)
    (loss * scale).backward()
    return _gradients_of(model)


def _row_entry(
    row: Row,
    source: nn.Module,
    job: Job,
    batches: list[Any],
    exact: list[dict[str, Tensor]],
    context: RunContext,
    scale: float,
) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": row.name, "format": row.format, "loss_scale": scale}
    differences: Counter[str] = Counter()
    norms: Counter[str] = Counter()
    try:
        for batch, reference in zip(batches, exact, strict=True):
            gradients = _row_gradients(row, source, job, batch, context, scale)
            for name, value in reference.items():
                difference = gradients[name].double() / scale - value
                differences[name] += float(difference.square().sum())
                norms[name] += float(value.square().sum())
    except Exception as error:  # a model that a row cannot train is a result as well
        return entry | {"error": f"{type(error).__name__}: {error}"[:300]}
    total = sum(differences.values())
    quotients = [differences[name] / norms[name] for name in norms if norms[name] > 0]
    entry["finite"] = total < float("inf")  # false for NaN too
    entry["error_l2"] = (total / sum(norms.values())) ** 0.5
    entry["error_median"] = statistics.median(quotients) ** 0.5
    return entry


# --- leaks ----------------------------------------------------------------------------------------------------------


def fp32_results(loss: Tensor, min_bytes: int) -> tuple[Counter[str], Counter[str]]:
    """Bytes of large fp32 results in the graph of a loss by operation, and of those where fp32 starts."""
    every: Counter[str] = Counter()
    starts: Counter[str] = Counter()
    for node in nodes_of(loss.grad_fn):
        size = sum(_fp32_bytes(entry, min_bytes) for entry in _results(node))
        if not size or node.name().endswith("AccumulateGrad"):
            continue
        every[node.name()] += size
        inputs = [
            entries[index]
            for parent, index in node.next_functions
            if parent is not None and len(entries := _results(parent)) > index
        ]
        if not any(_fp32_bytes(entry, min_bytes) for entry in inputs):
            starts[node.name()] += size
    return every, starts


def _results(node: Any) -> Any:
    return getattr(node, "_input_metadata", None) or ()  # what comes in are gradients of the node's results


def _fp32_bytes(entry: Any, min_bytes: int) -> int:
    size = 4 * torch.Size(entry.shape).numel() if entry.dtype is torch.float32 else 0
    return size if size >= min_bytes else 0


def leak_lines(case: Case, device: torch.device, *, tiny: bool, batch_size: int, min_bytes: int) -> list[str]:
    """For each lean preset, the operations with more bytes of fp32 results than in the pure model of its format."""
    job, context = case.job(tiny=tiny), RunContext(device, batch_size=batch_size)
    source, lines = build_model(job, context), []
    batch = _batch(job, context, 0)
    for name, dtype in DTYPES.items():
        pure = copy.deepcopy(source).to(dtype)
        normal = fp32_results(_loss(job, pure, cast_batch(batch, dtype), context), min_bytes)
        model = copy.deepcopy(source)
        with Engine(model, torch.optim.AdamW(model.parameters()), f"{name}-lean") as engine, engine.forward():
            lean = fp32_results(_loss(job, model, batch, context), min_bytes)
        every, starts = ({op: n - b[op] for op, n in a.items() if n > b[op]} for a, b in zip(lean, normal, strict=True))
        shown = ", ".join(f"{op} {n / 2**20:.3f}" for op, n in sorted(starts.items(), key=lambda item: -item[1]))
        rest = ", ".join(
            f"{op} {n / 2**20:.3f}" for op, n in sorted(every.items(), key=lambda item: -item[1]) if op not in starts
        )
        lines.append(
            f"{case.name} {name}-lean: {sum(every.values()) / 2**20:.3f} MiB of fp32 results beyond pure {name}; "
            f"starts at: {shown or 'nothing'}; flows through: {rest or 'nothing'}"
        )
    return lines
