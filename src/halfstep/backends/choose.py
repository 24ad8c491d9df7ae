"""The backend of a run: an object, a name, or what the model shows."""

from __future__ import annotations

from torch import nn

from halfstep.backends.base import Backend
from halfstep.backends.ddp import WrappedDDP, find_ddp
from halfstep.backends.single import SingleDevice
from halfstep.errors import SettingError, unknown

__all__ = ["NAMES", "make_backend"]

NAMES = ("auto", "single")


def make_backend(backend: Backend | str, model: nn.Module) -> Backend:
    """The backend object that `Engine(backend=...)` names; "auto" looks at how the model is wrapped."""
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        raise SettingError(f"backend={backend!r} must be a Backend or one of {', '.join(NAMES)}.")
    wrapper = find_ddp(model)
    if backend == "single":
        if wrapper is not None:
            raise SettingError(
                'backend="single", but the model is in DistributedDataParallel. Use backend="auto", or pass model.module.'
            )
        return SingleDevice()
    if backend != "auto":
        raise unknown("backend", backend, NAMES)
    return SingleDevice() if wrapper is None else WrappedDDP()
