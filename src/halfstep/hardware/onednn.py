"""oneDNN's fallback warnings on a CPU without 16-bit arithmetic, kept off the user's screen.

On such a CPU (an Arm Neoverse-N1, for example) the first 16-bit matrix product of a process raises a UserWarning
that carries about forty lines of C++ frames. Torch then falls back to its own kernels, with correct results, and
`halfstep probe` already reports the format as emulated: the warning has nothing for the user to act on.
"""

from __future__ import annotations

import warnings

__all__ = ["FALLBACK_WARNINGS", "ignore_fallback_warnings"]

# How the messages begin; which one is raised depends on torch's version and on the operation.
FALLBACK_WARNINGS = ("mkldnn_bf16_gemm failed", "mkldnn_matmul failed")


def ignore_fallback_warnings() -> None:
    """Ignore oneDNN's fallback warnings from here on; calling it again changes nothing.

    There is no "already done" switch on purpose: a filter that was set inside `warnings.catch_warnings` is gone after
    that block, and the next caller must be able to set it again.
    """
    for message in FALLBACK_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
