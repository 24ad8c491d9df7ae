"""The four precision modes of a DeepSpeed configuration, each as a preset and the settings that differ.

    fp16.enabled      fp16-lean    16-bit weights with a master, as in DeepSpeed's fp16 mode
    bf16.enabled      bf16-lean
    torch_autocast    fp16, bf16   16-bit compute over fp32 weights, scaled by torch's rule
    amp               by opt_level Apex, which DeepSpeed removed in 0.19.8

At most one may be enabled; without any the mode is fp32. DeepSpeed accepts several combinations that cannot train
(autocast without a dtype runs fp16 with no scaling, a hysteresis of 0 never lowers the scale): those raise here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from halfstep.errors import SettingError, unknown
from halfstep.precision.deepspeed_keys import Block, rejected
from halfstep.precision.loss_scale import LossScale
from halfstep.precision.names import FOREIGN

__all__ = ["TORCH_SCALE", "Mode", "read_mode"]

_MAX_POWER = 24  # 2**24 is where Halfstep stops raising the scale
# torch.amp.GradScaler's rule, which torch_autocast uses; Apex's scaler has the same one.
TORCH_SCALE: dict[str, Any] = {"semantics": "torch", "growth_interval": 2000}
_DYNAMIC_KEYS = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)
_OPT_LEVELS = {name: foreign.preset for name, foreign in FOREIGN.items() if foreign.source == "Apex"}
_NO_MASTER = (
    "read as master=none,grads={format}. Updates below half an ulp of a weight vanish; remove the key for an exact "
    "master at two bytes per weight."
)


@dataclass(frozen=True)
class Mode:
    """A preset, the settings that differ from it, and notes for the user."""

    preset: str
    settings: dict[str, str]
    notes: list[str]
    reduces: str = "fp32"  # the format in which DeepSpeed reduces gradients unless a key sets it


def read_mode(config: Mapping[str, Any], stage: int) -> Mode:
    """The precision mode of a configuration whose ZeRO stage is `stage`."""
    fp16, autocast, amp = (Block.of(config, name) for name in ("fp16", "torch_autocast", "amp"))
    bf16, notes = _bf16_block(config)
    if amp.values and not amp.flag("enabled"):
        notes.append("amp: disabled, but DeepSpeed 0.19.8 and later reject the block anyway; remove it.")
    if fp16.flag("auto_cast") and not fp16.flag("enabled"):
        reason = "fp16 is off, yet DeepSpeed casts inputs to fp16 and the forward pass fails; remove it"
        raise rejected("fp16.auto_cast", True, reason)
    readers = {
        "fp16": _read_fp16,
        "bf16": _read_bf16,
        "bfloat16": _read_bf16,
        "torch_autocast": _read_autocast,
        "amp": _read_amp,
    }
    enabled = [block for block in (fp16, bf16, autocast, amp) if block.flag("enabled")]
    if enabled == [bf16, autocast] and _autocast_format(autocast) == "bf16":
        notes.append("torch_autocast: redundant with bf16, where weights are already bf16.")
        enabled = [bf16]
    if len(enabled) > 1:
        names = " and ".join(block.path for block in enabled)
        raise SettingError(f"DeepSpeed blocks {names} are enabled together, but each is a separate mode; keep one.")
    if not enabled:
        return Mode("fp32", {}, notes)
    mode = readers[enabled[0].path](enabled[0], stage)
    return replace(mode, notes=notes + mode.notes)


def _bf16_block(config: Mapping[str, Any]) -> tuple[Block, list[str]]:
    new, old = Block.of(config, "bf16"), Block.of(config, "bfloat16")
    if new.values and old.values:
        raise SettingError("DeepSpeed keys bf16 and bfloat16 name the same block, and the second is lost; keep bf16.")
    if old.values:
        return old, ["bfloat16: DeepSpeed's old name for the block bf16."]
    return new, []


def _read_fp16(block: Block, stage: int) -> Mode:
    scale, notes = _fp16_loss_scale(block)
    settings = {"loss_scale": scale}
    if not stage:
        notes.append(
            "fp16: without ZeRO, DeepSpeed ignores hysteresis, and since 0.18.3 it does not scale the loss but still "
            "divides the gradients; Halfstep scales the loss and applies hysteresis."
        )
    if block.flag("auto_cast"):
        notes.append("fp16.auto_cast: not needed; the Engine's forward region casts the inputs of each operation.")
    if block.flag("fp16_master_weights_and_grads"):
        settings |= {"master": "none", "grads": "fp16"}
        notes.append(f"fp16.fp16_master_weights_and_grads: {_NO_MASTER.format(format='fp16')}")
    return Mode("fp16-lean", settings, notes, reduces="fp16")


def _fp16_loss_scale(block: Block) -> tuple[str, list[str]]:
    static = block.number("loss_scale")
    if not static:
        return _fp16_dynamic_scale(block)
    unused = ", ".join(block.present(*_DYNAMIC_KEYS))
    notes = [f"{unused}: no effect, because fp16.loss_scale={static:g} is static."] if unused else []
    return str(LossScale(mode="static", init_scale=static)), notes


def _fp16_dynamic_scale(block: Block) -> tuple[str, list[str]]:
    power, window, hysteresis = (block.whole(key) for key in ("initial_scale_power", "loss_scale_window", "hysteresis"))
    minimum = block.number("min_loss_scale")
    power, minimum = 16 if power is None else power, 1.0 if minimum is None else minimum
    if window == 0:
        raise rejected("fp16.loss_scale_window", 0, "it must be 1 or more clean steps; 1000 is usual")
    if hysteresis == 0:
        reason = (
            "the scale would never decrease, and every step after the first overflow would be skipped; use 1 or more"
        )
        raise rejected("fp16.hysteresis", 0, reason)
    if not 0 < minimum <= 2**_MAX_POWER:
        reason = f"it must be above 0 and at most 2^{_MAX_POWER}, Halfstep's largest scale; 1 is usual"
        raise rejected("fp16.min_loss_scale", minimum, reason)
    if 2 ** min(power, _MAX_POWER) < minimum:
        reason = f"2^{power} is below fp16.min_loss_scale={minimum:g}, so the first overflow would raise the scale"
        raise rejected("fp16.initial_scale_power", power, f"{reason}; raise the power or lower the minimum")
    notes = [
        "fp16: on a step where the scale grows, DeepSpeed halves the gradient; Halfstep divides by the scale it applied."
    ]
    if power > _MAX_POWER:
        cost = "every excess power of two costs a skipped step"
        notes.append(f"fp16.initial_scale_power={power}: read as {_MAX_POWER}, Halfstep's cap; {cost}.")
    if minimum != int(minimum):
        notes.append(f"fp16.min_loss_scale={minimum:g}: DeepSpeed itself accepts integers only.")
    scale = LossScale.dynamic(
        semantics="deepspeed-consecutive" if block.flag("consecutive_hysteresis") else "deepspeed",
        init_scale=2.0 ** min(power, _MAX_POWER),
        growth_interval=window or 1000,
        hysteresis=hysteresis or 2,
        min_scale=minimum,
    )
    return str(scale), notes


def _read_bf16(block: Block, _stage: int) -> Mode:
    settings, notes = {}, []
    master, states = block.flag("bf16_master_weights_and_grads"), block.flag("bf16_optimizer_states")
    if states and not master:
        reason = (
            "DeepSpeed accepts it only with bf16_master_weights_and_grads; to keep a master write states=bf16 instead"
        )
        raise rejected(block.where("bf16_optimizer_states"), True, f"{reason} in a policy")
    if master:
        settings = {"master": "none", "grads": "bf16"}
        notes.append(f"{block.where('bf16_master_weights_and_grads')}: {_NO_MASTER.format(format='bf16')}")
    if states:
        settings["states"] = "bf16"
    if not block.flag("check_grad_overflow", default=True):
        path = block.where("check_grad_overflow")
        notes.append(f"{path}=false: not read; Halfstep skips every step whose gradients are not finite.")
    if block.flag("immediate_grad_update"):
        path = block.where("immediate_grad_update")
        notes.append(f"{path}: not read; it changes when DeepSpeed accumulates gradients, not their values.")
    return Mode("bf16-lean", settings, notes, reduces="bf16")


def _autocast_format(block: Block) -> str:
    dtype = block.dtype("dtype")
    if dtype is None:
        reason = "it is missing, and DeepSpeed then runs fp16 on a GPU without loss scaling; write bfloat16 or float16"
        raise rejected("torch_autocast.dtype", None, reason)
    if dtype == "fp32":
        raise rejected(
            "torch_autocast.dtype", "fp32", "autocast to fp32 has no effect; write bfloat16 or disable the block"
        )
    return dtype


def _read_autocast(block: Block, stage: int) -> Mode:
    notes = []
    if block.present("lower_precision_safe_modules"):
        advice = "Halfstep casts per operation, as torch does; keep_fp32 makes exceptions"
        notes.append(f"torch_autocast.lower_precision_safe_modules: not read; {advice}.")
    dtype = _autocast_format(block)
    reduces = dtype if stage else "fp32"  # ZeRO reduces the gradients of linear layers and convolutions in this format
    if dtype == "bf16":
        return Mode("bf16", {}, notes, reduces)
    notes.append(
        "torch_autocast.dtype=fp16: scaled by torch's rule, as DeepSpeed does. Under ZeRO DeepSpeed also clips the "
        "scaled gradient, and in 0.19.8 skips every step after an overflow; Halfstep does neither."
    )
    return Mode("fp16", {"loss_scale": str(LossScale.dynamic(**TORCH_SCALE))}, notes, reduces)


def _read_amp(block: Block, stage: int) -> Mode:
    if stage:
        reason = f"Apex AMP does not work with ZeRO (stage {stage}); use the fp16 block, which is like opt_level O2"
        raise rejected("amp.enabled", True, reason)
    level = block.get("opt_level")
    level = "O1" if level is None else level  # Apex's default
    if not isinstance(level, str) or level not in _OPT_LEVELS:
        raise unknown("value for the DeepSpeed key amp.opt_level", level, _OPT_LEVELS)
    for key in (
        "cast_model_type",
        "patch_torch_functions",
        "keep_batchnorm_fp32",
        "master_weights",
        "cast_model_outputs",
    ):
        if block.get(key) is not None:
            raise rejected(
                block.where(key), block.get(key), "Halfstep has no counterpart of this Apex option; remove it"
            )
    preset = _OPT_LEVELS[level]
    notes = [f"amp.opt_level={level}: read as {preset}. Apex deleted amp in 2025, and DeepSpeed this block in 0.19.8."]
    if level == "O3":
        notes.append(
            "amp.opt_level=O3: a master and a dynamic scale are added, because small updates and gradients vanish without them."
        )
    without_effect = [
        "num_losses",
        "verbosity",
        *(["loss_scale", "min_loss_scale", "max_loss_scale"] if level == "O0" else []),
    ]
    if unused := ", ".join(block.present(*without_effect)):
        notes.append(f"{unused}: not read; Halfstep has at most one loss scale and its own log.")
    return Mode(preset, {} if level == "O0" else {"loss_scale": _amp_loss_scale(block)}, notes)


def _amp_loss_scale(block: Block) -> str:
    if block.get("loss_scale") not in (None, "dynamic"):
        static = block.number("loss_scale")
        if not static:
            raise rejected("amp.loss_scale", static, 'it must be "dynamic" or a number above 0')
        return str(LossScale(mode="static", init_scale=static))
    minimum, maximum = block.number("min_loss_scale"), block.number("max_loss_scale")
    minimum, maximum = 1.0 if minimum is None else minimum, 2.0**_MAX_POWER if maximum is None else maximum
    return str(LossScale.dynamic(**TORCH_SCALE, init_scale=min(2.0**16, maximum), min_scale=minimum, max_scale=maximum))
