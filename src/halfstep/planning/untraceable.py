"""The error when a step cannot run on fake tensors: which part, why, and what is known nevertheless.

Three things stop a trace: code that reads floating-point values out of a tensor (`.item()`, `if loss > 1`), operations whose
output shape depends on such values (`x[x > 0]`), and operations of other libraries without a fake kernel. Integers of the
batch may be read, because a trace has their values. Model state does not depend on any of this, so it is reported.
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
from halfstep.hardware.units import bytes_text
from halfstep.jobs.job import Job
from halfstep.planning.sharding import state_bytes
from halfstep.precision.policy import Policy

__all__ = ["PlanError", "explain_failure"]


class PlanError(HalfstepError, RuntimeError):
    """A step that could not be traced; the message lists what is known and what is not."""


def explain_failure(job: Job, policy: Policy, error: BaseException) -> HalfstepError:
    """The error to raise for a failed trace."""
    if isinstance(error, SettingError):
        return error
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    return PlanError(f"{_reason(causes)} {_model_state(job, policy)}")


def _reason(causes: list[BaseException]) -> str:
    message = str(causes[0]).split("\n")[0] or type(causes[0]).__name__
    for cause in causes:
        operation = getattr(cause, "func", None)
        if isinstance(cause, DataDependentOutputException):
            return (
                f"The step reads a value out of a tensor ({operation}), and a plan only has the values of the batch's integers: {message}. "
                "Keep .item(), float(tensor) and `if tensor` out of the loss and the model, or measure the step: `halfstep train` on a GPU records the peak."
            )
        if isinstance(cause, DynamicOutputShapeException):
            return (
                f"The step has an operation whose output shape depends on tensor values ({operation}), such as nonzero or a boolean "
                f"mask, and not on the batch's integers: {message}. Use torch.where or a weight of 0 instead, or measure the step: `halfstep train` on a GPU records the peak."
            )
        if isinstance(cause, UnsupportedOperatorException):
            return (
                f"The operation {operation} has no fake kernel, so its output shape is unknown: {message}. Register one with "
                "torch.library.register_fake, or measure the step: `halfstep train` on a GPU records the peak."
            )
    if any("no fake impl" in str(cause) for cause in causes):
        return (
            f"The step has an operation without a fake kernel, so its output shape is unknown: {message.rstrip('.')}. Register one with "
            "torch.library.register_fake, or measure the step: `halfstep train` on a GPU records the peak."
        )
    return f"The step cannot run on fake tensors: {message.rstrip('.')}."


def _model_state(job: Job, policy: Policy) -> str:
    """What follows from the model alone."""
    try:
        with torch.device("meta"):
            model = job.call("model", RunContext())
    except Exception:
        return "Nothing could be estimated: the model cannot be built on the meta device either."
    each = state_bytes(policy)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    total = trained * each.total + frozen * each.weights
    frozen_note = f"; the {frozen:,} frozen ones have only weights, {each.weights:g}" if frozen else ""
    return (
        f"Estimated: {trained + frozen:,} parameters need {bytes_text(total)} for weights, master, gradients and, with Adam, "
        f"states in {policy} ({each.total:g} bytes each{frozen_note}). Not estimated: activations, temporaries and workspaces, "
        "usually the larger part."
    )
