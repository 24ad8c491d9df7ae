"""The tensors of an EMA, whoever keeps it: torch, diffusers, timm, Halfstep, a module or a dictionary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from halfstep.checkpoint.names import clean_names
from halfstep.errors import SettingError
from halfstep.inspection.facts import Fact, fact_of, unknown_fact
from halfstep.inspection.storage import bytes_of
from halfstep.inspection.wrappers import Parts
from halfstep.precision.formats import format_name

__all__ = ["ema_fact"]

# Where libraries store the copies: halfstep.engine.ema.Ema; diffusers, torch_ema; timm, torch's AveragedModel; ema_pytorch; timm's first ModelEma.
_ATTRIBUTES = ("averages", "shadow_params", "module", "ema_model", "shadow", "ema")


def ema_fact(parts: Parts) -> Fact:
    """The formats of an EMA's copies."""
    if parts.ema is None:
        if parts.has_ema:
            return fact_of("ema", ())
        return unknown_fact("ema", "pass the EMA to inspect(..., ema=...).")
    names = [name for name, param in parts.params.items() if param.requires_grad]
    copies = _copies(parts.ema, names)
    entries = [(name, format_name(copy.dtype), copy.numel()) for name, copy in copies.items()]
    return fact_of("ema", entries, num_bytes=sum(map(bytes_of, copies.values())))


def _copies(ema: Any, names: Sequence[str]) -> dict[str, Tensor]:
    if isinstance(ema, Mapping):
        return {str(name): value for name, value in ema.items() if _is_floating(value)}
    if isinstance(ema, list | tuple):
        tensors = [value for value in ema if _is_floating(value)]
        known = names if len(names) == len(tensors) else [str(i) for i in range(len(tensors))]
        return dict(zip(known, tensors, strict=True))
    if isinstance(ema, nn.Module) and not _keeps_copies(ema):
        return _of_module(ema)
    for attribute in _ATTRIBUTES:
        inner = getattr(ema, attribute, None)
        if isinstance(inner, nn.Module):
            return _of_module(inner)
        if isinstance(inner, Mapping | list | tuple):
            return _copies(inner, names)
    if isinstance(ema, nn.Module):
        return _of_module(ema)
    raise SettingError(
        f"inspect(ema=...) does not know where {type(ema).__name__} stores its copies. Pass its module, or a dictionary or a list of its tensors."
    )


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _keeps_copies(module: nn.Module) -> bool:
    """Whether a module is the wrapper of an EMA, and not the averaged model itself, which may have a submodule of any name."""
    return any(kind.__name__ == "AveragedModel" or "ema" in kind.__name__.lower() for kind in type(module).__mro__)


def _of_module(module: nn.Module) -> dict[str, Tensor]:
    names = clean_names(module, dict(module.named_parameters()))
    return {names[name]: param for name, param in module.named_parameters() if param.is_floating_point()}
