"""Rows about any mixed-precision loop: each mistake of the lesson fails its own row, by what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halfstep.check.finding import Finding
from halfstep.hardware.units import count_text
from halfstep.learning.practice.record import Row, Run, Step

__all__ = ["LOOP_RULES", "check_row", "loop_rows", "mean_ratio", "run_row", "scaled_row"]

# Errors of `halfstep check` that are mistakes of the loop itself, whatever the rest of the script tries out.
LOOP_RULES = frozenset(
    {"HS101", "HS102", "HS103", "HS104", "HS105", "HS106", "HS107", "HS108", "HS109", "HS112", "HS114", "HS118", "HS123",
     "HS125", "HS160"}
)  # fmt: skip
_NEAR = 0.02  # relative
# Part of torch's message -> what to do.
_REMEDIES = {
    "step() has already been called since the last update()": "Call scaler.update() after every scaler.step(optimizer).",
    "unscale_() has already been called": "Call scaler.unscale_(optimizer) once per step, and scaler.update() at its end.",
    "unscale_() is being called after step()": "Call scaler.unscale_(optimizer) before scaler.step(optimizer).",
    "No inf checks were recorded": "Call scaler.step(optimizer), or scaler.unscale_(optimizer), before scaler.update().",
    "Attempting to unscale FP16 gradients": "Keep the weights in fp32: remove .half(), autocast casts them for each product.",
    "Attempted step": "Call scaler.scale(loss).backward() before scaler.step(optimizer).",
    "Attempted unscale_": "Call scaler.scale(loss).backward() before scaler.unscale_(optimizer).",
    "Device should be GPU": "The grader runs on the CPU, where Lightning has no fp16: write the loop yourself, as in the starter file.",
    "Attempted update": "Call scaler.scale(loss).backward() and scaler.step(optimizer) before scaler.update().",
}


def run_row(run: Run, advice: str = "") -> Row:
    """Whether the script ran to its end."""
    where = f" (line {run.line})" if run.line else ""
    measured, to_do = "it did", ""
    match run.ended:
        case "error":
            measured = f"{run.error}{where}"
            to_do = next((text for part, text in _REMEDIES.items() if part in run.error), "")
            to_do = (
                to_do
                or advice
                or "Correct the error; the script runs on the CPU, in an empty directory, without input."
            )
        case "exit" if run.exit_code:
            measured = f"it ended with exit code {run.exit_code}{': ' + run.error if run.error else ''}"
            to_do = "Let the script run without arguments and end with exit code 0."
        case "timeout":
            measured, to_do = (
                run.error,
                "Check that its loops end; use a smaller model or fewer steps, or pass a larger --seconds.",
            )
        case "died" | "not run":
            measured, to_do = run.error or "it did not start", "Run the script with python and look at its output."
    return Row("run", "the script runs to its end", measured, run.fine, "" if run.fine else to_do)


def check_row(findings: Sequence[Finding], failing: frozenset[str]) -> Row:
    """What `halfstep check` finds in the script; only mistakes in `failing` fail."""
    mistakes = [f for f in findings if f.code in failing]
    others = sorted({f.code for f in findings} - {f.code for f in mistakes})
    measured = "; ".join(f"{f.code} {f.name}, line {f.line}" for f in mistakes) or "no mistake in the loop"
    if others:
        measured += f" (also reported: {', '.join(others)})"
    to_do = "; ".join(f.instead or f.message for f in mistakes)
    return Row("check", "halfstep check finds no mistake in the loop", measured, not mistakes, to_do)


def loop_rows(run: Run, formats: tuple[str, ...], *, scaler: bool) -> list[Row]:
    """Rows about the steps that computed in 16 bits; `scaler`: whether a loss scale is part of the task."""
    steps = [step for step in run.steps if run.compute_of(step) in formats]
    if not steps and not run.fine and any(b.compute in formats for b in run.backwards):
        return _interrupted_rows(run, formats, scaler=scaler)
    rows = [_mixed_row(run, steps, formats)]
    if not steps:
        return rows
    rows.append(_weights_row(steps))
    rows.append(_autocast_row(run, formats))
    scaled = scaled_row(run, steps, scaler=scaler)
    rows.append(scaled)
    if scaled.passed and (gradient := _gradient_row(run, steps)):
        rows.append(gradient)
    if any(step.via_scaler for step in steps) and run.fine:
        rows.append(_update_row(run))
    return rows


def _interrupted_rows(run: Run, formats: tuple[str, ...], *, scaler: bool) -> list[Row]:
    """Rows about backward passes in 16 bits, none of which was followed by a step because the script failed before."""
    backwards = [b for b in run.backwards if b.compute in formats]
    wanted = " or ".join(formats)
    passes = count_text(len(backwards), "backward pass", "backward passes")
    rows = [Row("autocast", f"training steps compute in {wanted}", passes, True), _autocast_row(run, formats)]
    bare = sum(not b.scaled and (scaler or b.compute == "fp16") for b in backwards)
    to_do = "Create a GradScaler, and write scaler.scale(loss).backward() instead of loss.backward()."
    measured = f"{bare} of {passes} without a loss scale" if bare else passes
    return [*rows, Row("scaled-loss", "backward runs on scaler.scale(loss)", measured, not bare, to_do if bare else "")]


def _mixed_row(run: Run, steps: Sequence[Step], formats: tuple[str, ...]) -> Row:
    wanted = " or ".join(formats)
    other = sorted({run.compute_of(step) for step in run.steps})
    measured = f"{count_text(len(steps), 'step')} in {', '.join(sorted({run.compute_of(s) for s in steps}))}"
    if not steps:
        measured = f"{count_text(len(run.steps), 'step')}{' in ' + ', '.join(other) if other else ''}, none in {wanted}"
    to_do = (
        f'Compute the forward pass under autocast(device_type="cuda", dtype=...) in {wanted}, and step the optimizer.'
    )
    return Row("autocast", f"training steps compute in {wanted}", measured, bool(steps), "" if steps else to_do)


def _weights_row(steps: Sequence[Step]) -> Row:
    dtypes = sorted({step.weights for step in steps})
    good = dtypes == ["fp32"]
    to_do = "Remove .half() or .bfloat16(): the weights stay in fp32, and autocast casts them for each product."
    return Row("weights", "weights are stored in fp32", ", ".join(dtypes), good, "" if good else to_do)


def _autocast_row(run: Run, formats: tuple[str, ...]) -> Row:
    inside = sum(b.under_autocast for b in run.backwards if b.compute in formats)
    measured = f"{count_text(inside, 'backward pass', 'backward passes')} inside" if inside else "outside"
    to_do = "Leave the autocast block before backward(): only the forward pass and the loss belong in it."
    return Row("backward", "backward runs outside autocast", measured, not inside, to_do if inside else "")


def scaled_row(run: Run, steps: Sequence[Step], *, scaler: bool) -> Row:
    """Whether backward ran on the scaled loss where it has to."""
    expected = "backward runs on scaler.scale(loss)" if scaler else "fp16 runs backward on scaler.scale(loss)"
    pairs = [(step, run.backward_of(step)) for step in steps]
    divided = [s for s, b in pairs if b and not b.scaled and s.via_scaler]
    bare = [s for s, b in pairs if b and not b.scaled and not s.via_scaler and (scaler or b.compute == "fp16")]
    if divided:
        ratio = mean_ratio(divided)
        change = f", which divided it: updates of {ratio:.2g} times the gradient" if ratio else ""
        measured = f"{count_text(len(divided), 'step')} of scaler.step on an unscaled loss{change}"
        return Row(
            "scaled-loss", expected, measured, False, "Write scaler.scale(loss).backward() instead of loss.backward()."
        )
    if bare:
        formats = ", ".join(sorted({run.compute_of(step) for step in bare}))
        measured = f"{count_text(len(bare), 'step')} in {formats} without a loss scale"
        to_do = "Create a GradScaler; then scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()."
        return Row("scaled-loss", expected, measured, False, to_do)
    scales = sorted({b.scale for _, b in pairs if b and b.scaled})
    measured = f"scale {scales[0]:g} to {scales[-1]:g}" if scales else "bf16 without a loss scale"
    return Row("scaled-loss", expected, measured, True)


def mean_ratio(steps: Sequence[Step]) -> float | None:
    """The norm that optimizers applied, divided by that of the true gradient: the median of the steps."""
    ratios = sorted(s.received_norm / s.true_norm for s in steps if s.true_norm and s.received_norm is not None)
    return ratios[len(ratios) // 2] if ratios else None


def _gradient_row(run: Run, steps: Sequence[Step]) -> Row | None:
    """Whether the optimizer got the true gradient, or the true gradient clipped."""
    measurable = [s for s in steps if s.applied and s.true_norm and s.received_norm is not None]
    if not measurable:
        return None
    expected = "the optimizer gets the true gradient"
    scaled = [(s, b) for s in measurable if (b := run.backward_of(s)) and b.scale > 1]
    still = [s for s, b in scaled if s.received_norm > s.true_norm * max(2.0, b.scale / 2)]  # type: ignore[operator]
    infinite = [s for s, b in scaled if not s.via_scaler and not b.finite]
    if still or infinite:
        times = f"{mean_ratio(still):.6g} times the true gradient" if still else "a gradient with inf or NaN"
        measured = f"it got {times}"
        to_do = "Call scaler.step(optimizer) instead of optimizer.step(): it divides the gradients by the scale."
        return Row("gradient", expected, measured, False, to_do)
    shrunk = [
        s for s, b in scaled if s.clip and s.clip.kind == "norm" and _is_near(s.received_norm, s.clip.limit / b.scale)
    ]
    if shrunk:
        limit = shrunk[0].clip.limit if shrunk[0].clip else 1.0
        measured = f"it got a gradient of norm {shrunk[0].received_norm:.3g}: max_norm {limit:g} divided by the scale"
        to_do = "Call scaler.unscale_(optimizer) before clip_grad_norm_: it clipped the scaled gradient."
        return Row("gradient", expected, measured, False, to_do)
    # In a run that diverges, which a script may show on purpose, nothing can be compared any more.
    measurable = [s for s in measurable if math.isfinite(s.received_norm or 0.0) and math.isfinite(s.true_norm or 0.0)]
    if not measurable:
        return None
    ratio = mean_ratio(measurable) or 0.0
    clipped = any(s.clip for s in measurable)
    wrong = [s for s in measurable if s.cosine is not None and s.cosine < 1 - _NEAR and not s.clip]
    changed = not clipped and (ratio > 1 + _NEAR or wrong)
    measured = f"{ratio:.3g} times the true gradient{', clipped' if clipped or ratio < 1 - _NEAR else ''}"
    to_do = "Do not change gradients between backward and step, except by unscale_ and clipping; clear them after each step."
    return Row("gradient", expected, measured, not changed, to_do if changed else "")


def _is_near(value: float | None, expected: float) -> bool:
    return value is not None and abs(value - expected) <= _NEAR * expected


def _update_row(run: Run) -> Row:
    missing = run.pending_updates
    measured = count_text(run.num_updates, "update")
    if missing:
        measured += "; the last scaler.step was followed by none"
    to_do = "Call scaler.update() after every scaler.step(optimizer): without it the scale never changes."
    return Row("update", "scaler.update() follows scaler.step()", measured, not missing, to_do if missing else "")
