"""The backend of a run: an object, a name, or what the model shows."""

from __future__ import annotations

from torch import nn

from halfstep.backends.base import Backend
from halfstep.backends.ddp import WrappedDDP, find_ddp
from halfstep.backends.single import SingleDevice
from halfstep.errors import SettingError, unknown

__all__ = ["BACKENDS", "make_backend"]

# What `Engine(backend=...)` accepts by name, in addition to "auto". WrappedDDP is not among them: it needs a model that the
# user has wrapped, which "auto" recognises.
BACKENDS: dict[str, type[Backend]] = {backend.name: backend for backend in (SingleDevice,)}


def make_backend(backend: Backend | str, model: nn.Module) -> Backend:
    """The backend object that `Engine(backend=...)` names; "auto" looks at how the model is wrapped."""
    if isinstance(backend, Backend):
        return backend
    names = ("auto", *BACKENDS)
    if not isinstance(backend, str):
        raise SettingError(f"backend={backend!r} must be a Backend or one of {', '.join(names)}.")
    if backend not in names:
        raise unknown("backend", backend, names)
    wrapper = find_ddp(model)
    if backend == "auto":
        return SingleDevice() if wrapper is None else WrappedDDP()
    if wrapper is not None:
        raise SettingError(
            f'backend="{backend}", but the model is in DistributedDataParallel. Use backend="auto", or pass model.module.'
        )
    return BACKENDS[backend]()
