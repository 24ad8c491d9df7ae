"""Versions and machine, for the run file; nothing that identifies a person, a host or a path.

Torch is described only if the program has imported it, because importing it takes seconds.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

from halfstep.hardware.host import read_cpu

__all__ = ["environment"]


def environment() -> dict[str, Any]:
    """Versions of Halfstep, Python and torch, operating system, CPU, and the GPUs if torch is imported."""
    torch = sys.modules.get("torch")
    gpus = []
    if torch is not None and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "halfstep": _version("halfstep"),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "cuda": getattr(getattr(torch, "version", None), "cuda", None),
        "hip": getattr(getattr(torch, "version", None), "hip", None),
        "platform": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": read_cpu().name or platform.processor() or platform.machine(),
        "num_cpus": os.cpu_count(),
        "gpus": gpus,
    }


def _version(package: str) -> str | None:
    loaded = sys.modules.get(package)
    if loaded is not None and hasattr(loaded, "__version__"):
        return str(loaded.__version__)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
