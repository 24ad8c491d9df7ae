"""Topics about a training step: underflow, clipping, accumulation, validation, masters, memory."""

from __future__ import annotations

from halfstep.precision.formats import BF16, BLOCK8, BLOCK8_UNSIGNED, FP16, FP32
from halfstep.precision.loss_scale import LossScale
from halfstep.report.topics.topic import Topic, power

__all__ = ["accumulation", "clipping", "master_weights", "memory", "underflow", "validation"]

_ULP_AT_1 = BF16.epsilon


def underflow() -> Topic:
    """Gradients that become zero."""
    return Topic(
        "underflow",
        "Underflow: gradients that become zero",
        (
            f"A value of at most half the smallest number of a format rounds to 0: {power(FP16.smallest_subnormal / 2)} = "
            f"{FP16.smallest_subnormal / 2:.1e} in fp16. Below {FP16.smallest_normal:.1e} fp16 also loses precision.",
            "Under autocast, underflow does not give NaN. The gradients of a layer are exactly 0, its weights stand still, and if that concerns all "
            "layers the loss is the same in every step. Where weights and Adam's moments are fp16 as well, it does: "
            f"eps = 1e-8 rounds to {FP16.round(1e-8):g} there, and 0/0 is NaN.",
            f"A loss scale moves gradients into the range: with {LossScale().init_scale:.0f}, what underflows is smaller by that "
            f"factor. bf16 represents values down to {BF16.smallest_subnormal:.0e} and needs no scale.",
            "To find it: `halfstep compare` shows the share of gradients that underflow and in which layer, and Watch reports it "
            "during a run.",
        ),
        ("halfstep learn failures", "halfstep explain loss-scaling", "docs/watch.md"),
    )


def clipping() -> Topic:
    """Clipping with a loss scale."""
    scale = LossScale().init_scale
    return Topic(
        "clipping",
        "Gradient clipping with a loss scale",
        (
            "Gradients of a scaled loss are multiplied by the scale until they are unscaled. Clip in between: scaler.unscale_(optimizer), "
            "then clip_grad_norm_, then scaler.step(optimizer), which does not unscale again.",
            f"Clipping scaled gradients at 1 clips the true ones at 1/{scale:.0f}. Nothing raises, and Adam, which divides by the "
            "gradient's size, hides it in the loss.",
            "To verify it, take one step with SGD and lr = 1: the norm of the update is max_norm if the gradient was longer.",
            "Clipping does not protect against overflow: if one gradient is inf, the norm is inf, the finite ones become 0 and the inf "
            "becomes NaN. The scaler's check does.",
            "With accumulation, unscale and clip once, at the end of the window. Engine(max_norm=1.0) does all of this in every "
            "precision, and reports the norm of the true gradient in fp32.",
        ),
        ("halfstep learn clipping", "halfstep explain HS104", "docs/engine.md"),
    )


def accumulation() -> Topic:
    """Sums over micro-batches."""
    return Topic(
        "accumulation",
        "Gradient accumulation in mixed precision",
        (
            "Accumulation adds the gradients of several micro-batches before one update. In 16 bits the sum stops growing: 1024 gradients "
            f"of 1 sum to {round(2 / BF16.epsilon)} in bf16. Autocast over fp32 weights accumulates in fp32; 16-bit weights "
            "need a separate fp32 sum, 4 bytes per parameter, which lean presets have for accumulate above 1.",
            "With a scaler, the scale must not change inside a window: scale every loss, and call unscale_, step and update once at its end. An "
            "inf in one micro-batch skips the window.",
            "Divide by the number of micro-batches, or by tokens where micro-batches differ in length; the last window of an "
            "epoch may be shorter. Engine(accumulate=4) divides, backward(loss, weight=num_tokens) weights, and step(last=True) "
            "closes a short window.",
        ),
        ("halfstep learn stays-in-fp32", "halfstep explain stays-in-fp32", "docs/engine.md"),
    )


def validation() -> Topic:
    """Validation under autocast."""
    return Topic(
        "validation",
        "Validation: autocast, no gradients, no scaler",
        (
            "Validation runs the forward pass only. Autocast makes it faster where training is faster; torch.no_grad() saves no activations. A "
            "scaler has no part in it, because there is no backward pass whose gradients could underflow.",
            "model.eval() is separate from both: without it dropout is active, and batch norm uses and changes the statistics of "
            "the batch.",
            "Validate in the precision that you deploy in, and average losses over batches in fp32 or in Python: a 16-bit running "
            "mean stops changing.",
            "engine.evaluate() is all of that: eval mode, no gradients, the policy's precision, and with ema=True the EMA weights.",
        ),
        ("halfstep learn validation", "docs/engine.md"),
    )


def master_weights() -> Topic:
    """Why updates need a master."""
    return Topic(
        "master-weights",
        "Master weights: why updates need more than 16 bits",
        (
            "An update smaller than half the spacing at its weight rounds back to the weight and is lost. Relative to the weight that is at "
            f"most {power(BF16.epsilon / 2)} in bf16, {power(FP16.epsilon / 2)} in fp16 and {power(FP32.epsilon / 2)} in fp32. Adam's update is "
            f"about lr: with lr = 1e-3, bf16 weights near 1 (half spacing {_ULP_AT_1 / 2:.4f}) do not change at all.",
            "A master is the weight with fp32 precision that updates are added to. Under autocast the fp32 weights are the master. "
            "16-bit weights need one next to them: an fp32 copy (4 bytes more) or, in Halfstep's lean presets, the 16 bits that rounding "
            "removed (split, 2 bytes more, exact for bf16).",
            "Training stored in pure 16 bits looks fine at first, while updates are large, and stops learning as the learning rate decays. Watch "
            "reports the share of updates that are lost.",
        ),
        ("halfstep learn failures", "docs/optim.md", "docs/watch.md"),
    )


def memory() -> Topic:
    """What mixed precision saves."""
    lean8 = 6 + BLOCK8.bytes + BLOCK8_UNSIGNED.bytes
    return Topic(
        "memory",
        "Memory: what mixed precision saves, and what not",
        (
            "Model state is weights, gradients, masters and optimizer states. With Adam it is 16 bytes per parameter in fp32, and the same "
            f"16 under autocast. Lean presets store 14, and {lean8:.1f} with 8-bit moments; 4 more with fp32 accumulation.",
            "Activations are what the forward pass saves for backward; they grow with the batch. Autocast stores most of them in 16 bits.",
            "ViT-L/16 at batch 128 on an H200, peak GiB, recorded: fp32 41.2, autocast bf16 25.5, bf16-lean 22.6, with 8-bit moments "
            "21.0 (benchmarks/results/compare_vit_l_16_h200_2026-11-15.md).",
            "So autocast helps where activations decide, and sharding or smaller states where model state does. ViT-L/16 at a global batch "
            "of 896 on A100 40 GB needs 8 GPUs in fp32, 5 with autocast and 4 with bf16-lean (docs/many-gpus.md, planned).",
        ),
        ("halfstep plan", "halfstep learn memory", "docs/plan.md"),
    )
