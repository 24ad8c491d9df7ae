"""Where a model runs: one device, or many ranks behind the same list of hooks."""

from halfstep.backends.single import SingleDevice

__all__ = ["SingleDevice"]
