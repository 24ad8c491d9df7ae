"""Writes the DeepSpeed configuration that trains as a policy specifies.

Every key that decides a number format or a norm is written, so that none is left to a default that changed between
releases: `gradient_clipping` is 0.0 where nothing is clipped (omitted, it is 1.0 since 0.19.3), sums over micro-batches
and ranks use the policy's `grads` and `reduce` (omitted, both are 16-bit). What DeepSpeed 0.19.8 cannot do is
rejected with the reason: the table `_LIMITS` lists all of it.

With `driver="halfstep"` the configuration is for Halfstep's backend, in which DeepSpeed partitions, gathers and reduces,
and Halfstep scales, clips, accumulates, casts, and runs stage 0 itself. DeepSpeed then divides by a scale of 1 and clips nothing.

Two things are equal in DeepSpeed and differ in a policy. Its master is an fp32 copy of the weights, which
`master=split` and `master=fp32` both mean; it is read back as `split`. `grads` is written as the format that it is
for this number of micro-batches; it is read back as `auto` where `auto` is that format.

This module is below `halfstep.precision.policy`, whose `Policy` has the fields of `_Formats`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

from halfstep.errors import SettingError, unknown
from halfstep.precision.deepspeed_modes import TORCH_SCALE
from halfstep.precision.loss_scale import LossScale

__all__ = ["DRIVERS", "Driver", "write_config"]

Driver = Literal["deepspeed", "halfstep"]
DRIVERS = ("deepspeed", "halfstep")
_STAGES = (0, 1, 2, 3)
_AUTOCAST_NAMES = {"bf16": "bfloat16", "fp16": "float16"}


class _Formats(Protocol):
    """The fields of a `halfstep.Policy`."""

    @property
    def params(self) -> str: ...
    @property
    def compute(self) -> str: ...
    @property
    def master(self) -> str: ...
    @property
    def states(self) -> str: ...
    @property
    def reduce(self) -> str: ...
    @property
    def residual(self) -> str: ...
    @property
    def keep_fp32(self) -> tuple[str, ...]: ...
    @property
    def compute_fp32(self) -> tuple[str, ...]: ...
    @property
    def scaling(self) -> LossScale: ...

    def grads_format(self, accumulate: int = 1) -> str:
        """The format gradients are stored in."""
        ...


class _Request(NamedTuple):
    """A policy and the settings next to it."""

    policy: _Formats
    stage: int
    accumulate: int
    offload: bool
    driver: Driver

    @property
    def grads(self) -> str:
        return self.policy.grads_format(self.accumulate)

    @property
    def is_lean(self) -> bool:
        return self.policy.params != "fp32"

    @property
    def is_autocast(self) -> bool:
        return self.policy.params == "fp32" and self.policy.compute in _AUTOCAST_NAMES

    @property
    def has_no_master(self) -> bool:
        return self.policy.master == "none"


def write_config(
    policy: _Formats,
    *,
    stage: int,
    max_norm: float | None,
    accumulate: int,
    batch_size: int,
    offload_optimizer: bool,
    driver: Driver,
) -> dict[str, Any]:
    """The configuration, as a dictionary for `deepspeed.initialize(config=...)` or `json.dump`."""
    if stage not in _STAGES or isinstance(stage, bool):
        raise SettingError(f"stage={stage!r} is not a ZeRO stage; use 0, 1, 2 or 3.")
    for name, count in (("accumulate", accumulate), ("batch_size", batch_size)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise SettingError(f"{name}={count!r} must be a whole number of at least 1.")
    if driver not in DRIVERS:
        raise unknown("driver", driver, DRIVERS)
    norm = _clipping(max_norm)
    request = _Request(policy, stage, accumulate, offload_optimizer, driver)
    for limit in _LIMITS if driver == "deepspeed" else _DRIVEN_LIMITS:
        if limit.applies(request):
            message = limit.message.format(r=request, p=policy)
            raise SettingError(f"A DeepSpeed configuration cannot express this policy: {message}")
    if driver == "halfstep":
        return _driven(request, batch_size)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": norm,
        "communication_data_type": policy.reduce,
        "data_types": {"grad_accum_dtype": request.grads},
        "zero_optimization": _zero(request),
    }
    return config | _mode(request)


def _driven(request: _Request, batch_size: int) -> dict[str, Any]:
    """What DeepSpeed gets where Halfstep scales, clips, accumulates and casts, and DeepSpeed partitions and reduces."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": 1,  # the Engine closes windows
        "gradient_clipping": 0.0,
        "communication_data_type": request.policy.reduce,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": _zero(request),
    }
    if request.policy.params == "bf16":
        config["bf16"] = {"enabled": True}
    if request.policy.params == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 1.0}  # DeepSpeed divides by 1, whatever Halfstep's scale is
    return config


