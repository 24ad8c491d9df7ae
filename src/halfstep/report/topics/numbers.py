"""Topics about number formats, loss scaling and the hardware's support."""

from __future__ import annotations

from halfstep.precision.formats import BF16, FORMATS, FP16, FP32, BlockFormat
from halfstep.precision.loss_scale import LossScale
from halfstep.report.topics.topic import Topic, power

__all__ = ["formats", "fp16_bf16", "hysteresis", "loss_scaling", "native", "stays_fp32"]


def loss_scaling() -> Topic:
    """Why fp16 needs a loss scale."""
    default = LossScale()
    return Topic(
        "loss-scaling",
        "Loss scaling: why fp16 needs it and bf16 does not",
        (
            f"The smallest positive fp16 value is {power(FP16.smallest_subnormal)} = {FP16.smallest_subnormal:.1e}; "
            "values up to half of it round to 0. Many gradients are that small: they underflow before the optimizer "
            "reads them, and the layers below stop learning without an error.",
            "Multiplying the loss by a scale S multiplies every gradient by S and moves it out of the underflow "
            "range; the optimizer divides by S again in fp32. The product must also stay below fp16's maximum of "
            f"{FP16.max:.0f}, or it becomes inf. The largest S that does not overflow changes during training, so "
            "dynamic loss scaling searches for it: a non-finite gradient skips the step and lowers S, a series of "
            "finite steps raises S.",
            f"Halfstep starts at {default.init_scale:.0f}, doubles the scale after {default.growth_interval} finite "
            f"steps, halves it when {default.hysteresis} overflows have exhausted the hysteresis, keeps it within "
            f"[{default.min_scale:.0f}, {power(default.max_scale)}], and raises an error that names the parameters "
            f"after {default.max_skips} skipped steps in a row. A few skipped steps at the start and an occasional "
            "one later are normal: that is how the search works.",
            f"bf16 has fp32's exponent range: it represents values down to {BF16.smallest_subnormal:.0e}, smaller "
            "than any gradient that matters, so it needs no loss scale. A scaler only adds two passes over the "
            "gradients.",
            "Clip after dividing by S, never before: clipping scaled gradients at 1.0 clips the true ones at 1/S. "
            "The Engine unscales first.",
        ),
        ("halfstep explain hysteresis", "docs/scaler.md", "Micikevicius et al., Mixed Precision Training, 2018"),
    )


def hysteresis() -> Topic:
    """How many overflows lower the scale."""
    return Topic(
        "hysteresis",
        "Hysteresis: how many overflows lower the loss scale",
        (
            "A single unusual batch can overflow at a scale that suits all others. With hysteresis h, the first h - "
            "1 overflows only skip their step; the h-th and later ones lower the scale. torch.amp has no hysteresis "
            "(h = 1).",
            "Implementations differ in when the counter is reset. Apex, and DeepSpeed with consecutive_hysteresis, "
            "reset it at every finite step, so only consecutive overflows lower the scale. Megatron and DeepSpeed's "
            "default reset it only when the scale grows: after the first h - 1 overflows of a window, every further "
            "one lowers the scale.",
            "DeepSpeed also grows the scale one step later than the others: after growth_interval + 1 finite steps "
            "following the start or an overflow. LossScaler(semantics=...) reproduces torch, apex, megatron, "
            "deepspeed and deepspeed-consecutive, so that a run can be migrated without changing its trajectory.",
            "hysteresis must be at least 1. DeepSpeed accepts 0 and then never lowers the scale: after the first "
            "overflow it skips every step.",
        ),
        ("halfstep explain loss-scaling", "docs/scaler.md, which traces all five semantics on one example"),
    )


def fp16_bf16() -> Topic:
    """Range or precision."""
    return Topic(
        "fp16-vs-bf16",
        "fp16 vs. bf16: range or precision",
        (
            f"Both use {FP16.bytes} bytes. fp16 has {FP16.exponent_bits} exponent bits and {FP16.fraction_bits} "
            f"fraction bits; bf16 has {BF16.exponent_bits} and {BF16.fraction_bits}.",
            f"Range: fp16's maximum is {FP16.max:.0f} and its smallest normal value {FP16.smallest_normal:.1e}; "
            f"bf16's are {BF16.max:.1e} and {BF16.smallest_normal:.1e}, like fp32's. So fp16 needs a loss scale and "
            "can overflow in the forward pass; bf16 needs none and rarely overflows.",
            f"Precision: the spacing at 1.0 is {FP16.epsilon:.1e} in fp16 ({power(FP16.epsilon)}) and "
            f"{BF16.epsilon:.1e} in bf16 ({power(BF16.epsilon)}), {BF16.epsilon / FP16.epsilon:.0f} times coarser. "
            "Both are too coarse for weight updates: an update smaller than half the spacing is lost, in bf16 "
            f"anything below about 1/{round(2 / BF16.epsilon)} of the weight. That is why mixed-precision training "
            "keeps fp32 master weights.",
            "Choose bf16 if the hardware runs it natively (NVIDIA Ampere and later, AMD MI200 and later, Intel Xe "
            "with XMX, CPUs with AMX, AVX512-BF16 or Arm bf16 instructions): it is simpler and does not skip steps. "
            "Choose fp16 on Volta and Turing, and if precision matters more than range, as in some "
            "reinforcement-learning fine-tuning.",
            "Models trained in bf16 can produce activations beyond fp16's range: continuing their training in fp16 "
            "overflows at any loss scale.",
        ),
        ("halfstep probe", "halfstep explain loss-scaling", "halfstep explain native-vs-emulated", "docs/policies.md"),
    )


