"""`Engine(deterministic=True)`: torch's deterministic algorithms, until the Engine is closed."""

from __future__ import annotations

import contextlib

from halfstep.hardware.torch_build import require_torch

__all__ = ["make_deterministic"]


def make_deterministic(undo: contextlib.ExitStack) -> None:
    """Ask torch for deterministic algorithms; `undo` restores what was set before."""
    torch = require_torch("deterministic=True")
    undo.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
    undo.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
