"""The versions of each library that the integrations are tested with; others work if the library has not changed, and are reported."""

from __future__ import annotations

import importlib.metadata

from halfstep.events import log_warning
from halfstep.hardware.versions import is_version, matches

__all__ = ["TESTED", "warn_if_untested"]

TESTED = {
    "accelerate": ">=1.10,<2",
    "lightning": ">=2.5,<3",
    "mlflow-skinny": ">=3,<4",
    "trackio": ">=0.20,<1",
    "transformers": ">=5,<6",
    "wandb": ">=0.20,<1",
}
_warned: set[str] = set()


def warn_if_untested(package: str) -> None:
    """Log a warning, once, if the installed version is outside of what the tests cover."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return  # installed in another way, or under another name
    if package in _warned or (is_version(version) and matches(version, TESTED[package])):
        return
    _warned.add(package)
    log_warning(
        f"{package} {version} is outside of the versions that Halfstep's integration is tested with ({TESTED[package]}). It is used as it is."
    )
