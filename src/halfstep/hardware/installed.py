"""The versions of this installation, as advisories compare them."""

from __future__ import annotations

import importlib.metadata
import sys

from halfstep.hardware.advisories import Environment
from halfstep.hardware.advisory_words import PACKAGES
from halfstep.hardware.probe import Hardware
from halfstep.hardware.torch_build import torch_version
from halfstep.hardware.versions import is_version

__all__ = ["cudnn_text", "this_environment"]


def this_environment(hardware: Hardware) -> Environment:
    """The installed packages and this machine's GPU; cuDNN's version is known once torch is imported."""
    versions = {name: _version(name) for name in PACKAGES if name != "cudnn"}
    torch = sys.modules.get("torch")
    number = torch.backends.cudnn.version() if torch is not None and hardware.kind == "cuda" else None
    versions["cudnn"] = cudnn_text(number) if number else None
    return Environment(
        {name: version for name, version in versions.items() if version and is_version(version)},
        hardware.arch,
        hardware.kind,
    )


def cudnn_text(number: int) -> str:
    """The version that `torch.backends.cudnn.version()` encodes: 91900 is 9.19.0, and 8907 is 8.9.7."""
    major, rest = divmod(number, 10000) if number >= 90000 else divmod(number, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _version(package: str) -> str | None:
    if package == "torch":
        return torch_version()
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
