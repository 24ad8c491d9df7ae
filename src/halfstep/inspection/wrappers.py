"""The model and the optimizers inside the wrappers of torch, Accelerate, Lightning, DeepSpeed and Halfstep's Engine.

Wrappers are recognised by class name, so that no library is imported to look for its objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep.backends.wrapped import find_ddp
from halfstep.checkpoint.names import clean_names
from halfstep.engine.engine import Engine
from halfstep.engine.members import as_module
from halfstep.errors import SettingError
from halfstep.hardware.units import few

__all__ = ["Parts", "optimizer_chain", "parts_of"]

# Class name -> the attribute that stores what is inside.
_MODELS = {
    "DeepSpeedEngine": "module",
    "_FabricModule": "_forward_module",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
_INNER_OPTIMIZERS = ("optimizer", "_optimizer", "base_optimizer")


@dataclass(frozen=True)
class Parts:
    """What a training loop consists of."""

    model: nn.Module  # as it is called
    module: nn.Module  # without wrappers
    params: Mapping[str, Tensor]  # by the model's own names, tied ones once
    buffers: Mapping[str, Tensor]
    optimizers: tuple[Any, ...]  # as the loop has them
    scaler: Any = None
    ema: Any = None
    has_ema: bool = False  # whether it is known that there is an EMA or none
    wrappers: tuple[str, ...] = ()
    deepspeed: Any = None  # the DeepSpeed engine
    micro_batches: int | None = None  # of a step, where an engine decides
    is_compiled: bool = False
    ddp: nn.parallel.DistributedDataParallel | None = None

    def name_of(self) -> dict[int, str]:
        """Names of parameters by identity."""
        return {id(param): name for name, param in self.params.items()}


def parts_of(model: Any, optimizer: Any, scaler: Any, ema: Any) -> Parts:
    """Unwrap what `inspect` was given; of an Engine or a DeepSpeed engine, its own optimizer is used."""
    has_ema = ema is not None
    driven, micro_batches = None, None  # DeepSpeed's engine under Halfstep's
    is_engine = isinstance(model, Engine)
    if isinstance(model, Engine):
        engine, model = model, model._run.module  # noqa: SLF001 - as its truth table does
        driven, micro_batches = getattr(engine.backend, "engine", None), engine.accumulate
        optimizer = driven.optimizer if driven is not None else engine.optimizers if optimizer is None else optimizer
        scaler = engine.scaler if scaler is None else scaler
        ema, has_ema = (engine.ema, True) if ema is None else (ema, True)
    elif not isinstance(model, nn.Module) and not _has_class(model, "DeepSpeedEngine"):
        model = as_module(model)
    module, wrappers, deepspeed = _unwrap(model)
    deepspeed = deepspeed if driven is None else driven
    if deepspeed is not None:
        optimizer = deepspeed.optimizer if optimizer is None else optimizer
        micro_batches = deepspeed.gradient_accumulation_steps() if driven is None else micro_batches
    optimizers = _as_tuple(optimizer)
    for each in optimizers:
        if not hasattr(each, "param_groups"):
            raise SettingError(
                f"inspect() takes a torch optimizer or a list of them, not {type(each).__name__}. The loss scaler is the third argument."
            )
    lazy = [name for name, param in module.named_parameters() if is_lazy(param)]
    if lazy:
        raise SettingError(f"The shapes of {few(lazy)} are not known yet: run one forward before inspect().")
    names = clean_names(module, dict(module.named_parameters()))
    return Parts(
        model=model,
        module=module,
        params={names[name]: param for name, param in module.named_parameters()},
        buffers=dict(module.named_buffers()),
        optimizers=optimizers,
        scaler=scaler,
        ema=ema,
        has_ema=has_ema,
        wrappers=("halfstep.Engine", *wrappers) if is_engine else wrappers,
        deepspeed=deepspeed,
        micro_batches=micro_batches,
        is_compiled=any(_is_compiled(each) for each in model.modules()),
        ddp=find_ddp(model) if isinstance(model, nn.Module) else None,
    )


def optimizer_chain(optimizer: Any) -> Iterator[Any]:
    """An optimizer and those that it wraps, outermost first."""
    pending, visited = [optimizer], set()
    while pending:
        each = pending.pop(0)
        if id(each) not in visited and hasattr(each, "param_groups"):
            visited.add(id(each))
            yield each
            own = getattr(each, "__dict__", {})
            pending += [own[name] for name in _INNER_OPTIMIZERS if name in own]


def _unwrap(model: Any) -> tuple[nn.Module, tuple[str, ...], Any]:
    wrappers: list[str] = []
    deepspeed = None
    while True:
        level = next((name for name in _MODELS if _has_class(model, name)), None)
        inner = None if level is None else getattr(model, _MODELS[level], None)
        if level is None or inner is None:
            return model, tuple(wrappers), deepspeed
        wrappers.append("torch.compile" if level == "OptimizedModule" else level.lstrip("_"))
        deepspeed = model if level == "DeepSpeedEngine" else deepspeed
        model = inner


def _has_class(value: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(value).__mro__)


def _is_compiled(module: nn.Module) -> bool:
    return _has_class(module, "OptimizedModule") or getattr(module, "_compiled_call_impl", None) is not None


def _as_tuple(optimizer: Any) -> tuple[Any, ...]:
    if optimizer is None:
        return ()
    several = isinstance(optimizer, Sequence) and not isinstance(optimizer, torch.optim.Optimizer)
    return tuple(optimizer) if several else (optimizer,)
