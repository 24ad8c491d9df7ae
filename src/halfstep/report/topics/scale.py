"""Topics about many GPUs and smaller formats: ZeRO with AMP, 1-bit optimizers, fp8."""

from __future__ import annotations

from halfstep.precision.deepspeed_optimizers import MAX_GRAD_NORM_EFFECT
from halfstep.precision.formats import FP8_E4M3FN, FP8_E5M2
from halfstep.precision.loss_scale import LossScale
from halfstep.report.topics.topic import Topic

__all__ = ["fp8", "one_bit", "zero_and_amp"]


def zero_and_amp() -> Topic:
    """DeepSpeed's precision modes."""
    scale = LossScale()
    return Topic(
        "zero-and-amp",
        "ZeRO, AMP and DeepSpeed's precision modes",
        (
            "Apex AMP and ZeRO do not combine: both replace gradients and own the loss scale. DeepSpeed asserts it up to 0.19.7, and 0.19.8 rejects "
            "any amp block. Use the fp16 block, which is like Apex O2: 16-bit weights with fp32 masters (fp16-lean in Halfstep), or bf16.",
            f"The fp16 block starts at a scale of {scale.init_scale:.0f}, doubles it after {scale.growth_interval} clean steps and has a "
            f"hysteresis of {scale.hysteresis}; Halfstep's scaler has the same defaults.",
            MAX_GRAD_NORM_EFFECT,
            "ZeRO passes an optimizer flat shards. One that treats every element alone is safe there; for others than Adam, AdamW and a few "
            "more, DeepSpeed wants zero_allow_untested_optimizer.",
            "`halfstep check ds_config.json` reports all of this by DeepSpeed's version.",
        ),
        ("halfstep learn scale", "docs/deepspeed.md", "halfstep explain HS241"),
    )


def one_bit() -> Topic:
    """Compressed optimizers."""
    return Topic(
        "one-bit",
        "1-bit Adam, 0/1 Adam and 1-bit LAMB",
        (
            "Data-parallel training sends every gradient in every step. These optimizers train some steps that way, until Adam's variance has "
            "settled, then freeze it and send one bit per element and a scale per tensor: 1/32 of an fp32 all-reduce, 1/16 of an fp16 one. "
            "What a message loses is added to the next one (error feedback).",
            "They help where the network is the limit, such as Ethernet between machines; on one machine with NVLink they do not.",
            "Convergence is verified in fp16 only: that of the papers and of DeepSpeed. Halfstep rejects bf16 and fp32 unless "
            "allow_unverified=True. In short runs on digits, fp16, fp32 and bf16 gave the same differences to Adam, and 1-bit Adam and 0/1 Adam "
            "ended 5 to 6 % higher in loss (benchmarks/results/onebit_convergence_cpu_2026-11-17.md).",
            "They need whole momenta, so they do not run with ZeRO or FSDP. DeepSpeed removed them in 0.19.7; halfstep.optim.OneBitAdam, "
            "ZeroOneAdam and OneBitLamb run on torch.distributed alone.",
        ),
        ("halfstep learn scale", "docs/one-bit.md"),
    )


def fp8() -> Topic:
    """8-bit formats."""
    return Topic(
        "fp8",
        "fp8: two 8-bit formats, and what they need",
        (
            f"e4m3 has 3 fraction bits and reaches {FP8_E4M3FN.max:.0f}; e5m2 has 2 and reaches {FP8_E5M2.max:.0f}. Their smallest values are "
            f"{FP8_E4M3FN.smallest_subnormal:.1e} and {FP8_E5M2.smallest_subnormal:.1e}. Usually weights and activations are e4m3, and "
            "gradients e5m2.",
            "The range is too small for one loss scale: each tensor, row or block has its own scale, computed from its largest "
            "magnitude. The products accumulate in higher precision; weights, masters, norms and the output layer stay in 16 or 32 bits.",
            "Overflow is hard to see: e4m3 has no inf, and torch from 2.13 saturates 1e9 to 448 without a trace. Check before the cast.",
            "fp8 products need hardware for it: NVIDIA Hopper, Ada and later, AMD MI300.",
            "In Halfstep `fp8` is a reserved preset: the Engine does not implement it yet and raises an error. Use bf16-lean.",
        ),
        ("halfstep explain formats", "halfstep probe", "docs/policies.md"),
    )
