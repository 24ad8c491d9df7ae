"""The backend of a run: an object, a name, or what the model shows."""

from __future__ import annotations

from torch import nn

from halfstep.backends.base import Backend
from halfstep.backends.ddp import WrappedDDP, find_ddp
from halfstep.backends.fsdp import FSDP, is_sharded_model
from halfstep.backends.single import SingleDevice
from halfstep.errors import SettingError, unknown

__all__ = ["BACKENDS", "make_backend"]

# What `Engine(backend=...)` accepts by name, in addition to "auto". WrappedDDP is not among them: it needs a model that the
# user has wrapped, which "auto" recognises.
BACKENDS: dict[str, type[Backend]] = {backend.name: backend for backend in (SingleDevice, FSDP)}


_WRAP = "Wrap the model in torch.nn.parallel.DistributedDataParallel and pass that to the Engine"


def make_backend(backend: Backend | str, model: nn.Module) -> Backend:
    """The backend object that `Engine(backend=...)` names; "auto" looks at how the model is wrapped."""
    if isinstance(backend, Backend):
        return backend
    names = ("auto", *BACKENDS)
    if not isinstance(backend, str):
        raise SettingError(f"backend={backend!r} must be a Backend or one of {', '.join(names)}.")
    wrapper = find_ddp(model)
    if backend == "ddp":
        advice = 'Omit backend=: "auto" recognises it' if wrapper is not None else _WRAP
        raise SettingError(f'backend="ddp" is not supported: the Engine does not wrap a model. {advice}.')
    if backend not in names:
        raise unknown("backend", backend, names, advice=f"{_WRAP} to train on several GPUs.")
    if wrapper is None and any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()):
        raise SettingError(
            "A part of the model is in DistributedDataParallel. The Engine supports the wrapper around the whole model only: put the parts "
            "into one module and wrap that, or build one Engine per wrapped part."
        )
    if backend == "auto":
        unwrapped = FSDP() if is_sharded_model(model) else SingleDevice()
        return unwrapped if wrapper is None else WrappedDDP()
    if wrapper is not None:
        raise SettingError(
            f'backend="{backend}", but the model is in DistributedDataParallel. Use backend="auto", or pass model.module.'
        )
    return BACKENDS[backend]()
