"""Short explanations of the ideas behind mixed precision, with their numbers computed, not typed.

`halfstep explain TOPIC` prints them. Every figure comes from `halfstep.precision.formats`, so an explanation cannot
drift from what the library does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from halfstep.errors import unknown
from halfstep.precision.formats import BF16, FORMATS, FP16, FP32, BlockFormat
from halfstep.precision.loss_scale import LossScale

__all__ = ["TOPICS", "Topic", "explain"]


@dataclass(frozen=True)
class Topic:
    """One explanation: a title, a few paragraphs, and where to go from there."""

    name: str
    title: str
    paragraphs: tuple[str, ...]
    see: tuple[str, ...]

    def __str__(self) -> str:
        return "\n\n".join([self.title, *self.paragraphs, "See also: " + "; ".join(self.see)])


def _power(x: float) -> str:
    return f"2^{round(math.log2(x))}"


def _loss_scaling() -> Topic:
    usual = LossScale()
    return Topic(
        "loss-scaling",
        "Loss scaling: why fp16 needs it and bf16 does not",
        (
            f"fp16 stores nothing smaller than {_power(FP16.smallest_subnormal)} = {FP16.smallest_subnormal:.1e}. Half of that "
            "and less becomes 0, and many gradients are that small: they vanish before the optimizer sees them, and the "
            "layers behind them stop learning without any error.",
            "Multiplying the loss by S multiplies every gradient by S, out of the region where fp16 flushes to zero; the "
            "optimizer divides by S again, in fp32. The product must also stay below "
            f"{FP16.max:.0f}, fp16's largest value, or it becomes inf. The largest S that does not overflow changes during "
            "training, so a dynamic scale finds it by trial: after a non-finite gradient the step is skipped and S is lowered, "
            "after a run of clean steps S is raised.",
            f"Halfstep starts at {usual.init_scale:.0f}, doubles after {usual.growth_interval} clean steps, halves when "
            f"{usual.hysteresis} overflows have used up the hysteresis, stays within [{usual.min_scale:.0f}, "
            f"{_power(usual.max_scale)}], and stops after {usual.max_skips} skipped steps in a row, naming the parameters. "
            "A few skipped steps at the start and one now and then later are the search at work, not a fault.",
            f"bf16 has fp32's exponent: it reaches down to {BF16.smallest_subnormal:.0e}, where no gradient that matters lives, "
            "so it needs no scale. A scaler there only costs two passes over the gradients.",
            "Clip after dividing by S, never before: clipping scaled gradients at 1.0 clips the true ones at 1/S. The Engine "
            "does it in that order.",
        ),
        ("halfstep explain hysteresis", "docs/scaler.md", "Micikevicius et al., Mixed Precision Training, 2018"),
    )


def _hysteresis() -> Topic:
    return Topic(
        "hysteresis",
        "Hysteresis: how many overflows it takes to lower the loss scale",
        (
            "One odd batch can overflow at a scale that is right for all others. With hysteresis h, the first h - 1 "
            "overflows only skip their step; the scale is lowered from the h-th on. torch.amp has none (h = 1).",
            "Systems differ in when the allowance is refilled. Apex, and DeepSpeed with consecutive_hysteresis, refill it at "
            "every clean step, so only overflows in a row lower the scale. Megatron and DeepSpeed's default refill it only "
            "when the scale grows: after the first h - 1 overflows of a window, each further one lowers the scale.",
            "DeepSpeed also grows one step later than the others: after growth_interval + 1 clean steps the first time. "
            "LossScaler(semantics=...) reproduces torch, apex, megatron, deepspeed and deepspeed-consecutive by name, so that "
            "a run can be moved without changing its trajectory.",
            "hysteresis must be at least 1. DeepSpeed accepts 0 and then never lowers the scale: every step is skipped for ever.",
        ),
        ("halfstep explain loss-scaling", "docs/scaler.md has one trace under all five rules"),
    )


def _fp16_bf16() -> Topic:
    return Topic(
        "fp16-vs-bf16",
        "fp16 against bf16: range or precision",
        (
            f"Both take {FP16.bytes} bytes. fp16 spends {FP16.exponent_bits} bits on the exponent and {FP16.fraction_bits} on the "
            f"fraction; bf16 spends {BF16.exponent_bits} and {BF16.fraction_bits}.",
            f"Range: fp16 ends at {FP16.max:.0f} and is exact only down to {FP16.smallest_normal:.1e}; bf16 ends at {BF16.max:.1e} and "
            f"starts at {BF16.smallest_normal:.1e}, like fp32. So fp16 needs a loss scale and can overflow in the forward pass; bf16 does "
            "neither.",
            f"Precision: next to 1.0 the step is {FP16.epsilon:.1e} in fp16 ({_power(FP16.epsilon)}) and {BF16.epsilon:.1e} in bf16 "
            f"({_power(BF16.epsilon)}), eight times coarser. Both are far too coarse for weight updates: an update smaller than half a "
            f"step is lost, in bf16 anything below about 1/{round(2 / BF16.epsilon)} of the weight. That is why a mixed-precision run "
            "keeps an fp32 master of the weights.",
            "Choose bf16 where the hardware runs it natively (NVIDIA Ampere and later, AMD MI200 and later, Intel Xe with XMX, CPUs with "
            "AMX or AVX512-BF16): it is simpler and does not skip steps. Choose fp16 on Volta and Turing, and where the finer fraction "
            "matters more than the range, as in some reinforcement-learning fine-tuning.",
            "Weights that were trained in bf16 may hold activations past fp16's range: continuing them in fp16 overflows at any scale.",
        ),
        ("halfstep probe", "halfstep explain loss-scaling", "halfstep explain native-vs-emulated", "docs/policies.md"),
    )


def _stays_fp32() -> Topic:
    return Topic(
        "stays-in-fp32",
        "What stays in fp32, and why",
        (
            "Matrix products and convolutions gain from 16 bits, and lose little: hardware multiplies 16-bit numbers and adds the "
            "products up in fp32. Other parts lose too much.",
            f"Long sums. Adding 1.0 to a 16-bit total stops changing it at {round(2 / BF16.epsilon)} in bf16 and {round(2 / FP16.epsilon)} in "
            "fp16. So softmax, log-softmax, large sums and norms are computed in fp32, and gradients are accumulated over "
            "micro-batches in fp32.",
            f"Losses. A 16-bit loss has a 16-bit gradient, and the loss scale {LossScale().init_scale:.0f} itself is inf in fp16 "
            f"(its largest value is {FP16.max:.0f}).",
            "Batch-norm statistics: running averages move by small steps that 16 bits would lose. Normalisation layers may take and "
            "give 16 bits with fp32 inside.",
            f"The master weights and the moments: an update below half a step of the weight is lost, {_power(BF16.epsilon / 2)} of it in "
            f"bf16 and {_power(FP32.epsilon / 2)} in fp32.",
            "autocast keeps most of these by itself on CUDA. On a CPU it does not: softmax, sums and norms run in 16 bits there. "
            "Halfstep holds the rule on every device.",
        ),
        ("halfstep explain fp16-vs-bf16", "docs/policies.md"),
    )


def _native() -> Topic:
    return Topic(
        "native-vs-emulated",
        "Native, slow or emulated: what a device really does with 16 bits",
        (
            "A format is native where the hardware multiplies matrices in it faster than in fp32: tensor cores, matrix cores, XMX, AMX.",
            "It is emulated where the software converts to fp32, computes, and converts back. Results are right and memory is "
            "halved, but it is not faster, and often much slower. torch.cuda.is_bf16_supported() answers True for both cases, so on a T4 "
            "or V100, where bf16 is emulated, scripts that trust it choose the slow format.",
            "A CPU without 16-bit arithmetic is the extreme case: there 16-bit training is many times slower than fp32, and the right "
            "choice is fp32.",
            "`halfstep probe` tells the two apart from a table of facts; `halfstep probe --measure` times matrix products in each format "
            "here, to confirm the table.",
        ),
        ("halfstep probe", "docs/hardware.md"),
    )


def _formats() -> Topic:
    lines = [
        f"{'format':14} {'bits':>4} {'bytes':>6} {'largest':>9} {'normal from':>12} {'smallest':>9} {'step at 1':>10}"
    ]
    for f in FORMATS.values():
        if isinstance(f, BlockFormat):
            lines.append(
                f"{f.name:14} {f.bits:4} {f.bytes:6.3f} {'block max':>9} {'-':>12} {f.smallest:9.1e} {f.ulp(1.0):10.1e}"
            )
        else:
            lines.append(
                f"{f.name:14} {f.bits:4} {f.bytes:6.3f} {f.max:9.4g} {f.smallest_normal:12.2e} {f.smallest_subnormal:9.1e} {f.epsilon:10.1e}"
            )
    return Topic(
        "formats",
        "The number formats, side by side",
        (
            "\n".join(lines),
            "The 8-bit block formats are relative to the largest magnitude of their block of 256 values.",
        ),
        ("halfstep explain fp16-vs-bf16",),
    )


TOPICS: dict[str, Callable[[], Topic]] = {
    "loss-scaling": _loss_scaling,
    "hysteresis": _hysteresis,
    "fp16-vs-bf16": _fp16_bf16,
    "stays-in-fp32": _stays_fp32,
    "native-vs-emulated": _native,
    "formats": _formats,
}


def explain(name: str) -> Topic:
    """The explanation called `name`; spaces and underscores count as dashes."""
    key = "-".join(name.casefold().replace("_", " ").replace("-", " ").split())
    if key not in TOPICS:
        raise unknown("topic", name, TOPICS)
    return TOPICS[key]()
