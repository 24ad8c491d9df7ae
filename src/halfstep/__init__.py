"""Mixed-precision training for PyTorch that tells you the truth.

Everything public is here and is loaded when first touched, so that `import halfstep` stays cheap and
needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module that defines it; one line per public name.
_HOME = {
    "Choice": "choice",
    "Comparison": "comparison",
    "Engine": "engine",
    "Format": "formats",
    "GradScaler": "gradscaler",
    "HalfstepError": "errors",
    "Hardware": "hardware",
    "Job": "job",
    "LossScale": "lossscale",
    "LossScaler": "scaler",
    "NoScaler": "scaler",
    "Policy": "policy",
    "StaticScaler": "scaler",
    "StepResult": "result",
    "check_path": "check",
    "choose": "choice",
    "compare": "comparison",
    "find_batch_size": "planning",
    "get_format": "formats",
    "plan": "planning",
    "probe": "hardware",
    "set_tf32": "tf32",
}

_SUBPACKAGES = ("optim",)

__all__ = ["__version__", *sorted((*_HOME, *_SUBPACKAGES))]  # noqa: PLE0604 - a test holds this against reality

if TYPE_CHECKING:
    from halfstep import optim as optim
    from halfstep.check import check_path
    from halfstep.choice import Choice, choose
    from halfstep.comparison import Comparison, compare
    from halfstep.engine import Engine
    from halfstep.errors import HalfstepError
    from halfstep.formats import Format, get_format
    from halfstep.gradscaler import GradScaler
    from halfstep.hardware import Hardware, probe
    from halfstep.job import Job
    from halfstep.lossscale import LossScale
    from halfstep.planning import find_batch_size, plan
    from halfstep.policy import Policy
    from halfstep.result import StepResult
    from halfstep.scaler import LossScaler, NoScaler, StaticScaler
    from halfstep.tf32 import set_tf32


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"halfstep.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"halfstep.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