def _clipping(max_norm: float | None) -> float:
    if max_norm is None:
        return 0.0
    is_number = isinstance(max_norm, int | float) and not isinstance(max_norm, bool)
    if not is_number or not math.isfinite(max_norm) or max_norm <= 0:
        raise SettingError(f"max_norm={max_norm!r} must be a finite number above 0, or None to not clip.")
    return float(max_norm)


def _zero(request: _Request) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": request.stage}
    if request.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return zero


def _mode(request: _Request) -> dict[str, Any]:
    policy = request.policy
    if request.is_autocast:
        block: dict[str, Any] = {"enabled": True, "dtype": _AUTOCAST_NAMES[policy.compute]}
        if request.stage and policy.reduce == "fp32":
            # With autocast, ZeRO ignores communication_data_type and reduces the gradients of these modules in 16 bits.
            block["lower_precision_safe_modules"] = []
        return {"torch_autocast": block}
    if policy.params == "bf16":
        bf16 = {"enabled": True}
        if request.has_no_master:
            bf16["bf16_master_weights_and_grads"] = True
        if policy.states == "bf16":
            bf16["bf16_optimizer_states"] = True
        return {"bf16": bf16}
    if policy.params == "fp16":
        fp16 = {"enabled": True, **_loss_scale(policy.scaling)}
        if request.has_no_master:
            fp16["fp16_master_weights_and_grads"] = True
        return {"fp16": fp16}
    return {}


def _loss_scale(scale: LossScale) -> dict[str, Any]:
    if scale.mode == "static":
        return {"loss_scale": scale.init_scale}
    return {
        "loss_scale": 0,
        "initial_scale_power": int(math.log2(scale.init_scale)),
        "loss_scale_window": scale.growth_interval,
        "hysteresis": scale.hysteresis,
        "consecutive_hysteresis": scale.semantics == "deepspeed-consecutive",
        "min_loss_scale": int(scale.min_scale),
    }


def _is_deepspeed_scale(scale: LossScale) -> bool:
    """Whether DeepSpeed's scaler follows the same rule with settings that its keys can express."""
    if scale.mode == "static":
        return True
    usual = LossScale()
    same = all(
        getattr(scale, name) == getattr(usual, name)
        for name in ("growth_factor", "backoff_factor", "max_scale", "max_skips")
    )
    is_power = math.frexp(scale.init_scale)[0] == 0.5 and scale.init_scale >= 1
    is_whole = float(scale.min_scale).is_integer()
    return scale.semantics in {"deepspeed", "deepspeed-consecutive"} and same and is_power and is_whole


class _Limit(NamedTuple):
    """Something a configuration cannot express: a test, and the reason with the remedy."""

    applies: Callable[[_Request], bool]
    message: str


_NO_FP8 = _Limit(
    lambda r: r.policy.compute == "fp8",
    "compute=fp8: DeepSpeed has no fp8 mode of its own. Use bf16-lean, which is bf16 there.",
)
_NO_8_BIT = _Limit(
    lambda r: r.policy.states == "8bit",
    "states=8bit: DeepSpeed has no 8-bit moments. Use states=fp32, or backend='fsdp' with halfstep.optim.",
)

