"""What a DeepSpeed configuration asks for, in Halfstep's words.

A configuration becomes one line of policy text, a clipping norm and a number of micro-batches:

    fp16.enabled            fp16-lean    16-bit weights with a master: what DeepSpeed's fp16 mode does
    bf16.enabled            bf16-lean
    torch_autocast          fp16, bf16   16-bit compute over fp32 weights, scaled as torch does
    amp                     O0 to O3     Apex, which DeepSpeed 0.19.8 no longer has
    none of them            fp32

Every other key is read, set aside with a note, or refused (`halfstep.deepspeed_keys` has the list). Notes
also say where DeepSpeed would have done something else without being asked: its defaults differ from
Halfstep's in four places (clipping, the dtype of sums over micro-batches, the dtype of the reduction, the
step on which the scale grows), and its behaviour in a few is a defect that is not reproduced.

This module stands below `halfstep.policy` and gives it text, so that `Policy.from_deepspeed` can use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.deepspeed_keys import BLOCKS, NOT_READ, READ, REFUSED, Block, refuse
from halfstep.errors import SettingError, unknown
from halfstep.jsonc import load_json
from halfstep.lossscale import LossScale

__all__ = ["DeepSpeedSettings", "read_settings"]

_MAX_POWER = 24  # Halfstep's cap on the scale, 2**24
# torch.amp.GradScaler's rule, which torch_autocast uses; Apex's own scaler followed the same one.
_TORCH_SCALE: dict[str, Any] = {"semantics": "torch", "growth_interval": 2000}
_ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
_LEAN_OPTIMIZERS = ("adam", "adamw", "sgd")


@dataclass(frozen=True)
class DeepSpeedSettings:
    """A DeepSpeed configuration in Halfstep's words."""

    precision: str  # the text of a policy
    max_norm: float | None
    accumulate: int | None
    notes: tuple[str, ...]


def read_settings(config: Mapping[str, Any] | str | Path) -> DeepSpeedSettings:
    """Read a configuration given as a dictionary, JSON text, or the path of a file."""
    values = load_json(config) if isinstance(config, str | Path) else config
    if not isinstance(values, Mapping):
        raise SettingError(
            f"A DeepSpeed configuration is a JSON object, a dictionary or the path of a file, not {type(values).__name__}."
        )
    _check_names(values)
    notes: list[str] = []
    stage = _zero_stage(values, notes)
    preset, settings = _mode(values, stage, notes)
    top = Block("", values)
    accumulate = _accumulate(top)
    _gradients(values, preset, settings, accumulate, notes)
    _reduction(top, preset, settings, notes)
    max_norm = _clipping(top, notes)
    _optimizer(values, preset, stage, notes)
    _set_aside(values, notes)
    text = ",".join([preset, *(f"{key}={value}" for key, value in settings.items())])
    return DeepSpeedSettings(text, max_norm, accumulate, tuple(notes))


