"""Whether the Triton kernels can run on a device; the torch references can always."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

__all__ = ["triton_runs_on"]


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def triton_runs_on(device: torch.device) -> bool:
    """True for a GPU with Triton installed, and for the CPU when Triton's interpreter was switched on before the import."""
    if not _installed():
        return False
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
