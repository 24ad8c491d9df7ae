"""What a command needs beyond the base install, checked before it imports or starts anything."""

from __future__ import annotations

from halfstep.hardware.torch_build import require, require_torch

__all__ = ["require_packages"]


def require_packages(feature: str, *packages: str) -> None:
    """Raise a MissingError with the line that installs it if torch, or a package of the `train` extra, is missing."""
    require_torch(feature)
    for package in packages:
        require(package, feature, "train")
