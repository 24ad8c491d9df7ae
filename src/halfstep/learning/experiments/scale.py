"""Scale: number of GPUs by the planner, and DeepSpeed's rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from halfstep.backends.context import RunContext
from halfstep.check.deepspeed import check_deepspeed
from halfstep.errors import SettingError
from halfstep.jobs.targets import load_target
from halfstep.kernels.signs.signs import pack_signs, unpack_signs
from halfstep.learning.experiment import Outcome, Reading
from halfstep.learning.experiments.clipping import update_norm
from halfstep.optim import OneBitAdam
from halfstep.planning.batches import look_at_data
from halfstep.planning.capacity import capacity_of
from halfstep.planning.estimator import Estimator
from halfstep.planning.sharding import GROUP, layout_of, per_gpu
from halfstep.precision.deepspeed_optimizers import MAX_GRAD_NORM_EFFECT
from halfstep.precision.policy import Policy, read_deepspeed

__all__ = ["eight_to_four", "max_grad_norm", "one_bit", "zero_and_amp"]

_GLOBAL_BATCH = 896
_GPU = "A100 40GB"
# Precision, and numbers of GPUs to plan: the lesson's 8; the claimed minimum, and the next smaller number where it must not fit. Fewer
# GPUs need more memory on each, so one that does not fit proves the minimum. Each number takes seconds.
_PLANNED = (("fp32", (8,)), ("bf16", (5, 4)), ("bf16-lean", (4,)))


def eight_to_four() -> Outcome:
    """Memory on each GPU at the numbers that decide, planned on fake tensors."""
    job, capacity = load_target("vit_l_16").job, capacity_of(_GPU, None)
    assert capacity is not None
    usable, batches = capacity.usable_bytes, look_at_data(job, RunContext())
    readings = [Reading("usable on each GPU", usable, f"{usable / 2**30:.1f} GiB")]
    fits: dict[tuple[str, int], bool] = {}
    for precision, counts in _PLANNED:
        estimator = Estimator(job, Policy.parse(precision), batches=batches, usable_bytes=usable)
        for num_gpus in counts:
            batch = -(-_GLOBAL_BATCH // num_gpus)
            traced = estimator.trace(batch)
            layout = layout_of(estimator.policy, traced.parts, traced.units, traced.buckets, 1, traced.compressed)
            need = sum(per_gpu(estimator.at(batch).least, layout, "ddp", num_gpus, GROUP).values())
            fits[precision, num_gpus] = need <= usable
            verdict = "fits" if need <= usable else "too large"
            readings.append(
                Reading(f"{precision} on {num_gpus} GPUs x {batch}", need, f"{need / 2**30:.1f} GiB: {verdict}")
            )
    expected = {(name, num): num == counts[0] for name, counts in _PLANNED for num in counts}
    return Outcome(
        tuple(readings),
        fits == expected,
        "The lesson's 8 to 4 is not autocast's: it shrinks activations to about 0.56 and leaves 16 bytes per parameter, so 5 GPUs are needed. "
        "A lean preset, whose weights and residual stream are 16-bit, fits on 4. (Predicted, full copy on each GPU; "
        "`halfstep plan vit_l_16 --batch 896 --gpu 'A100 40GB'` has all strategies.)",
    )


def zero_and_amp() -> Outcome:
    """How Halfstep reads DeepSpeed configurations with Apex AMP, with ZeRO, and with both."""
    zero, amp, fp16 = {"zero_optimization": {"stage": 1}}, {"amp": {"enabled": True}}, {"fp16": {"enabled": True}}
    configurations: dict[str, dict[str, Any]] = {
        "amp and ZeRO": {**amp, **zero},
        "amp alone": amp,
        "fp16 and ZeRO": {**fp16, **zero},
    }
    read = {name: _read(config) for name, config in configurations.items()}
    readings = tuple(
        Reading(name, policy or "rejected", policy or f"rejected: {reason}") for name, (policy, reason) in read.items()
    )
    o2 = str(Policy.parse("O2"))
    mode = read["fp16 and ZeRO"][0]
    return Outcome(
        (*readings, Reading("Apex O2 in Halfstep", o2)),
        not read["amp and ZeRO"][0] and bool(read["amp alone"][0]) and mode.partition(",")[0] == o2.partition(",")[0],
        "DeepSpeed was not run here: this is how Halfstep reads its configurations. AMP and ZeRO both want to own the gradients and the loss scale. DeepSpeed asserts up to 0.19.7 and removed Apex AMP in 0.19.8. Its fp16 mode "
        "stores 16-bit weights with a master, as O2 did, and combines with ZeRO.",
    )


def _read(config: dict[str, Any]) -> tuple[str, str]:
    """The preset and settings of a configuration, or the reason why it is rejected."""
    try:
        return str(read_deepspeed({"train_batch_size": 8, **config}).policy), ""
    except SettingError as error:
        return "", str(error)


def one_bit() -> Outcome:
    """A step of 1-bit Adam in fp16, bf16 and fp32, and the size and error of its messages."""
    answers = {}
    for compute in ("fp16", "bf16", "fp32"):
        try:
            layer = nn.Linear(4, 4)
            layer(torch.ones(1, 4)).sum().backward()
            OneBitAdam(layer.parameters(), lr=1e-3, freeze_step=10, compute=compute).step()
            answers[compute] = "accepted"
        except SettingError as error:
            answers[compute] = f"rejected: {str(error).partition('. ')[0]}"
    values = torch.randn(8192)
    packed = pack_signs(values)
    ratio = values.numel() * 4 / packed.numel()
    lost = total = torch.zeros(8192)
    for _ in range(200):  # the same value sent 200 times, with what was lost added to the next message
        message = values + lost
        sent = message.abs().mean() * unpack_signs(pack_signs(message))
        lost, total = message - sent, total + sent
    once = float((values.abs().mean() * unpack_signs(packed) - values).norm() / values.norm())
    mean = float((total / 200 - values).norm() / values.norm())
    readings = (
        *(Reading(f"OneBitAdam, compute={name}", text.partition(":")[0], text) for name, text in answers.items()),
        Reading("fp32 bytes / bytes of the signs", ratio, f"{ratio:.0f}"),
        Reading("relative error of one message", once, f"{once:.2f}"),
        Reading("relative error of the mean of 200, with feedback", mean, f"{mean:.3f}"),
    )
    return Outcome(
        readings,
        [text == "accepted" for text in answers.values()] == [True, False, False] and ratio == 32 and mean < 0.1 * once,
        "One bit per element and one scale: a single message is wrong by more than half, but what it lost is added to the next, and "
        "the mean is right. That its convergence is verified in fp16 only is what its papers and DeepSpeed state, and no part of this experiment; elsewhere pass allow_unverified=True and compare.",
    )


def max_grad_norm() -> Outcome:
    """What `halfstep check` reports about max_grad_norm by DeepSpeed's version, and clipped updates by the Engine."""
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}}
    codes = {
        version: ", ".join(f.code for f in check_deepspeed(config, version=version) if "max_grad_norm" in f.message)
        for version in ("0.19.5", "0.19.8")
    }
    norms = {precision: update_norm(precision) for precision in ("fp32", "bf16", "fp16")}
    readings = [Reading(f"halfstep check, DeepSpeed {version}", code or "nothing") for version, code in codes.items()]
    readings += [
        Reading(f"norm of an update, Engine, {name}, max_norm=1", norm, f"{norm:.4f}") for name, norm in norms.items()
    ]
    return Outcome(
        tuple(readings),
        all("HS241" in code for code in codes.values()) and all(abs(norm - 1) < 0.02 for norm in norms.values()),
        f"The tips: fp32 mode silently sets it to 0. DeepSpeed was not run here; recorded on 0.19.6 and 0.19.8: {MAX_GRAD_NORM_EFFECT} The Engine's "
        "max_norm clips the true gradient in fp32, bf16 and fp16 alike.",
    )