# The first that applies is raised, so a cause is listed before its consequences.
_LIMITS = (
    _NO_FP8,
    _Limit(
        lambda r: r.policy.compute == "tf32",
        "compute=tf32: TF32 is a switch of the process, not a key. Use fp32 and call halfstep.set_tf32().",
    ),
    _Limit(
        lambda r: bool(r.policy.keep_fp32),
        "keep_fp32={p.keep_fp32}: DeepSpeed casts every weight (data_types.keep_in_fp32_modules is for buffers only). "
        "Omit it, or use backend='ddp' or 'fsdp'.",
    ),
    _Limit(
        lambda r: bool(r.policy.compute_fp32),
        "compute_fp32={p.compute_fp32}: no key makes single modules compute in fp32. Omit it, or let Halfstep's Engine drive: "
        "backend='deepspeed', 'ddp' or 'fsdp'.",
    ),
    _Limit(
        lambda r: r.policy.residual == "fp32",
        "residual=fp32: no key keeps the residual stream in fp32. Omit it, or use backend='ddp' or 'fsdp'.",
    ),
    _NO_8_BIT,
    _Limit(
        lambda r: r.policy.states == "bf16" and not (r.policy.params == "bf16" and r.has_no_master),
        "states=bf16 with master={p.master}: bf16_optimizer_states needs bf16_master_weights_and_grads, which has no "
        "fp32 master. Use states=fp32, or bf16-lean,master=none,grads=bf16,states=bf16.",
    ),
    _Limit(
        lambda r: r.offload and not r.stage,
        "offload_optimizer at stage 0: offloading is part of ZeRO. Use stage 1, 2 or 3.",
    ),
    _Limit(
        lambda r: r.has_no_master and not r.stage,
        "master=none at stage 0: 16-bit masters need ZeRO. Use stage 1, 2 or 3, or master=split.",
    ),
    _Limit(
        lambda r: r.has_no_master and r.grads != r.policy.params,
        "master=none with grads={r.grads}: the switch for 16-bit masters also stores gradients in {p.params}. Add "
        "grads={p.params}, or use master=split.",
    ),
    _Limit(
        lambda r: r.has_no_master and r.policy.states == "fp32" and not r.offload,
        "master=none with states=fp32: DeepSpeed allows it only with the optimizer offloaded to DeepSpeedCPUAdam. Pass "
        "offload_optimizer=True, or use master=split (bf16 also has states=bf16).",
    ),
    _Limit(
        lambda r: r.is_lean and not r.stage and r.grads != r.policy.params,
        "grads={r.grads} with {p.params} weights at stage 0: DeepSpeed raises NotImplementedError, because without ZeRO "
        "it sums gradients in the weights' format only (D35). Use stage 1, 2 or 3, or grads={p.params}.",
    ),
    _Limit(
        lambda r: r.policy.params == "fp16" and not r.stage,
        "fp16 weights at stage 0: since 0.18.3 DeepSpeed does not scale the loss there but divides the gradients by the "
        "scale (D11). Use stage 1, 2 or 3, or backend='ddp'.",
    ),
    _Limit(
        lambda r: r.policy.params == "bf16" and not r.stage,
        "bf16 weights at stage 0: DeepSpeed runs the optimizer once with zero gradients at initialization, which decays "
        "the weights and counts a step (D16). Use stage 1, 2 or 3, or backend='ddp'.",
    ),
    _Limit(
        lambda r: r.is_autocast and r.policy.compute == "fp16" and r.stage > 0,
        "fp16 autocast at stage {r.stage}: DeepSpeed clips the scaled gradients and in 0.19.8 skips every step after an "
        "overflow (D62, D63). Use fp16-lean or bf16, or stage 0.",
    ),
    _Limit(
        lambda r: r.is_autocast and r.policy.compute == "fp16" and r.policy.scaling != LossScale.dynamic(**TORCH_SCALE),
        "loss_scale={p.scaling} with fp16 autocast: DeepSpeed uses torch's GradScaler with its defaults. Write "
        "loss_scale=dynamic(semantics=torch;growth_interval=2000), or use fp16-lean.",
    ),
    _Limit(
        lambda r: r.policy.params == "fp16" and not _is_deepspeed_scale(r.policy.scaling),
        "loss_scale={p.scaling}: DeepSpeed's scaler has its own rule (semantics=deepspeed or deepspeed-consecutive, "
        "factors 2 and 0.5), starts at a power of two, and has a whole minimum; its keys cannot set max_scale or "
        "max_skips. Use loss_scale=dynamic or a number.",
    ),
)

# Where Halfstep drives, it can do more: any loss scale, TF32, autocast in fp16 and with exceptions.
_DRIVEN_LIMITS = (
    _NO_FP8,
    _NO_8_BIT,
    _Limit(
        lambda r: r.policy.states != "fp32",
        "states={p.states}: ZeRO's optimizer states are fp32, 1/N of them on each of N ranks. Use states=fp32.",
    ),
    _Limit(lambda r: r.has_no_master, "master=none: ZeRO steps fp32 masters. Omit master."),
    _Limit(
        lambda r: r.policy.grads_format(2) != "fp32",
        "grads={r.grads}: Halfstep sums gradients in fp32 partitions. Omit grads.",
    ),
    _Limit(
        lambda r: r.is_lean and bool(r.policy.keep_fp32),
        "keep_fp32={p.keep_fp32} with {p.params} weights: DeepSpeed casts every weight. Use precision={p.params}, whose "
        "weights are fp32, or backend='fsdp'.",
    ),
)
