"""Rows of the truth table for a DeepSpeed engine, read from its objects and not from its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from halfstep.backends.deepspeed.library import version
from halfstep.backends.deepspeed.partition import Partition, numel_of
from halfstep.backends.deepspeed.selftest import Reached
from halfstep.precision.formats import format_name

__all__ = ["bare_rows", "engine_rows"]


def engine_rows(engine: Any, partition: Partition, outcome: Reached | None) -> dict[str, str]:
    """The rows of a run that the Engine drives."""
    inner = type(engine.optimizer.optimizer).__name__
    tested = "not compared yet" if outcome is None else f"{outcome}, compared at the first update"
    total = sum(numel_of(p) for p in partition.params.values())
    own = sum(fragment.numel for fragment in partition.fragments.values())
    weights = _formats(partition.params.values())
    return {
        **_common(engine, partition),
        "parameters": f"{weights}; {total:,} trainable, {own:,} of them stepped on this rank",
        "gradients": f"{accumulation_of(engine)}, in partitions",
        "accumulation": f"{accumulation_of(engine)}, by DeepSpeed",
        "step": f"{inner} over partitions by DeepSpeed; scaled, clipped and skipped by Halfstep",
        "first gradient": tested,
    }


def bare_rows(engine: Any, params: Mapping[str, Tensor], partition: Partition | None) -> dict[str, str]:
    """The rows of an engine that someone else built and drives."""
    zero = engine.optimizer
    inner = getattr(zero, "optimizer", zero)
    total = sum(numel_of(p) for p in params.values())
    rows = {
        "parameters": f"{_formats(params.values())}; {total:,} trainable",
        "accumulation": f"{accumulation_of(engine)} over {engine.gradient_accumulation_steps()} micro-batches",
        "loss scale": _loss_scale(engine),
        "clipping": f"{engine.gradient_clipping():g}" if engine.gradient_clipping() > 0 else "none",
        "step": f"{type(inner).__name__} under {type(zero).__name__}",
    }
    if engine.torch_autocast_enabled():
        rows["compute"] = f"torch.autocast in {engine.torch_autocast_dtype()}"
    return {**_common(engine, partition), **rows}


def accumulation_of(engine: Any) -> str:
    """The format in which gradients are added up."""
    zero = engine.optimizer
    own = getattr(zero, "gradient_accumulation_dtype", None) or getattr(zero, "grad_acc_dtype", None)
    return format_name(own or engine.get_data_types()[1])


def _common(engine: Any, partition: Partition | None) -> dict[str, str]:
    size, stage = dist.get_world_size(), int(engine.zero_optimization_stage())
    reduction = getattr(engine.optimizer, "communication_data_type", None) or engine.communication_data_type
    rows = {
        "backend": f"DeepSpeed {version()}, ZeRO stage {stage}, {type(engine.optimizer).__name__}",
        "reduction": f"{format_name(reduction)} over {size} ranks, by DeepSpeed" if size > 1 else "none, one rank",
    }
    if partition is not None:
        inner = engine.optimizer.optimizer
        states = [t for flat in partition.flats for k, t in inner.state.get(flat, {}).items() if k != "step"]
        tensors = [t for t in states if isinstance(t, Tensor)]
        share = f", 1/{size} of them on each rank" if size > 1 else ""
        share += ", on the CPU" if partition.is_offloaded else ""
        rows["master"] = f"{_formats(partition.flats)} copies{share}"
        rows["optimizer states"] = f"{_formats(tensors)}{share}" if tensors else "none yet"
    return rows


def _formats(tensors: Iterable[Tensor]) -> str:
    return ", ".join(dict.fromkeys(format_name(t.dtype) for t in tensors)) or "none"


def _loss_scale(engine: Any) -> str:
    if not engine.fp16_enabled():
        return "torch's GradScaler" if _grad_scaler(engine) is not None else "none"
    return f"{'dynamic' if engine.dynamic_loss_scale() else 'static'}, now {engine.optimizer.loss_scale:g}"


def _grad_scaler(engine: Any) -> Any:
    own = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return own or getattr(engine.optimizer, "torch_autocast_gradscaler", None)