def _check_names(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if key in REFUSED and _asks(value):
            raise refuse(key, value, REFUSED[key])
        if key not in READ and key not in NOT_READ and key not in REFUSED:
            raise unknown("DeepSpeed key", key, sorted({*READ, *NOT_READ}), "DeepSpeed would ignore it without a word.")


def _asks(value: object) -> bool:
    """Whether a value that Halfstep does not read asks for anything."""
    if isinstance(value, Mapping):
        return bool(value) and value.get("enabled", True) is not False
    return value is not None and value is not False


def _zero_stage(config: Mapping[str, Any], notes: list[str]) -> int:
    value = config.get("zero_optimization")
    if value is None or isinstance(value, bool):
        return int(bool(value))  # DeepSpeed's first form of the key: true is stage 1
    if not isinstance(value, Mapping):
        raise refuse("zero_optimization", value, 'it must be a block, such as {"stage": 2}')
    zero = Block("zero_optimization", value)
    stage = zero.whole("stage") or 0
    if stage > 3:
        raise refuse("zero_optimization.stage", stage, "it must be 0, 1, 2 or 3")
    if stage:
        notes.append(f"zero_optimization.stage={stage}: not read; how ranks share the work is the backend's.")
    for key in ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"):
        if zero.flag(key):
            notes.append(f"{zero.where(key)}: not reproduced; Halfstep sends no quantised numbers between ranks.")
    return stage


def _mode(config: Mapping[str, Any], stage: int, notes: list[str]) -> tuple[str, dict[str, str]]:
    """The preset, and the settings that differ from it."""
    fp16 = Block.of(config, "fp16")
    bf16 = _bf16_block(config, notes)
    autocast, amp = Block.of(config, "torch_autocast"), Block.of(config, "amp")
    on = [block for block in (fp16, bf16, autocast, amp) if block.flag("enabled")]
    names = [block.path for block in on]
    if fp16.flag("auto_cast") and fp16 not in on:
        raise refuse(
            "fp16.auto_cast",
            value=True,
            reason="fp16 is off, but DeepSpeed casts inputs to fp16 all the same and the forward pass fails; remove it",
        )
    if "torch_autocast" in names and _autocast_dtype(autocast) == "bf16" and bf16 in on:
        notes.append("torch_autocast: adds nothing to bf16, where weights and inputs are bf16 already.")
        on.remove(autocast)
    if len(on) > 1:
        raise SettingError(
            f"DeepSpeed blocks {' and '.join(names)} are both enabled, and each is a precision mode of its own; keep one."
        )
    if amp.values and amp not in on:
        notes.append("amp: off, but DeepSpeed from 0.19.8 on refuses the block even so; remove it.")
    if not on:
        return "fp32", {}
    block = on[0]
    if block is fp16:
        return _fp16(fp16, stage, notes)
    if block is autocast:
        return _autocast(autocast, notes)
    return _amp(amp, stage, notes) if block is amp else _bf16(bf16, notes)


def _bf16_block(config: Mapping[str, Any], notes: list[str]) -> Block:
    new, old = Block.of(config, "bf16"), Block.of(config, "bfloat16")
    if new.values and old.values:
        raise SettingError(
            "DeepSpeed keys bf16 and bfloat16 are one block under two names, and DeepSpeed drops the second; keep bf16."
        )
    if old.values:
        notes.append("bfloat16: DeepSpeed's old name for the block bf16.")
    return old if old.values else new


def _fp16(block: Block, stage: int, notes: list[str]) -> tuple[str, dict[str, str]]:
    settings = {"loss_scale": _fp16_loss_scale(block, stage, notes)}
    if block.flag("auto_cast"):
        notes.append("fp16.auto_cast: not needed; the Engine's forward region casts what an operation takes.")
    if block.flag("fp16_master_weights_and_grads"):
        settings |= {"master": "none", "grads": "fp16"}
        notes.append(
            "fp16.fp16_master_weights_and_grads: read as master=none,grads=fp16. Updates below half an ulp of a weight "
            "vanish; remove the key for an exact master at two bytes per weight."
        )
    return "fp16-lean", settings


def _fp16_loss_scale(block: Block, stage: int, notes: list[str]) -> str:
    static = block.number("loss_scale")
    if static:
        unused = block.given(
            "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale"
        )
        if unused:
            notes.append(f"{', '.join(unused)}: no effect, because fp16.loss_scale={static:g} is static.")
        return str(LossScale(mode="static", init_scale=static))
    power, window, hysteresis = (block.whole(k) for k in ("initial_scale_power", "loss_scale_window", "hysteresis"))
    floor = block.number("min_loss_scale")
    power = 16 if power is None else power
    floor = 1.0 if floor is None else floor
    if window == 0:
        raise refuse("fp16.loss_scale_window", 0, "it divides by the window; use 1 or more, 1000 is usual")
    if hysteresis == 0:
        raise refuse(
            "fp16.hysteresis",
            0,
            "DeepSpeed would never lower the scale and skip every step from the first overflow on; use 1 or more",
        )
    if not 0 < floor <= 2**_MAX_POWER:
        raise refuse(
            "fp16.min_loss_scale",
            floor,
            f"it must lie above 0 and not above 2^{_MAX_POWER}, where Halfstep stops raising the scale; 1 is usual",
        )
    if power > _MAX_POWER:
        notes.append(
            f"fp16.initial_scale_power={power}: read as {_MAX_POWER}, Halfstep's cap; every power of two too many costs one skipped step."
        )
        power = _MAX_POWER
    if 2**power < floor:
        raise refuse(
            "fp16.initial_scale_power",
            power,
            f"2^{power} is below fp16.min_loss_scale={floor:g}, so the first overflow would raise the scale; raise it or lower the floor",
        )
    if not stage:
        notes.append(
            "fp16: without ZeRO, DeepSpeed ignores hysteresis, and from 0.18.3 on it does not scale the loss though it "
            "divides the gradients; Halfstep scales and applies hysteresis."
        )
    notes.append(
        "fp16: on the step where the scale grows DeepSpeed halves the gradient; Halfstep divides by the scale it used."
    )
    semantics = "deepspeed-consecutive" if block.flag("consecutive_hysteresis") else "deepspeed"
    return str(
        LossScale.dynamic(
            semantics=semantics,
            init_scale=2.0**power,
            growth_interval=window or 1000,
            hysteresis=hysteresis or 2,
            min_scale=floor,
        )
    )


def _bf16(block: Block, notes: list[str]) -> tuple[str, dict[str, str]]:
    settings: dict[str, str] = {}
    master, states = block.flag("bf16_master_weights_and_grads"), block.flag("bf16_optimizer_states")
    if states and not master:
        raise refuse(
            block.where("bf16_optimizer_states"),
            value=True,
            reason="DeepSpeed takes it only with bf16_master_weights_and_grads; for bf16 moments with a master write states=bf16 in the policy",
        )
    if master:
        settings = {"master": "none", "grads": "bf16"}
        notes.append(
            f"{block.where('bf16_master_weights_and_grads')}: read as master=none,grads=bf16. Updates below half an ulp of a "
            "weight vanish; remove the key for an exact master at two bytes per weight."
        )
    if states:
        settings["states"] = "bf16"
    if not block.flag("check_grad_overflow", default=True):
        notes.append(
            f"{block.where('check_grad_overflow')}=false: not read; Halfstep skips every step whose gradients are not finite."
        )
    if block.flag("immediate_grad_update"):
        notes.append(
            f"{block.where('immediate_grad_update')}: not read; it changes when DeepSpeed adds gradients, not their values."
        )
    return "bf16-lean", settings


def _autocast_dtype(block: Block) -> str | None:
    dtype = block.dtype("dtype")
    if dtype is None:
        raise refuse(
            "torch_autocast.dtype",
            None,
            "it is missing, and DeepSpeed then runs fp16 on a GPU with no loss scaling; write bfloat16 or float16",
        )
    if dtype == "fp32":
        raise refuse(
            "torch_autocast.dtype",
            block.values["dtype"],
            "autocast to fp32 has no effect; write bfloat16 or float16, or disable the block",
        )
    return dtype


def _autocast(block: Block, notes: list[str]) -> tuple[str, dict[str, str]]:
    dtype = _autocast_dtype(block)
    if block.given("lower_precision_safe_modules"):
        notes.append(
            "torch_autocast.lower_precision_safe_modules: not read; Halfstep casts by operation, as torch does. Use keep_fp32 for exceptions."
        )
    if dtype == "bf16":
        return "bf16", {}
    notes.append(
        "torch_autocast.dtype=fp16: scaled by torch's rule, which is DeepSpeed's choice here. Under ZeRO it clips the scaled "
        "gradient and stays stuck after an overflow (0.19.8); Halfstep does neither."
    )
    return "fp16", {"loss_scale": str(LossScale.dynamic(**_TORCH_SCALE))}


def _amp(block: Block, stage: int, notes: list[str]) -> tuple[str, dict[str, str]]:
    if stage:
        raise refuse(
            "amp.enabled",
            value=True,
            reason=f"Apex AMP does not work with ZeRO (stage {stage}); use the fp16 block, which is like opt_level O2",
        )
    level = block.get("opt_level")
    presets = {"O0": "fp32", "O1": "fp16", "O2": "fp16-lean", "O3": "fp16-lean"}
    level = "O1" if level is None else level
    if level not in presets if isinstance(level, str) else True:
        raise unknown("value for amp.opt_level", level, presets)
    overrides = block.given(
        "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "cast_model_outputs"
    )
    if overrides:
        raise SettingError(
            f"DeepSpeed key {overrides[0]}: Halfstep has no counterpart of this part of Apex; remove it, or write a policy."
        )
    added = " with a master added, as updates below half an ulp of a weight vanish without one" if level == "O3" else ""
    notes.append(
        f"amp.opt_level={level}: read as {presets[level]}{added}. Apex deleted amp in 2025, DeepSpeed 0.19.8 the block."
    )
    unused = block.given("num_losses", "verbosity")
    if unused:
        notes.append(f"{', '.join(unused)}: not read; Halfstep has one loss scale and its own log.")
    return presets[level], {} if level == "O0" else {"loss_scale": _amp_loss_scale(block)}


def _amp_loss_scale(block: Block) -> str:
    value = block.get("loss_scale")
    if value is not None and value != "dynamic":
        static = block.number("loss_scale")
        if not static:
            raise refuse("amp.loss_scale", value, 'it must be "dynamic" or above 0')
        return str(LossScale(mode="static", init_scale=static))
    bounds = {"min_scale": block.number("min_loss_scale"), "max_scale": block.number("max_loss_scale")}
    return str(
        LossScale.dynamic(**_TORCH_SCALE, **{name: bound for name, bound in bounds.items() if bound is not None})
    )


def _accumulate(top: Block) -> int | None:
    steps = top.whole("gradient_accumulation_steps")
    if steps == 0:
        raise refuse("gradient_accumulation_steps", 0, "it must be 1 or more")
    if steps is not None:
        return steps
    # One batch size alone means one micro-batch; both leave the quotient to the number of ranks.
    return 1 if len(top.given("train_batch_size", "train_micro_batch_size_per_gpu")) == 1 else None


def _gradients(
    config: Mapping[str, Any], preset: str, settings: dict[str, str], accumulate: int | None, notes: list[str]
) -> None:
    types = Block.of(config, "data_types")
    weights = preset.removesuffix("-lean") if preset.endswith("-lean") else "fp32"
    summed, stored = types.dtype("grad_accum_dtype"), types.dtype("param_dtype")
    if stored is not None and stored != weights:
        raise refuse(
            "data_types.param_dtype", stored, f"the precision mode stores weights in {weights}; remove the key"
        )
    if summed is not None and summed not in {"fp32", weights}:
        raise refuse(
            "data_types.grad_accum_dtype",
            summed,
            f"gradients of {weights} weights would lose range or digits in it; use fp32 or remove the key",
        )
    if summed is not None and weights != "fp32":
        settings["grads"] = summed
    if summed is None and weights != "fp32" and accumulate != 1 and "grads" not in settings:
        notes.append(
            f"data_types.grad_accum_dtype: not set, so DeepSpeed would sum micro-batches in {weights}, where sums stop growing; Halfstep sums in fp32."
        )
    for path in types.given("buffer_dtype", "keep_in_fp32_modules"):
        notes.append(f"{path}: not read; Halfstep leaves buffers in the dtype they have.")


def _reduction(top: Block, preset: str, settings: dict[str, str], notes: list[str]) -> None:
    dtype = top.dtype("communication_data_type")
    compute = preset.removesuffix("-lean")
    if dtype == "fp16" and compute != "fp16":
        raise refuse(
            "communication_data_type",
            "fp16",
            f"{compute} gradients are not scaled and overflow or vanish in fp16; use fp32 or bf16",
        )
    if dtype is not None:
        settings["reduce"] = dtype
    elif preset.endswith("-lean"):
        notes.append(
            f"communication_data_type: not set, so DeepSpeed would reduce gradients in {compute}; Halfstep reduces in fp32. Write reduce={compute} for less traffic."
        )
    if (operation := top.get("gradient_allreduce_op")) not in {None, "mean"}:
        raise refuse(
            "gradient_allreduce_op",
            operation,
            "Halfstep averages gradients over ranks; remove it and multiply the learning rate or the loss by the number of ranks",
        )


def _clipping(top: Block, notes: list[str]) -> float | None:
    norm = top.number("gradient_clipping")
    if norm is None:
        notes.append(
            "gradient_clipping: not set; read as 1.0, DeepSpeed's default from 0.19.3 on (before it was 0, no clipping). Set it."
        )
        return 1.0
    return norm or None


def _optimizer(config: Mapping[str, Any], preset: str, stage: int, notes: list[str]) -> None:
    block = Block.of(config, "optimizer")
    kind, params = block.get("type"), block.get("params")
    if isinstance(params, Mapping) and params.get("max_grad_norm") is not None:
        raise refuse(
            "optimizer.params.max_grad_norm",
            params["max_grad_norm"],
            "DeepSpeed has zeroed, ignored or refused it, by version; write gradient_clipping",
        )
    if kind is None:
        return
    name = str(kind).casefold()
    if name in _ONE_BIT and stage:
        raise refuse(
            "optimizer.type",
            kind,
            f"1-bit optimizers need whole momenta and ZeRO stage {stage} shards them; use stage 0",
        )
    if name in _ONE_BIT and not preset.startswith("fp16"):
        notes.append(f"optimizer.type={kind}: its convergence was verified under fp16 only.")
    advice = "give the Engine the optimizer you built"
    if name == "adam":
        advice += "; DeepSpeed's Adam is AdamW unless adam_w_mode is false"
    if preset.endswith("-lean") and name not in (*_LEAN_OPTIMIZERS, *_ONE_BIT):
        advice += f"; {preset} takes Adam, AdamW or SGD, so use {preset.removesuffix('-lean')} with this one"
    notes.append(f"optimizer.type={kind}: not read; {advice}.")


def _set_aside(config: Mapping[str, Any], notes: list[str]) -> None:
    """One note for all keys that the same part of Halfstep, or of the program, answers for."""
    reasons: dict[str, list[str]] = {}
    for key, reason in NOT_READ.items():
        if key in config and _asks(config[key]):
            reasons.setdefault(reason, []).append(key)
    notes.extend(f"{', '.join(keys)}: not read; {reason}." for reason, keys in reasons.items())
