"""Imports torch, with one error message for when it is missing.

Torch is an extra of Halfstep, because people who train already have the build their hardware needs and pip
must not replace it. Every feature that needs torch imports it here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import Any

from halfstep.errors import MissingError

__all__ = ["require", "require_torch", "torch_version"]

_INSTALL = (
    "Install the build for your hardware as torch's own site describes, or use the default one: "
    'pip install "halfstep[torch]"'
)


def require_torch(feature: str) -> Any:
    """The torch module, or a `MissingError` with the feature that needs it and how to install it."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise MissingError(_broken(feature, error)) from error
        raise MissingError(f"{feature} needs torch, which is not installed. {_INSTALL}.") from error
    except (ImportError, OSError) as error:  # OSError: a shared library of the build is missing
        raise MissingError(_broken(feature, error)) from error


def require(name: str, feature: str, extra: str) -> Any:
    """The package `name`, or an error with the line that installs the extra it comes with."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        problem = (
            "is not installed"
            if isinstance(error, ModuleNotFoundError) and error.name == name
            else f"cannot be imported ({error})"
        )
        raise MissingError(f'{feature} needs {name}, which {problem}. Run: pip install "halfstep[{extra}]"') from error


def torch_version() -> str | None:
    """The version of the installed torch, such as "2.13.0+cpu", or None; torch itself is not imported."""
    if "torch" in sys.modules:  # more precise: the packaged version may omit "+cu130"
        return str(sys.modules["torch"].__version__)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _broken(feature: str, error: Exception) -> str:
    return (
        f"{feature} needs torch, which is installed (version {torch_version() or 'unknown'}) but cannot be imported: "
        f"{error}. Reinstall it. {_INSTALL}."
    )
