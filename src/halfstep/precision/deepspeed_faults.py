"""Known faults of DeepSpeed's precision code by release: when each applies, what it does, and what Halfstep does.

A fault is a place where DeepSpeed silently trains with other numbers than the configuration asks for, or stops without a
usable message. The ids are stable and appear in messages and docs/deepspeed.md. A row that is `measured` was run on CPU
ranks with DeepSpeed 0.19.8 or the last release that has it; the others were read from the source. Halfstep has three answers:

    avoid     it writes settings under which the fault cannot occur
    own       it does that part itself (scaling, overflow decision, clipping, counting, checkpoints)
    reject    it stops before training, with the reason
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from halfstep.precision.deepspeed_setup import Setup, Version, parse_version, read_setup

__all__ = ["FAULTS", "Action", "Fault", "faults", "version_range"]

Action = Literal["avoid", "own", "reject"]


@dataclass(frozen=True)
class Fault:
    """One fault: which releases and settings have it, its effect, and Halfstep's answer."""

    id: str
    when: str  # the condition in words
    consequence: str
    action: Action
    remedy: str  # what Halfstep does
    applies: Callable[[Setup], bool]
    since: Version | None = None  # the first release with it; None: every release tried
    until: Version | None = None  # the first release without it; None: still there in 0.19.8
    measured: bool = True  # False: read from the source only

    def affects(self, version: Version) -> bool:
        """Whether a release has the fault."""
        return (self.since is None or version >= self.since) and (self.until is None or version < self.until)

    def __str__(self) -> str:
        return f"{self.id} ({self.when}): {self.consequence}. Halfstep: {self.remedy}."


def faults(
    version: str | Version,
    config: Mapping[str, Any],
    *,
    fused: bool = False,
    experts: bool = False,
    num_groups: int = 1,
) -> list[Fault]:
    """The faults that this release of DeepSpeed has with this configuration, by id.

    What a configuration does not contain: `fused` (the optimizer is DeepSpeed's FusedAdam), `experts` (the model has
    mixture-of-experts layers), `num_groups` (parameter groups). Faults that also need a certain call or event (a bare
    `loss.backward()`, a resume, an overflow) are included if the configuration allows them.
    """
    numbers = parse_version(version)
    setup = read_setup(config, numbers, fused=fused, experts=experts, num_groups=num_groups)
    return [fault for fault in FAULTS if fault.affects(numbers) and fault.applies(setup)]


def version_range(fault: Fault) -> str:
    """The affected releases in words."""
    first = ".".join(map(str, fault.since)) if fault.since else ""
    last = ".".join(map(str, fault.until)) if fault.until else ""
    if first and last:
        return f"{first} to before {last}"
    return f"before {last}" if last else f"{first} and later" if first else "all"


_STAGE_0 = (
    "stage 0 is Halfstep's own data parallelism, in which DeepSpeed does not step; Policy.to_deepspeed rejects it"
)
_SCALER = "Halfstep scales and divides by the same value; DeepSpeed's scale is a static 1"
_NORM = "Halfstep computes the norm that it reports and clips by"
_DECIDES = "Halfstep decides on the gradients of all ranks whether a step is applied, and counts the skipped ones"
_GRADS = "writes data_types.grad_accum_dtype from the policy: fp32 for more than one micro-batch"
_AUTOCAST = (
    "torch_autocast is not enabled: Halfstep's own region casts, and its scaler scales; Policy.to_deepspeed rejects it"
)
_EXPERTS = "experts that differ between ranks are rejected by every backend with several ranks"
_FIXED = (0, 19, 8)
_SUM_STAGES = frozenset({1, 3})  # stage 2 reduces each micro-batch and sums in the format of the gradients

