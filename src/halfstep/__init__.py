"""Mixed-precision training for PyTorch that shows what actually runs.

Everything public is here and is loaded when first touched, so that `import halfstep` stays cheap and
needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module that defines it; one line per public name.
_HOME = {
    "Choice": "precision.choice",
    "Comparison": "comparison",
    "Engine": "engine.engine",
    "ExpectationError": "errors",
    "Format": "precision.formats",
    "GradScaler": "scaling.gradscaler",
    "Guard": "watching.guard",
    "HalfstepError": "errors",
    "Hardware": "hardware.probe",
    "Job": "jobs.job",
    "LossScale": "precision.loss_scale",
    "LossScaler": "scaling.scaler",
    "NoScaler": "scaling.scaler",
    "OverflowStop": "errors",
    "Policy": "precision.policy",
    "StaticScaler": "scaling.scaler",
    "StepResult": "engine.result",
    "Watch": "watching.watch",
    "check_path": "check",
    "choose": "precision.choice",
    "compare": "comparison",
    "find_batch_size": "planning",
    "get_format": "precision.formats",
    "inspect": "inspection.inspector",
    "plan": "planning",
    "probe": "hardware.probe",
    "set_tf32": "hardware.tf32",
}

_SUBMODULES = ("data", "models", "optim")

__all__ = ["__version__", *sorted((*_HOME, *_SUBMODULES))]  # noqa: PLE0604 - a test compares this with reality

if TYPE_CHECKING:
    from halfstep import data as data
    from halfstep import models as models
    from halfstep import optim as optim
    from halfstep.check import check_path
    from halfstep.comparison import Comparison, compare
    from halfstep.engine.engine import Engine
    from halfstep.engine.result import StepResult
    from halfstep.errors import ExpectationError, HalfstepError, OverflowStop
    from halfstep.hardware.probe import Hardware, probe
    from halfstep.hardware.tf32 import set_tf32
    from halfstep.inspection.inspector import inspect
    from halfstep.jobs.job import Job
    from halfstep.planning import find_batch_size, plan
    from halfstep.precision.choice import Choice, choose
    from halfstep.precision.formats import Format, get_format
    from halfstep.precision.loss_scale import LossScale
    from halfstep.precision.policy import Policy
    from halfstep.scaling.gradscaler import GradScaler
    from halfstep.scaling.scaler import LossScaler, NoScaler, StaticScaler
    from halfstep.watching.guard import Guard
    from halfstep.watching.watch import Watch


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"halfstep.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"halfstep.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
