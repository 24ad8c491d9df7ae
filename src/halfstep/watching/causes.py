"""The sentence and the advice for each cause of a skipped step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from halfstep.hardware.advisories import advisories_for
from halfstep.hardware.installed import this_environment
from halfstep.hardware.probe import Hardware
from halfstep.precision.formats import Format, canonical_name, get_format
from halfstep.watching.autopsy import Autopsy

__all__ = ["explained", "largest_finite", "place_in_words"]

_NEAR = 0.999  # of a format's range: an operand that large may round to inf


def explained(autopsy: Autopsy, hardware: Hardware | None = None) -> Autopsy:
    """The same autopsy with its sentence, advice and known defects."""
    if not autopsy.sentence:
        sentence, advice = _TEXTS[autopsy.cause](autopsy)
        autopsy = dataclasses.replace(autopsy, sentence=sentence, advice=advice)
    if hardware is not None and autopsy.cause in {"forward", "backward", "not reproduced"}:
        autopsy = dataclasses.replace(autopsy, defects=_defects(autopsy, hardware))
    return autopsy


def place_in_words(module: str | None) -> str:
    """Where code ran."""
    if module is None:
        return "the loss function, outside the model"
    return f"module {module}" if module else "the model's own forward"


def largest_finite(dtype: str) -> float | None:
    """The largest finite value of a dtype; None if it is none of a floating-point format."""
    try:
        format = get_format(canonical_name(dtype))  # noqa: A001
    except ValueError:
        return None
    return format.max if isinstance(format, Format) else None


def _data(autopsy: Autopsy) -> tuple[str, str]:
    if autopsy.op == "weight":
        return (
            f"the weight of micro-batch {autopsy.window_index}, backward(weight=...), was {autopsy.value}.",
            "Pass a finite weight of 0 or more, such as a count of tokens. The loss scale is not to blame.",
        )
    shape = "x".join(map(str, autopsy.inputs[0].shape)) if autopsy.inputs else ""
    return (
        f"a tensor of shape {shape} ({autopsy.dtype}) entered {place_in_words(autopsy.module)} with {autopsy.value} in it, in "
        f"{autopsy.op}, micro-batch {autopsy.window_index}. No operation of the step made it: it is data, a target or a constant.",
        "Check the batch: missing values, a division by 0 in the preprocessing, or a number beyond the range of its dtype. "
        "Neither the precision nor the loss scale is to blame.",
    )


def _weights(autopsy: Autopsy) -> tuple[str, str]:
    return (
        f"{autopsy.parameter} ({autopsy.dtype}) contains {autopsy.value}, and {place_in_words(autopsy.module)} uses it in {autopsy.op}.",
        "It was written before this step, and every later step will be skipped too: load the last healthy checkpoint. Usual "
        "causes are a learning rate that is too high, weights edited or loaded outside the Engine, or updates without a finite check.",
    )


def _forward(autopsy: Autopsy) -> tuple[str, str]:
    limit = largest_finite(autopsy.dtype)
    largest = max((each.largest for each in autopsy.inputs if each.finite), default=0.0)
    where = f"{_operation_in_words(autopsy)} in {place_in_words(autopsy.module)}"
    of = f" of {autopsy.parameter}" if autopsy.parameter else ""
    if autopsy.value == "nan":
        masked = any(not each.finite for each in autopsy.inputs)
        inputs = "a row that is masked with -inf everywhere" if masked else f"finite inputs{of}"
        return (
            f"{where} gave NaN from {inputs} in the forward pass ({autopsy.dtype}).",
            _NAN_ADVICE.get(
                autopsy.op, "Look for 0 / 0, log or sqrt of a negative number, or inf - inf inside this operation. "
            )
            + "The loss scale does not act on the forward pass.",
        )
    wider = (
        "Use bf16, whose range is that of fp32, list this module in the policy's fp32 modules, or make its values smaller (a norm, "
        "a smaller initialization, clipping). "
        if limit is not None and limit < 1e6
        else "The numbers exceed even the range of fp32: a diverging run, exp of a large number, or a division by 0. "
    )
    return (
        f"{where} overflowed in the forward pass: inputs{of} up to {largest:.4g} gave {autopsy.value} in {autopsy.dtype}"
        + (f", whose largest number is {limit:.5g}." if limit is not None else "."),
        wider + "The loss scale does not act on the forward pass; lowering it does not help.",
    )


def _operation_in_words(autopsy: Autopsy) -> str:
    return f"the cast to {autopsy.dtype}" if autopsy.op == "_to_copy" else autopsy.op.lstrip("_")


_NAN_ADVICE = {
    "nll_loss_forward": "A mean over no target is NaN: are all targets of this batch equal to ignore_index? ",
    "nll_loss2d_forward": "A mean over no target is NaN: are all targets of this batch equal to ignore_index? ",
    "mean": "A mean over no element is NaN. ",
    "_softmax": "A row that is masked everywhere has no softmax. ",
    "_log_softmax": "A row that is masked everywhere has no softmax. ",
}


def _backward(autopsy: Autopsy) -> tuple[str, str]:
    limit = largest_finite(autopsy.dtype)
    what = "NaN" if autopsy.value == "nan" else f"{autopsy.value} in {autopsy.dtype}"
    of = f" of {autopsy.parameter}" if autopsy.parameter else ""
    where = f"{autopsy.op} in {place_in_words(autopsy.module)} gave {what} for the gradient{of}"
    if autopsy.at_scale_1:
        fits = f", and would fit up to about {autopsy.fitting_scale:g}" if autopsy.fitting_scale is not None else ""
        range_of = f" (largest {autopsy.dtype} number: {limit:.5g})" if limit is not None else ""
        return (
            f"{where} at the loss scale {autopsy.scale:g}{range_of}; without loss scaling the gradients are finite{fits}.",
            "This is what the dynamic loss scale is for: it is lowered and training continues. If it happens often, check "
            "whether the scale grows too fast (growth_interval), or use bf16, which needs none.",
        )
    if autopsy.at_scale_1 is False:
        return (
            f"{where} in the backward pass, and also without loss scaling: the scale {autopsy.scale:g} is not to blame.",
            "The gradient itself leaves the format: look for sqrt or norm at 0, log or division near 0, where() around an invalid branch, "
            "a hook that changes gradients, or use a format with a wider range.",
        )
    return (
        f"{where} in the backward pass; no loss scale was in use.",
        "The gradient itself leaves the format: look for sqrt or norm at 0, log or division near 0, where() around an invalid branch, "
        "or a hook that changes gradients.",
    )


def _not_reproduced(autopsy: Autopsy) -> tuple[str, str]:
    return (
        "the same micro-batches, weights and random numbers gave finite gradients when they were computed again.",
        "What differs from run to run: nondeterministic kernels (Engine(deterministic=True) rules them out), a hook or a loss with "
        "state of its own, gradients edited after unscale(), compiled code (the replay is eager), memory errors. If it comes back on one "
        f"machine only, test its GPU. The loss scale was {autopsy.scale:g}.",
    )


def _not_replayed(_: Autopsy) -> tuple[str, str]:
    return (
        "the step was not computed again.",
        "Pass engine.step(replay=fn), where fn() returns the loss of this micro-batch.",
    )


_TEXTS: dict[str, Callable[[Autopsy], tuple[str, str]]] = {
    "data": _data,
    "weights": _weights,
    "forward": _forward,
    "backward": _backward,
    "not reproduced": _not_reproduced,
    "not replayed": _not_replayed,
}

# Words of an operation's name -> the features of advisories that it uses.
_FEATURES = {
    "attention": ("sdpa", "sdpa_mask", "long_sequence"),
    "conv": ("conv",),
    "layer_norm": ("layer_norm",),
    "rms_norm": ("layer_norm",),
    "group_norm": ("group_norm",),
}


def _defects(autopsy: Autopsy, hardware: Hardware) -> tuple[str, ...]:
    """Known defects of the installed versions that this operation can meet."""
    used = [f for word, names in _FEATURES.items() if word in autopsy.op for f in names]
    if not used:
        return ()
    relevant = advisories_for(this_environment(hardware), {*used, "half_model", "autocast_bf16", "compile"})
    return tuple(
        f"{a.package}: {a.consequence} {a.remedy} {a.threads[0]}" for a in relevant if set(a.features) & set(used)
    )
