"""The sentence and the advice for each cause of a skipped step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from halfstep.hardware.advisories import advisories_for
from halfstep.hardware.installed import this_environment
from halfstep.hardware.probe import Hardware
from halfstep.precision.formats import Format, canonical_name, get_format
from halfstep.watching.autopsy import Autopsy
from halfstep.watching.forward_trace import CONSTANTS

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
        return "the loss function (outside the model)"
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
    first = autopsy.inputs[0] if autopsy.inputs else None
    tensor = "" if first is None else f" ({'x'.join(map(str, first.shape)) or 'a scalar'}, {first.dtype})"
    return (
        f"a tensor{tensor} with {_value_in_words(autopsy)} in it entered {place_in_words(autopsy.module)}, where "
        f"{_operation_in_words(autopsy)} uses it, in micro-batch {autopsy.window_index}. No operation of the step computed it: it is "
        "data, a target or a constant.",
        "Check the batch: missing values, a division by 0 in the preprocessing, or a number beyond the range of its dtype. "
        "Neither the precision nor the loss scale is to blame.",
    )


def _weights(autopsy: Autopsy) -> tuple[str, str]:
    return (
        f"{autopsy.parameter} ({autopsy.dtype}) contains {_value_in_words(autopsy)}, and {place_in_words(autopsy.module)} uses it in "
        f"{_operation_in_words(autopsy)}.",
        "It was written before this step, and every later step will be skipped too: load the last healthy checkpoint. Usual "
        "causes are a learning rate that is too high, weights edited or loaded outside the Engine, or updates without a finite check.",
    )


def _forward(autopsy: Autopsy) -> tuple[str, str]:
    limit = largest_finite(autopsy.dtype)
    largest = max((each.largest for each in autopsy.inputs if each.finite), default=0.0)
    operation = _operation_in_words(autopsy)
    where = f"{operation} in {place_in_words(autopsy.module)}"
    of = f" of {autopsy.parameter}" if autopsy.parameter else ""
    value, masked = _value_in_words(autopsy), "softmax" in autopsy.op or "attention" in autopsy.op
    if autopsy.op in CONSTANTS or (not masked and any(not each.finite for each in autopsy.inputs)):
        return (
            f"{where} put {value} into the forward pass ({autopsy.dtype}): a constant of the code, not the result of a computation.",
            "Look for float('nan'), float('inf') or torch.inf in the code of this module or in a hook on it. "
            + _NOT_THE_SCALE,
        )
    if autopsy.value == "nan":
        inputs = f"finite inputs{of}"
        if any(not each.finite for each in autopsy.inputs):
            inputs = "a row that is masked with -inf everywhere"
        advice = "Look for 0 / 0, log or sqrt of a negative number, or inf - inf inside this operation. "
        return (
            f"{where} gave NaN from {inputs} in the forward pass ({autopsy.dtype}).",
            _NAN_ADVICE.get(operation, advice) + _NOT_THE_SCALE,
        )
    if operation in _INF_ADVICE and limit is not None and largest < limit / 2:
        ranges = (
            f" from inputs{of} in [{min(r.low for r in autopsy.inputs):.4g}, {max(r.high for r in autopsy.inputs):.4g}]"
        )
        return (
            f"{where} gave {value}{ranges} in the forward pass ({autopsy.dtype}).",
            _INF_ADVICE[operation] + _NOT_THE_SCALE,
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
        wider + _NOT_THE_SCALE,
    )


def _operation_in_words(autopsy: Autopsy) -> str:
    if autopsy.op == "_to_copy":
        return f"the cast to {autopsy.dtype}"
    before, hook, after = autopsy.op.rpartition("before ")
    operation, is_backward, _ = after.partition(" (backward)")
    operation = {"to_copy": "a cast", "accumulate_grad": "the accumulation"}.get(operation, operation)
    words = "a backward hook" if operation == "backward_hook_function" else f"the backward pass of {operation}"
    words = operation if operation == "the accumulation" else words
    return f"{before}{hook}{words}" if is_backward else autopsy.op.strip("_")


def _value_in_words(autopsy: Autopsy) -> str:
    return "NaN" if autopsy.value == "nan" else autopsy.value


_NOT_THE_SCALE = "The loss scale does not act on the forward pass, so lowering it does not help."
_ZERO = "A denominator was 0: add an eps to it, or clamp it. A mean over a mask divides by 0 if nothing is selected. "
_INF_ADVICE = {
    **dict.fromkeys(("div", "reciprocal", "rsqrt", "pow"), _ZERO),
    **dict.fromkeys(("log", "log2", "log10", "log1p"), "The logarithm of 0 is -inf: add an eps, or clamp its input. "),
    "exp": "exp leaves the format for inputs above 88 in fp32 and bf16, and above 11 in fp16: subtract the maximum, as softmax and logsumexp do. ",
}
_MASKED = "softmax over no element is NaN: is every position of a row masked, such as a sample of padding only? "
_NAN_ADVICE = {
    "nll_loss_forward": "A mean over no target is NaN: are all targets of this batch equal to ignore_index? ",
    "nll_loss2d_forward": "A mean over no target is NaN: are all targets of this batch equal to ignore_index? ",
    "mean": "A mean over no element is NaN. ",
    "div": "A mean over a mask is 0 / 0 if nothing is selected: add an eps to the denominator, or clamp it. ",
    "softmax": _MASKED,
    "log_softmax": _MASKED,
}


def _backward(autopsy: Autopsy) -> tuple[str, str]:
    limit = largest_finite(autopsy.dtype)
    what = "NaN" if autopsy.value == "nan" else f"{autopsy.value} in {autopsy.dtype}"
    of = f" of {autopsy.parameter}" if autopsy.parameter else ""
    where = f"{_operation_in_words(autopsy)} in {place_in_words(autopsy.module)} gave {what} for the gradient{of}"
    if autopsy.at_scale_1:
        fits = (
            f", and a scale of up to about {autopsy.fitting_scale:g} would fit"
            if autopsy.fitting_scale is not None
            else ""
        )
        range_of = f" (largest {autopsy.dtype} number: {limit:.5g})" if limit is not None else ""
        return (
            f"{where} at the loss scale {autopsy.scale:g}{range_of}; without loss scaling the gradients are finite{fits}.",
            "This is what the dynamic loss scale is for: it is lowered and training continues. If it happens often, check "
            "whether the scale grows too fast (growth_interval), or use bf16, which needs none.",
        )
    if autopsy.at_scale_1 is False:
        return (
            f"{where}, and also without loss scaling: the scale {autopsy.scale:g} is not to blame.",
            "The gradient itself leaves the format: look for sqrt or norm at 0, log or division near 0, where() around an invalid branch, "
            "a hook that changes gradients, or use a format with a wider range.",
        )
    return (
        f"{where}; no loss scale was in use.",
        "The gradient itself leaves the format: look for sqrt or norm at 0, log or division near 0, where() around an invalid branch, "
        "or a hook that changes gradients.",
    )


def _not_reproduced(autopsy: Autopsy) -> tuple[str, str]:
    return (
        "the same micro-batches, weights and random numbers gave finite gradients when they were computed again.",
        "What differs from run to run: nondeterministic kernels (Engine(deterministic=True) rules them out), a hook or a loss with "
        "state of its own, gradients edited after unscale(), buffers edited through .data between micro-batches, compiled code (the replay is "
        "eager), memory errors. If it comes back on one "
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
