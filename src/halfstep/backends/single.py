"""One process, one device: every hook as the base class has it."""

from __future__ import annotations

from halfstep.backends.base import Backend

__all__ = ["SingleDevice"]


class SingleDevice(Backend):
    """A run with one process."""

    name = "single"