FAULTS: tuple[Fault, ...] = (
    Fault(
        "D05", "dynamic fp16 with a hysteresis below 1", "the scale never decreases, and every step after the first "
        "overflow is skipped", "reject", "a hysteresis below 1 is rejected (HS213)",
        lambda s: s.is_dynamic_fp16 and s.stage > 0 and s.hysteresis < 1,
    ),
    Fault(
        "D06", "dynamic fp16 with an initial scale below min_loss_scale", "the first overflow raises the scale, and the "
        "run ends after two", "reject", "the combination is rejected (HS214)",
        lambda s: s.is_dynamic_fp16 and 2.0 ** min(s.power, 127) < s.minimum,
    ),
    Fault(
        "D07", "dynamic fp16 with an initial_scale_power above 24", "each excess power of two costs a skipped step",
        "avoid", "the initial scale is capped at 2^24", lambda s: s.is_dynamic_fp16 and s.power > 24,
    ),
    Fault(
        "D08", "fp16 without ZeRO, with hysteresis settings", "hysteresis is ignored, and the scale halves at every "
        "overflow", "own", _SCALER,
        lambda s: s.is_dynamic_fp16 and not s.stage and s.sets_hysteresis,
    ),
    Fault(
        "D09", "dynamic fp16 with ZeRO, overflow at the minimum scale", "the run ends with a bare Exception",
        "own", "an overflow at the minimum is a skipped step; max_skips in a row raise OverflowStop with the parameters",
        lambda s: s.is_dynamic_fp16 and s.stage > 0,
    ),
    Fault(
        "D10", "dynamic fp16 without ZeRO, overflow at the minimum scale", "steps are skipped for ever without an error",
        "own", "max_skips skipped steps in a row raise OverflowStop", lambda s: s.is_dynamic_fp16 and not s.stage,
    ),
    Fault(
        "D11", "fp16 without ZeRO", "the loss is not scaled, but gradients are divided by the scale: SGD does not train, "
        "Adam sees values near eps", "own", _STAGE_0, lambda s: s.mode == "fp16" and not s.stage, since=(0, 18, 3),
    ),
    Fault(
        "D12", "dynamic fp16, on the step where the scale grows", "the gradient is divided by the new scale, which halves "
        "the update and the reported norm", "own", _SCALER, lambda s: s.is_dynamic_fp16,
    ),
    Fault(
        "D13", "static fp16 scale with ZeRO, after a bare loss.backward()", "the loss is not scaled, but gradients are "
        "divided by the scale", "own", "Engine.backward scales, and a bare loss.backward() raises",
        lambda s: s.mode == "fp16" and s.loss_scale > 0 and s.stage > 0,
    ),
    Fault(
        "D14", "dynamic fp16 with ZeRO, after a bare loss.backward()", "DeepSpeed raises a RuntimeError", "own",
        "Engine.backward scales, and a bare loss.backward() raises", lambda s: s.is_dynamic_fp16 and s.stage > 0,
    ),
    Fault(
        "D15", "override_loss_scale() without ZeRO", "the gradient is still divided by the scale before it", "own",
        _STAGE_0, lambda s: s.mode == "fp16" and not s.stage,
    ),
    Fault(
        "D16", "16-bit weights without ZeRO", "the optimizer takes a step with zero gradients at initialization: weights "
        "decay, and Adam's bias correction is off by one", "own", _STAGE_0, lambda s: s.is_16_bit and not s.stage,
    ),
    Fault(
        "D17", "fp16 without ZeRO, and not FusedAdam", "get_global_grad_norm() returns the norm before the division by the "
        "scale, and not that of the update", "own", _NORM, lambda s: s.mode == "fp16" and not s.stage and not s.fused,
    ),
    Fault(
        "D18", "mixture of experts, 16-bit weights without ZeRO, and not FusedAdam", "experts are missing from the norm, "
        "and clipping is too weak", "reject", _EXPERTS,
        lambda s: s.experts and s.is_16_bit and not s.stage and not s.fused and s.clip > 0,
    ),
    Fault(
        "D19", "mixture of experts, fp32 without ZeRO, with clipping", "the norm is averaged over ranks and depends on the "
        "placement of experts", "reject", _EXPERTS,
        lambda s: s.experts and s.mode == "fp32" and not s.stage and s.clip > 0,
    ),
    Fault(
        "D20", "mixture of experts, 16-bit weights without ZeRO, FusedAdam", "the experts' norm is that of the weights, not "
        "of the gradients", "reject", _EXPERTS,
        lambda s: s.experts and s.is_16_bit and not s.stage and s.fused and s.clip > 0, until=_FIXED, measured=False,
    ),
    Fault(
        "D21", "bf16 without ZeRO, FusedAdam, after an overflow", "the step is applied and counted as skipped: NaN weights",
        "own", _DECIDES, lambda s: s.mode == "bf16" and not s.stage and s.fused, until=_FIXED, measured=False,
    ),
    Fault(
        "D22", "bf16 at stage 3, after an overflow", "check_grad_overflow is ignored, and NaN gradients reach the weights",
        "own", _DECIDES, lambda s: s.mode == "bf16" and s.stage == 3 and s.checks_bf16, until=_FIXED,
    ),
    Fault(
        "D23", "bf16 at stage 1 with fp32 accumulation, NaN or zero gradients", "the run ends with an assertion without a "
        "message", "own", _DECIDES, lambda s: s.is_bf16_optimizer, until=_FIXED,
    ),
    Fault(
        "D24", "bf16 with ZeRO, after an overflow; from 0.19.8 on only at stage 1 with fp32 accumulation", "steps are skipped "
        "without a log line, and the scheduler stops", "own", _DECIDES,
        lambda s: s.mode == "bf16" and s.stage > 0 and (s.version < _FIXED or s.is_bf16_optimizer),
    ),
    Fault(
        "D25", "fp32 without ZeRO, NaN gradients", "they are applied: NaN weights", "own", _DECIDES,
        lambda s: s.mode == "fp32" and not s.stage and not s.scales_autocast,
    ),
    Fault(
        "D36", "16-bit weights, several micro-batches, no grad_accum_dtype", "gradients are summed in 16 bits, where sums "
        "stagnate: a mean of 1.0 over 1024 micro-batches becomes 0.25", "avoid", _GRADS,
        lambda s: s.is_16_bit and s.accumulate > 1 and s.grad_accum in {None, s.mode},
    ),
    Fault(
        "D37", "fp32 weights with a 16-bit grad_accum_dtype at stages 1 and 3", "fp32 gradients are summed in 16 bits without "
        "scaling", "reject", "16-bit sums of fp32 gradients are rejected (HS223)",
        lambda s: s.mode == "fp32" and s.stage in _SUM_STAGES and s.grad_accum in {"fp16", "bf16"},
    ),
    Fault(
        "D38", "bf16 at stage 1 with fp32 accumulation, not offloaded", "another optimizer class (BF16_Optimizer) with no "
        "loss scaler and another checkpoint layout", "own", "Halfstep writes its own checkpoints and reads the class of "
        "the engine for the truth table", lambda s: s.is_bf16_optimizer,
    ),
    Fault(
        "D39", "bf16 at stages 1 and 3 with fp16 accumulation", "bf16 gradients lose their range in fp16: a sum above 65504 "
        "skips the step", "reject", "fp16 sums of bf16 gradients are rejected (HS222)",
        lambda s: s.mode == "bf16" and s.stage in _SUM_STAGES and s.grad_accum == "fp16",
    ),
    Fault(
        "D40", "16-bit weights, no communication_data_type", "gradients cross ranks in 16 bits, even if they were summed "
        "in fp32", "avoid", "writes communication_data_type from the policy's reduce: fp32 by default",
        lambda s: s.is_16_bit and s.communication is None,
    ),
    Fault(
        "D41", "bf16 weights with an fp16 communication_data_type", "unscaled bf16 gradients overflow or vanish in fp16",
        "reject", "fp16 reduction of unscaled gradients is rejected (HS222)",
        lambda s: s.mode == "bf16" and s.communication == "fp16",
    ),
    Fault(
        "D61", "torch_autocast without a dtype", "a GPU runs fp16 without any loss scaling", "reject",
        "autocast without a dtype is rejected (HS203)", lambda s: s.autocast == "default",
    ),
    Fault(
        "D62", "fp16 autocast with ZeRO and clipping", "the scaled gradient is clipped: updates are too small by about the "
        "scale", "own", _AUTOCAST, lambda s: s.scales_autocast and s.stage > 0 and s.clip > 0,
    ),
    Fault(
        "D63", "fp16 autocast with ZeRO, after an overflow", "0.19.8 skips every later step; up to 0.19.7 ranks end with "
        "different scales, and parts of the parameters are stepped", "own", _AUTOCAST,
        lambda s: s.scales_autocast and s.stage > 0,
    ),
    Fault(
        "D64", "fp16 autocast with ZeRO and several parameter groups", "the scale is updated once per group, and groups "
        "after one on which it grew are divided by another scale", "own", _AUTOCAST,
        lambda s: s.scales_autocast and s.stage > 0 and s.num_groups > 1,
    ),
    Fault(
        "D65", "fp16 autocast, after a resume", "the scale is not in the checkpoint and restarts at 65536", "own",
        "the state of Halfstep's scaler is in every checkpoint", lambda s: s.scales_autocast,
    ),
    Fault(
        "D66", "fp16 mode together with fp16 autocast", "the loss is scaled by one scaler and the gradient divided by "
        "both: updates are too small by the fp16 scale, and the reported norm is wrong", "reject", "two modes at once are rejected (HS202)",
        lambda s: s.mode == "fp16" and s.scales_autocast,
    ),
    Fault(
        "D83", "resume with changed fp16 settings or clipping", "the checkpoint silently overrides the new settings, at "
        "some stages only", "own", "it loads its own checkpoints: the Engine's max_norm applies, and a warning lists the scale settings that a "
        "checkpoint replaces",
        lambda s: s.mode == "fp16" or s.clip > 0,
    ),
)  # fmt: skip
