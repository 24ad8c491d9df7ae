"""What a command needs beyond the base install, checked before it imports or starts anything."""

from __future__ import annotations

import importlib.util
import os

from halfstep.errors import SettingError
from halfstep.hardware.torch_build import require, require_torch

__all__ = ["require_one_process", "require_packages"]


def require_packages(feature: str, *packages: str) -> None:
    """Raise a MissingError with the line that installs it if torch, or a package of the `train` extra, is missing.

    Where torch is installed it is imported last, because without numpy its import prints a warning. Where it is not, the
    message is about torch, because the `torch` extra includes the other packages.
    """
    if _is_installed("torch"):
        for package in packages:
            require(package, feature, "train")
    require_torch(feature)


def require_one_process(feature: str) -> None:
    """Raise if torchrun, or another launcher that sets WORLD_SIZE, started several processes of this command."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        raise SettingError(
            f"{feature} runs in one process, and WORLD_SIZE={size}: every process would train its own copy of the model and "
            "write to the same files. Start it without torchrun; for several GPUs, use halfstep.Engine in your own script with "
            "a model in DistributedDataParallel."
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a finder that rejects the name, or a module without a spec
        return False
