"""Experiments behind the claims of the course: named, run on this machine's CPU, and judged by what they measure.

An experiment is a function without arguments in `learning/experiments/` that returns an `Outcome`: what it measured, whether
the claim is true by these numbers, and what they mean. Units and quiz questions refer to experiments by name, so one
experiment can back several of them. The table below holds the claims and imports no torch.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from halfstep.errors import unknown
from halfstep.events import quiet
from halfstep.hardware.onednn import ignore_fallback_warnings
from halfstep.hardware.torch_build import require_torch

__all__ = ["EXPERIMENTS", "Experiment", "Outcome", "Proof", "Reading", "run_experiment"]

Value = float | int | str | bool
Basis = Literal["measured", "predicted", "recorded"]


@dataclass(frozen=True)
class Reading:
    """One measured value, and how to print it."""

    label: str
    value: Value
    text: str = ""

    def __str__(self) -> str:
        if self.text:
            return self.text
        return f"{self.value:.4g}" if isinstance(self.value, float) else str(self.value)


@dataclass(frozen=True)
class Outcome:
    """What an experiment measured, whether its claim is true by that, and what the numbers mean."""

    readings: tuple[Reading, ...]
    holds: bool
    meaning: str


@dataclass(frozen=True)
class Experiment:
    """A claim, the function that tests it, as `module:function` below `learning/experiments/`, and what the test rests on.

    "measured": the experiment computes it here. "predicted": the planner predicts it, nothing of that size is run. "recorded": it
    follows from facts that Halfstep's tables record; the GPU or library in question is not run.
    """

    name: str
    claim: str
    function: str
    basis: Basis = "measured"


@dataclass(frozen=True)
class Proof:
    """An experiment that was run."""

    experiment: str
    claim: str
    readings: tuple[Reading, ...]
    holds: bool
    meaning: str
    seconds: float
    basis: Basis = "measured"


def _table(*rows: tuple[str, str, str] | tuple[str, str, str, Basis]) -> dict[str, Experiment]:
    return {name: Experiment(name, claim, function, *basis) for name, function, claim, *basis in rows}


EXPERIMENTS = _table(
    (
        "activation-memory",
        "memory:activation_memory",
        "Autocast stores most activations in 16 bits, so backward needs less memory.",
    ),
    (
        "bytes-per-parameter",
        "memory:bytes_per_parameter",
        "Autocast does not shrink weights, gradients and optimizer states: 16 bytes per parameter with Adam, as in fp32. "
        "Lean presets do.",
    ),
    (
        "matmul-speed",
        "speed:matmul_speed",
        "16-bit products are faster only where the hardware multiplies in 16 bits.",
    ),
    ("range", "formats:value_range", "fp16 overflows above 65504 and underflows below 2^-25; bf16 has fp32's range."),
    ("spacing", "formats:spacing", "bf16 is 8 times coarser than fp16: 1.002 is 1 in bf16."),
    ("long-sum", "formats:long_sum", "A running sum of ones stops at 256 in bf16 and at 2048 in fp16."),
    (
        "lesson-loop",
        "loops:lesson_loop",
        "Under autocast with a GradScaler, weights and gradients stay fp32, products run in fp16, and the loss falls.",
    ),
    (
        "missing-update",
        "loops:missing_update",
        "Without scaler.update(), the second scaler.step() raises an error.",
    ),
    ("skipped-step", "loops:skipped_step", "A gradient with an inf skips the step and halves the scale."),
    (
        "scaler-by-format",
        "failures:scaler_by_format",
        "Small gradients underflow in fp16 without a scaler; with one they do not, and in bf16 they do not without one.",
    ),
    (
        "standing-still",
        "failures:standing_still",
        "Under autocast, underflow in fp16 gives gradients of zero and a loss that stands still, not NaN.",
    ),
    (
        "overflow-nan",
        "failures:overflow",
        "An activation above 65504 is inf in fp16 and makes the loss NaN; in bf16 it does not.",
    ),
    (
        "underflow-nan",
        "failures:underflow_nan",
        "Where weights and Adam's states are fp16 too, underflow does give NaN: eps=1e-8 is 0 there, and 0/0 is NaN.",
    ),
    (
        "lost-updates",
        "failures:lost_updates",
        "Weights stored in bf16 without a master stop changing: an update below half the spacing is lost.",
    ),
    (
        "hardware-choice",
        "speed:hardware_choice",
        "bf16 on Ampere and later, fp16 on Volta and Turing, fp32 where neither is native.",
        "recorded",
    ),
    (
        "losses-under-autocast",
        "stays_fp32:losses",
        "On a CPU under autocast, three losses of torch give fp32; the same written by hand give 16 bits.",
    ),
    (
        "sums-under-autocast",
        "stays_fp32:reductions",
        "Which reductions run in fp32 depends on the device; a CPU's autocast runs softmax and sums in 16 bits.",
    ),
    (
        "batchnorm-statistics",
        "stays_fp32:batchnorm",
        "Batch-norm statistics stored in bf16 stop short of the true mean; autocast leaves them in fp32.",
    ),
    (
        "clipping-order",
        "clipping:order",
        "Clipping before unscale_ clips the true gradient at max_norm / scale.",
    ),
    (
        "skipped-clip",
        "clipping:non_finite",
        "Clipping an inf gradient makes it NaN: clipping is no protection against overflow.",
    ),
    (
        "validation",
        "validation:validate",
        "Validation under autocast and no_grad agrees with fp32, saves no activations and needs no scaler.",
    ),
    (
        "accumulation",
        "stays_fp32:accumulation",
        "Gradients accumulated over 1024 micro-batches lose most of their sum in bf16 and some of it in fp16.",
    ),
    (
        "eight-to-four",
        "scale:eight_to_four",
        "ViT-L/16 at a global batch of 896 on A100 40 GB: 8 GPUs in fp32, 5 with autocast, 4 with a lean preset.",
        "predicted",
    ),
    (
        "zero-and-amp",
        "scale:zero_and_amp",
        "Halfstep rejects a DeepSpeed configuration with Apex AMP and ZeRO, and reads DeepSpeed's fp16 mode as Apex O2.",
        "recorded",
    ),
    (
        "one-bit",
        "scale:one_bit",
        "Halfstep accepts 1-bit Adam in fp16 and rejects it elsewhere; one bit per element with error feedback keeps the mean.",
    ),
    (
        "max-grad-norm",
        "scale:max_grad_norm",
        "`halfstep check` reports `max_grad_norm` in a DeepSpeed optimizer block; the Engine clips in every precision, fp32 included.",
    ),
    (
        "scale-defaults",
        "loops:scale_defaults",
        "Halfstep's scaler, with DeepSpeed's defaults, starts at 65536, halves at the second overflow and grows after 1000 clean steps, one more after an overflow.",
    ),
)


def run_experiment(name: str) -> Proof:
    """Run the experiment called `name`; random state, warning filters and log level are left as they were."""
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    experiment = EXPERIMENTS[name]
    torch = require_torch(f"The experiment {name}")
    module, _, function = experiment.function.partition(":")
    work: Callable[[], Outcome] = getattr(importlib.import_module(f"halfstep.learning.experiments.{module}"), function)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), quiet():
        ignore_fallback_warnings()
        torch.manual_seed(0)
        start = time.perf_counter()
        outcome = work()
        seconds = time.perf_counter() - start
    return Proof(name, experiment.claim, outcome.readings, outcome.holds, outcome.meaning, seconds, experiment.basis)