def stays_fp32() -> Topic:
    """Operations that need fp32."""
    return Topic(
        "stays-in-fp32",
        "What stays in fp32, and why",
        (
            "Matrix products and convolutions are faster in 16 bits and lose little accuracy: the hardware "
            "multiplies 16-bit values and accumulates in fp32. Other operations lose too much.",
            f"Long sums: a running sum of ones stops growing at {round(2 / BF16.epsilon)} in bf16 and at "
            f"{round(2 / FP16.epsilon)} in fp16. Softmax, log-softmax, large sums and norms are therefore computed in "
            "fp32, and gradients are accumulated over micro-batches in fp32.",
            f"Losses: a 16-bit loss has a 16-bit gradient, and the initial loss scale of {LossScale().init_scale:.0f} "
            f"is itself inf in fp16, whose maximum is {FP16.max:.0f}.",
            "Batch-norm statistics: running averages change in steps too small for 16 bits. Normalization layers can "
            "have 16-bit inputs and outputs if they compute in fp32.",
            "Master weights and optimizer moments: an update smaller than half the spacing at the weight is lost, "
            f"relative to the weight about {power(BF16.epsilon / 2)} in bf16 and {power(FP32.epsilon / 2)} in fp32.",
            "autocast runs most of these in fp32 on CUDA. On a CPU it does not: softmax, sums and norms run in 16 "
            "bits. Halfstep runs them in fp32 on every device.",
        ),
        ("halfstep explain fp16-vs-bf16", "docs/policies.md"),
    )


def native() -> Topic:
    """How hardware runs a format."""
    return Topic(
        "native-vs-emulated",
        "Native, slow or emulated: how a device runs 16-bit formats",
        (
            "A format is native if the hardware multiplies matrices in it faster than in fp32: on tensor cores, "
            "matrix cores, XMX or AMX.",
            "It is slow if the hardware supports it without a speedup over fp32; it then only saves memory.",
            "It is emulated if the software converts to fp32, computes and converts back. Results are correct and "
            "memory is halved, but it is not faster and often much slower. torch.cuda.is_bf16_supported() returns "
            "True in this case too, so scripts that rely on it choose the slow format on a T4 or V100, where bf16 is "
            "emulated.",
            "A CPU without 16-bit arithmetic is the extreme case: 16-bit training is many times slower than fp32 "
            "there. Use fp32.",
            "`halfstep probe` looks the formats up in a table of devices; `halfstep probe --measure` times matrix "
            "products on this machine to verify the table.",
        ),
        ("halfstep probe", "docs/hardware.md"),
    )


def formats() -> Topic:
    """The table of formats."""
    header = f"{'format':14} {'bits':>4} {'bytes':>6} {'max':>9} {'min normal':>12} {'min':>9} {'spacing at 1':>13}"
    lines = [header]
    for f in FORMATS.values():
        if isinstance(f, BlockFormat):
            lines.append(
                f"{f.name:14} {f.bits:4} {f.bytes:6.3f} {'block max':>9} {'-':>12} {f.smallest:9.1e} {f.ulp(1.0):13.1e}"
            )
        else:
            largest = f"{f.max:.0f}" if f.max < 1e6 else f"{f.max:.3e}"
            lines.append(
                f"{f.name:14} {f.bits:4} {f.bytes:6.3f} {largest:>9} {f.smallest_normal:12.2e} "
                f"{f.smallest_subnormal:9.1e} {f.epsilon:13.1e}"
            )
    return Topic(
        "formats",
        "Number formats compared",
        (
            "\n".join(lines),
            "Values of the 8-bit block formats are relative to the largest magnitude in their block of 256 values.",
        ),
        ("halfstep explain fp16-vs-bf16",),
    )
