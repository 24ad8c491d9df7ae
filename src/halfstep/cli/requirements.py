"""What a command needs beyond the base install, checked before it imports or starts anything."""

from __future__ import annotations

import importlib.util

from halfstep.hardware.torch_build import require, require_torch

__all__ = ["require_packages"]


def require_packages(feature: str, *packages: str) -> None:
    """Raise a MissingError with the line that installs it if torch, or a package of the `train` extra, is missing.

    Where torch is installed it is imported last, because without numpy its import prints a warning. Where it is not, the
    message is about torch, because the `torch` extra includes the other packages.
    """
    if _is_installed("torch"):
        for package in packages:
            require(package, feature, "train")
    require_torch(feature)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a finder that rejects the name, or a module without a spec
        return False
