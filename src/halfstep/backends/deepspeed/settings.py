"""The configuration that DeepSpeed gets: ZeRO as the user asks for it, everything about precision as the policy decides.

Halfstep scales, clips, accumulates and schedules, so the keys for these are fixed: a static loss scale of 1, no clipping, one
micro-batch per step, sums and reductions in the policy's formats. A key of the user's that would decide the same
thing otherwise is an error; one that agrees, or has no effect here, is dropped with a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfstep.errors import SettingError
from halfstep.events import log_once
from halfstep.precision.json_tree import load_json
from halfstep.precision.policy import Policy

__all__ = ["engine_config", "read_config", "stage_of"]

_DEFAULT_STAGE = 2
_BLOCKS = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16", "torch_autocast": None, "amp": None}
_OWNED = {  # keys that have no effect here, and what to use instead
    "optimizer": "the optimizer that is passed to Engine(...) is used",
    "scheduler": "pass Engine(scheduler=...)",
    "train_batch_size": "batches come from your loop",
    "train_micro_batch_size_per_gpu": "batches come from your loop",
    "steps_per_print": "Halfstep logs the steps",
}
_NEVER = {  # keys of zero_optimization that the backend cannot carry out, by the value that asks for nothing
    "offload_optimizer": "gradients and states would be on the CPU, where this backend does not read them",
    "offload_param": "weights would be on the CPU between uses",
    "zero_quantized_gradients": "gradients would be quantised before they are averaged",
    "zero_quantized_weights": "weights would be quantised when they are gathered",
    "zenflow": "it steps a part of the parameters at other times",
}
_NAMES = {
    "fp32": "fp32", "float32": "fp32", "fp16": "fp16", "half": "fp16", "float16": "fp16", "bf16": "bf16", "bfloat16": "bf16",
    "torch.float16": "fp16", "torch.bfloat16": "bf16",
}  # fmt: skip


def read_config(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """A configuration as a dictionary: of a dictionary, the path of a JSON file, or nothing."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    values = load_json(Path(config))
    if not isinstance(values, dict):
        raise SettingError(f"DeepSpeed(config={str(config)!r}) has a {type(values).__name__}, not an object of keys.")
    return values


def stage_of(config: Mapping[str, Any], stage: int | None) -> int:
    """The ZeRO stage: the argument, the configuration's, or 2."""
    own = _block(config, "zero_optimization").get("stage")
    if stage is not None and own is not None and stage != own:
        raise SettingError(f"DeepSpeed(stage={stage}), but the configuration has zero_optimization.stage={own}.")
    chosen = stage if stage is not None else own if own is not None else _DEFAULT_STAGE
    if isinstance(chosen, bool) or chosen not in (0, 1, 2, 3):
        raise SettingError(f"ZeRO stage {chosen!r} must be 0, 1, 2 or 3.")
    return int(chosen)


def engine_config(
    config: Mapping[str, Any], policy: Policy, stage: int, *, max_norm: float | None, accumulate: int
) -> dict[str, Any]:
    """What `deepspeed.initialize` gets; raises for keys that contradict the Engine."""
    rest = dict(config)
    _check_precision(rest, policy)
    _check_number(rest, "gradient_clipping", max_norm or 0.0, f"Engine(max_norm={max_norm})")
    _check_number(rest, "gradient_accumulation_steps", accumulate, f"Engine(accumulate={accumulate})")
    _check_formats(rest, policy)
    for key, instead in _OWNED.items():
        if rest.pop(key, None) is not None:
            log_once(f"DeepSpeed's {key} has no effect under the Engine: {instead}.")
    zero = dict(_block(rest, "zero_optimization"))
    for key, reason in _NEVER.items():
        value = zero.get(key)
        if value and not (isinstance(value, Mapping) and value.get("device", "none") == "none"):
            raise SettingError(f'zero_optimization.{key} does not work with backend="deepspeed": {reason}. Remove it.')
        zero.pop(key, None)
    zero["stage"] = stage
    if stage == 1 and zero.get("overlap_comm"):
        log_once("DeepSpeed's overlap_comm is off at stage 1: gradients are reduced when a window closes.")
    if stage == 1:
        zero["overlap_comm"] = False
    decided: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # `checks` decides which optimizers may be divided
        "data_types": {**_block(rest, "data_types"), "grad_accum_dtype": "fp32"},
        "communication_data_type": policy.reduce,
    }
    if policy.params == "bf16":
        decided["bf16"] = {"enabled": True}
    if policy.params == "fp16":
        # Halfstep's scaler multiplies the loss; DeepSpeed divides by 1 whatever the scaler does (no halving when it grows).
        decided["fp16"] = {"enabled": True, "loss_scale": 1.0}
    return rest | decided


def _block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    block = config.get(key) or {}
    if not isinstance(block, Mapping):
        raise SettingError(f"DeepSpeed's {key} must be an object of keys, not {block!r}.")
    return block


def _check_precision(config: dict[str, Any], policy: Policy) -> None:
    """Drop the blocks about precision; raise for one that asks for another than the policy."""
    for key, weights in _BLOCKS.items():
        block = config.pop(key, None)
        if not (isinstance(block, Mapping) and block.get("enabled") is True):
            continue
        cast = key == "torch_autocast" and _NAMES.get(str(block.get("dtype")), policy.compute)
        if weights != policy.params if weights else policy.is_lean or cast != policy.compute:
            advice = f'precision="{weights}-lean"' if weights else 'precision="bf16" or "fp16", which autocast'
            raise SettingError(
                f"DeepSpeed's {key}.enabled asks for another precision than {policy}, which the Engine decides. Use {advice}, or remove the "
                "block; Policy.from_deepspeed(config) reads it."
            )
        log_once(f"DeepSpeed's {key} block is replaced by the Engine's precision {policy}.")


def _check_number(config: dict[str, Any], key: str, own: float, setting: str) -> None:
    value = config.pop(key, None)
    if value not in (None, "auto") and value != own:
        raise SettingError(
            f"DeepSpeed's {key}={value!r}, but {setting}. The Engine decides it: write the same value there, or remove the key."
        )


def _check_formats(config: dict[str, Any], policy: Policy) -> None:
    """Raise for formats of sums and reductions that are not the policy's."""
    reduction = config.pop("communication_data_type", None)
    if reduction not in (None, "auto") and _NAMES.get(str(reduction)) != policy.reduce:
        raise SettingError(
            f"DeepSpeed's communication_data_type={reduction!r}, but the precision reduces in {policy.reduce}. Write "
            f"{policy},reduce={_NAMES.get(str(reduction), 'fp32')} in the precision, or remove the key."
        )
    sums = _block(config, "data_types").get("grad_accum_dtype")
    if sums not in (None, "auto") and _NAMES.get(str(sums)) != "fp32":
        raise SettingError(
            f"DeepSpeed's data_types.grad_accum_dtype={sums!r} adds gradients up in 16 bits, where sums stagnate; remove it, and they are fp32."
        )
