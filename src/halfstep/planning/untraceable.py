"""What to say when a step cannot run on fake tensors: which part, why, and what is known all the same.

Three things stop a trace: code that looks at a floating-point number inside a tensor (`.item()`, `if loss > 1`), operations
whose result's shape depends on such numbers (`x[x > 0]`), and operations of other libraries that come without a fake
kernel. Integers of the batch may be looked at, as a trace knows them. The model's own part of the memory does not depend on any of them, so it is told.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from halfstep.backends.context import RunContext
from halfstep.errors import HalfstepError, SettingError
from halfstep.jobs.job import Job
from halfstep.planning.sharding import state_bytes
from halfstep.precision.policy import Policy

__all__ = ["PlanError", "explain_failure"]


class PlanError(HalfstepError, RuntimeError):
    """A step that could not be traced; the message says what is known and what is not."""


def explain_failure(job: Job, policy: Policy, error: BaseException) -> HalfstepError:
    """The error to raise for a failed trace."""
    if isinstance(error, SettingError):
        return error
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    return PlanError(f"{_what(causes)} {_known(job, policy)}")


def _what(causes: list[BaseException]) -> str:
    said = str(causes[0]).split("\n")[0]
    for cause in causes:
        operation = getattr(cause, "func", None)
        if isinstance(cause, DataDependentOutputException):
            return (
                f"The step reads a number out of a tensor ({operation}), and a plan knows integers of the batch only: {said}. Keep "
                ".item(), float(tensor) and `if tensor` out of the loss and the model, or measure it: `halfstep train` on a GPU records the peak."
            )
        if isinstance(cause, DynamicOutputShapeException):
            return (
                f"The step has an operation whose result's shape depends on numbers ({operation}), such as nonzero or a boolean "
                f"mask, and not on integers of the batch: {said}. Use torch.where or a weight of 0 instead, or measure it: `halfstep train` on a GPU records the peak."
            )
        if isinstance(cause, UnsupportedOperatorException):
            return (
                f"The operation {operation} has no fake kernel, so its result's shape is not known: {said}. Register one with "
                "torch.library.register_fake, or measure it: `halfstep train` on a GPU records the peak."
            )
    if any("no fake impl" in str(cause) for cause in causes):
        return (
            f"The step has an operation without a fake kernel, so its result's shape is not known: {said.rstrip('.')}. Register one with "
            "torch.library.register_fake, or measure it: `halfstep train` on a GPU records the peak."
        )
    return f"The step could not be run on fake tensors: {said.rstrip('.')}."


def _known(job: Job, policy: Policy) -> str:
    """What the model alone tells."""
    try:
        with torch.device("meta"):
            model = job.call("model", RunContext())
    except Exception:
        return "Nothing could be estimated: the model cannot be built without its numbers either."
    each = state_bytes(policy)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    held = trained * each.total + frozen * each.weights
    apart = f"; the {frozen:,} frozen ones have weights alone, {each.weights:g}" if frozen else ""
    return (
        f"What could be estimated: {trained + frozen:,} parameters hold {held / 2**30:.2f} GiB of weights, master, gradients "
        f"and, with Adam, states in {policy} ({each.total:g} bytes each{apart}). What could not: activations, temporaries and workspaces, "
        "usually the larger part."
    )
