"""Reads a DeepSpeed configuration into Halfstep's settings.

A configuration becomes the text of a policy, a clipping norm, a number of micro-batches, and notes. The
mode comes from `halfstep.precision.deepspeed_modes`, the treatment of each key from `halfstep.precision.deepspeed_keys`;
this module reads the settings that any mode may have. DeepSpeed has silent defaults in four places where Halfstep
differs, and a note names each:

    gradient_clipping           1.0 when omitted (0.19.3 and later); used here too
    data_types.grad_accum_dtype micro-batches are summed in 16 bits; Halfstep sums in fp32
    communication_data_type     gradients cross ranks in 16 bits; Halfstep uses fp32
    fp16                        the gradient is halved on the step where the scale grows; not reproduced

This module is below `halfstep.precision.policy`, which parses the text it returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import SettingError, unknown
from halfstep.precision.deepspeed_keys import NOT_READ, READ, REJECTED, Block, has_effect, rejected
from halfstep.precision.deepspeed_modes import Mode, read_mode
from halfstep.precision.deepspeed_optimizers import MAX_GRAD_NORM_EFFECT, ONE_BIT, one_bit_removed, one_bit_with_zero
from halfstep.precision.json_tree import load_json

__all__ = ["DeepSpeedSettings", "read_settings"]

_LEAN_OPTIMIZERS = ("adam", "adamw", "sgd", *ONE_BIT)


@dataclass(frozen=True)
class DeepSpeedSettings:
    """A DeepSpeed configuration as settings of Halfstep."""

    precision: str  # the text of a policy
    max_norm: float | None
    accumulate: int | None
    notes: tuple[str, ...]


def read_settings(config: Mapping[str, Any] | str | Path) -> DeepSpeedSettings:
    """Read a configuration: a dictionary, JSON text, or the path of a file."""
    values = load_json(config) if isinstance(config, str | Path) else config
    if not isinstance(values, Mapping):
        kind = type(values).__name__
        raise SettingError(f"A DeepSpeed configuration is a JSON object, not a {kind}; pass a dictionary or its file.")
    _check_names(values)
    top = Block("", values)
    stage, zero_notes = _zero_stage(values)
    mode = read_mode(values, stage)
    accumulate = _accumulate(top)
    grads, grads_notes = _gradients(Block.of(values, "data_types"), mode, accumulate)
    reduce, reduce_notes = _reduction(top, mode)
    optimizer = Block.of(values, "optimizer")
    max_norm, clip_notes = _clipping(top, optimizer)
    settings = mode.settings | grads | reduce
    text = ",".join([mode.preset, *(f"{key}={value}" for key, value in settings.items())])
    optimizer_notes = _optimizer(optimizer, mode.preset, stage)
    notes = [*mode.notes, *grads_notes, *reduce_notes, *clip_notes, *zero_notes, *optimizer_notes, *_set_aside(values)]
    return DeepSpeedSettings(text, max_norm, accumulate, tuple(notes))


def _check_names(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if key in REJECTED and has_effect(key, value):
            raise rejected(key, value, REJECTED[key])
        if key not in READ and key not in NOT_READ and key not in REJECTED:
            known = sorted({*READ, *NOT_READ})
            raise unknown("DeepSpeed key", key, known, "DeepSpeed would silently ignore it.")


def _zero_stage(config: Mapping[str, Any]) -> tuple[int, list[str]]:
    value = config.get("zero_optimization")
    if value is None or isinstance(value, bool):
        return int(bool(value)), []  # DeepSpeed's first form of the key: true is stage 1
    if not isinstance(value, Mapping):
        raise rejected("zero_optimization", value, 'it must be a block, such as {"stage": 2}')
    zero = Block("zero_optimization", value)
    stage = zero.whole("stage") or 0
    if stage > 3:
        raise rejected("zero_optimization.stage", stage, "it must be 0, 1, 2 or 3")
    quantised = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
    notes = [f"zero_optimization.stage={stage}: not read; sharding is up to the backend."] if stage else []
    quantised_keys = ", ".join(zero.where(key) for key in quantised if zero.flag(key))
    if quantised_keys:
        notes.append(f"{quantised_keys}: not reproduced; Halfstep does not quantise communication.")
    return stage, notes


def _accumulate(top: Block) -> int | None:
    steps = top.whole("gradient_accumulation_steps")
    if steps == 0:
        raise rejected("gradient_accumulation_steps", 0, "it must be 1 or more")
    if steps is not None:
        return steps
    # One batch size alone means one micro-batch; both leave the quotient to the number of ranks.
    return 1 if len(top.present("train_batch_size", "train_micro_batch_size_per_gpu")) == 1 else None


def _gradients(types: Block, mode: Mode, accumulate: int | None) -> tuple[dict[str, str], list[str]]:
    """The format gradients are summed in, when the configuration decides it."""
    weights = mode.preset.removesuffix("-lean") if mode.preset.endswith("-lean") else "fp32"
    summed, stored = types.dtype("grad_accum_dtype"), types.dtype("param_dtype")
    # Not get(): "auto" is a value of keep_in_fp32_modules.
    notes = [
        f"{path}: not read; Halfstep leaves buffers in the dtype they have."
        for path in types.present("buffer_dtype", "keep_in_fp32_modules")
    ]
    if stored not in {None, weights}:
        raise rejected("data_types.param_dtype", stored, f"this mode stores weights in {weights}; remove the key")
    if summed not in {None, "fp32", weights}:
        reason = f"gradients of {weights} weights would lose range or digits in it; use fp32 or remove the key"
        raise rejected("data_types.grad_accum_dtype", summed, reason)
    if summed is not None and summed != mode.settings.get("grads", summed):
        reason = f"{weights}_master_weights_and_grads requires {weights} gradients; remove one of the two keys"
        raise rejected("data_types.grad_accum_dtype", summed, reason)
    if weights == "fp32" or "grads" in mode.settings:
        return {}, notes
    if summed is None and accumulate != 1:
        default = f"DeepSpeed would sum micro-batches in {weights}, where sums stagnate; Halfstep sums in fp32"
        notes.append(f"data_types.grad_accum_dtype: not set. {default}.")
    # grads=auto is the weights' format for one micro-batch and fp32 for more: the same value needs no setting.
    automatic = None if accumulate is None else weights if accumulate == 1 else "fp32"
    return ({} if summed in {None, automatic} else {"grads": summed}), notes


def _reduction(top: Block, mode: Mode) -> tuple[dict[str, str], list[str]]:
    """The format gradients cross ranks in."""
    compute = mode.preset.removesuffix("-lean")
    operation = top.get("gradient_allreduce_op")
    if operation is not None and str(operation).casefold() != "mean":
        reason = "Halfstep averages over ranks; remove it, and multiply the learning rate or the loss by their number"
        raise rejected("gradient_allreduce_op", operation, reason)
    dtype = top.dtype("communication_data_type")
    if dtype == "fp16" and compute != "fp16":
        reason = f"{compute} gradients are not scaled, and overflow or vanish in fp16; use fp32 or bf16"
        raise rejected("communication_data_type", dtype, reason)
    if dtype is not None:
        return {"reduce": dtype}, []
    if mode.reduces == "fp32":
        return {}, []
    default = f"DeepSpeed would reduce gradients in {mode.reduces}; Halfstep reduces in fp32"
    return {}, [
        f"communication_data_type: not set. {default}. Add reduce={mode.reduces} to the policy for its traffic."
    ]


def _clipping(top: Block, optimizer: Block) -> tuple[float | None, list[str]]:
    norm, notes = top.number("gradient_clipping"), []
    params = optimizer.get("params")
    moved = Block("optimizer.params", params).number("max_grad_norm") if isinstance(params, Mapping) else None
    if moved is not None:
        action = "ignored, because gradient_clipping is set" if norm is not None else "read as gradient_clipping"
        notes.append(f"optimizer.params.max_grad_norm={moved:g}: {action}. {MAX_GRAD_NORM_EFFECT}")
        norm = moved if norm is None else norm
    if norm is not None:
        return norm or None, notes
    default = "Read as 1.0, DeepSpeed's default since 0.19.3; before that it was 0 (no clipping). Set it explicitly"
    return 1.0, [f"gradient_clipping: not set. {default}."]


def _optimizer(block: Block, preset: str, stage: int) -> list[str]:
    kind, params = block.get("type"), block.get("params")
    if not isinstance(kind, str | None) or not isinstance(params, Mapping | None):
        raise rejected(
            "optimizer", block.values, 'it must be a block such as {"type": "AdamW", "params": {"lr": 0.001}}'
        )
    if kind is None:
        return []
    name, notes = kind.casefold(), []
    if name in ONE_BIT and stage:
        raise rejected("optimizer.type", kind, one_bit_with_zero(stage))
    if name in ONE_BIT:
        notes.append(f"optimizer.type={kind}: {one_bit_removed(kind)}.")
    if name in ONE_BIT and not preset.startswith("fp16"):
        notes.append(f"optimizer.type={kind}: verified to converge under fp16 only.")
    advice = "pass your optimizer to the Engine"
    if name == "adam":
        advice += "; DeepSpeed's Adam is AdamW unless adam_w_mode is false"
    if preset.endswith("-lean") and name not in _LEAN_OPTIMIZERS:
        advice += f"; {preset} supports Adam, AdamW and SGD; use {preset.removesuffix('-lean')} with this one"
    return [*notes, f"optimizer.type={kind}: not read; {advice}."]


def _set_aside(config: Mapping[str, Any]) -> list[str]:
    """One note per reason, with all keys that it applies to."""
    reasons: dict[str, list[str]] = {}
    for key, reason in NOT_READ.items():
        if has_effect(key, config.get(key)):
            reasons.setdefault(reason, []).append(key)
    return [f"{', '.join(keys)}: not read; {reason}." for reason, keys in reasons.items()]
