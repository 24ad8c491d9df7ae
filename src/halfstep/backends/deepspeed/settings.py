"""The configuration that DeepSpeed gets: ZeRO as the user asks for it, everything about precision as the policy decides.

`merge_deepspeed` checks the user's keys with the HS2xx rules and merges them with `Policy.to_deepspeed`. Halfstep scales,
clips, accumulates and schedules, so the keys for these are fixed: a static loss scale of 1, no clipping, one micro-batch
per step, sums and reductions in the policy's formats. A key that contradicts an argument of the Engine is an error; a caller
that has resolved such differences itself, as `halfstep train` does, passes the `Merged` result instead. What is decided
instead of the user's keys is logged, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfstep.check.deepspeed import TESTED_VERSION, merge_deepspeed
from halfstep.errors import SettingError
from halfstep.events import log_once
from halfstep.precision.deepspeed_keys import is_auto
from halfstep.precision.deepspeed_merge import Decision, Merged
from halfstep.precision.formats import canonical_name
from halfstep.precision.json_tree import load_json
from halfstep.precision.policy import Policy

__all__ = ["check_zero", "engine_config", "log_decisions", "read_config", "stage_of"]

_DEFAULT_STAGE = 2  # without a configuration
_BLOCKS = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16", "torch_autocast": None}
_NEVER = {  # keys of zero_optimization that the backend cannot carry out
    "offload_param": "weights would be on the CPU between uses",
    "zero_quantized_gradients": "gradients would be quantised before they are averaged",
    "zero_quantized_weights": "weights would be quantised when they are gathered",
    "zenflow": "it steps a part of the parameters at other times",
}


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
    """The ZeRO stage: the argument, or the configuration's; 2 where there is neither.

    A configuration without `zero_optimization` is stage 0, as in DeepSpeed.
    """
    block = config.get("zero_optimization")
    own = int(block) if isinstance(block, bool) else _block(config, "zero_optimization").get("stage")
    if stage is not None and own is not None and stage != own:
        raise SettingError(f"DeepSpeed(stage={stage}), but the configuration has zero_optimization.stage={own}.")
    usual = 0 if config else _DEFAULT_STAGE
    chosen = stage if stage is not None else own if own is not None else usual
    if isinstance(chosen, bool) or chosen not in (0, 1, 2, 3):
        raise SettingError(f"ZeRO stage {chosen!r} must be 0, 1, 2 or 3.")
    return int(chosen)


def engine_config(
    config: Mapping[str, Any],
    policy: Policy,
    stage: int,
    *,
    max_norm: float | None,
    accumulate: int,
    world_size: int = 1,
    optimizer: str = "torch.optim.AdamW",
    version: str = TESTED_VERSION,
) -> Merged:
    """What `deepspeed.initialize` gets; raises for keys that contradict the Engine."""
    _check_precision(config, policy)
    _check_number(config, "gradient_clipping", max_norm or 0.0, f"Engine(max_norm={max_norm})")
    _check_number(config, "gradient_accumulation_steps", accumulate, f"Engine(accumulate={accumulate})")
    _check_formats(config, policy)
    zero = config.get("zero_optimization")
    block = {} if isinstance(zero, bool) else dict(_block(config, "zero_optimization"))
    merged = merge_deepspeed(
        {**config, "zero_optimization": {**block, "stage": stage}},
        policy=policy,
        max_norm=max_norm,
        accumulate=accumulate,
        world_size=world_size,
        optimizer=optimizer,
        driver="halfstep",
        version=version,
    )
    return check_zero(merged)


def check_zero(merged: Merged) -> Merged:
    """Raise for what the backend cannot carry out, and decide what remains; stage 0 is not DeepSpeed's."""
    zero, decisions = dict(merged.config["zero_optimization"]), []
    for key, reason in _NEVER.items():
        value = zero.get(key)
        if value and not (isinstance(value, Mapping) and value.get("device", "none") == "none"):
            raise SettingError(f'zero_optimization.{key} does not work with backend="deepspeed": {reason}. Remove it.')
        zero.pop(key, None)
    _check_offload(zero)
    if merged.stage == 1:
        if zero.get("overlap_comm"):
            reason = "stage 1 reduces gradients when a window closes"
            decisions.append(Decision("zero_optimization.overlap_comm", zero["overlap_comm"], False, reason))
        zero["overlap_comm"] = False
    config = {**merged.config, "zero_optimization": zero, "steps_per_print": None}
    return replace(merged, config=config, decisions=(*merged.decisions, *decisions))


def _check_offload(zero: dict[str, Any]) -> None:
    """Drop a disabled block; raise for offloading to anything but the CPU, or of a part only."""
    block = zero.get("offload_optimizer")
    if not block or (isinstance(block, Mapping) and block.get("device", "none") == "none"):
        zero.pop("offload_optimizer", None)
        return
    place = "zero_optimization.offload_optimizer"
    if not isinstance(block, Mapping) or block["device"] != "cpu":
        raise SettingError(
            f'{place}={block!r} does not work with backend="deepspeed", which reads masters and states. Use {{"device": "cpu"}}, or remove it.'
        )
    for key, usual in {"ratio": 1.0, "super_offload": False}.items():
        if block.get(key, usual) != usual:
            raise SettingError(f'{place}.{key}={block[key]!r} does not work with backend="deepspeed". Remove it.')


def log_decisions(merged: Merged, source: str) -> None:
    """Log, once in a process, what a run does instead of the user's configuration, and what to watch."""
    if merged.decisions:
        lines = "\n".join(f"  {decision}" for decision in merged.decisions)
        log_once(f"{source}: Halfstep decides instead of it:\n{lines}")
    for note in merged.notes:
        log_once(f"{source}: {note}")


def _block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    block = config.get(key) or {}
    if not isinstance(block, Mapping):
        raise SettingError(f"DeepSpeed's {key} must be an object of keys, not {block!r}.")
    return block


def _check_precision(config: Mapping[str, Any], policy: Policy) -> None:
    """Raise for a block that asks for another precision than the policy."""
    for key, weights in _BLOCKS.items():
        block = config.get(key)
        if not (isinstance(block, Mapping) and block.get("enabled") is True):
            continue
        cast = policy.compute if block.get("dtype") is None else canonical_name(block["dtype"])
        if weights != policy.params if weights else policy.is_lean or cast != policy.compute:
            advice = f'precision="{weights}-lean"' if weights else 'precision="bf16" or "fp16", which autocast'
            raise SettingError(
                f"DeepSpeed's {key}.enabled asks for another precision than {policy}, which the Engine decides. Use {advice}, or remove the "
                "block; Policy.from_deepspeed(config) reads it."
            )


def _check_number(config: Mapping[str, Any], key: str, own: float, setting: str) -> None:
    value = config.get(key)
    if value is not None and not is_auto(value) and value != own:
        raise SettingError(
            f"DeepSpeed's {key}={value!r}, but {setting}. The Engine decides it: write the same value there, or remove the key."
        )


def _check_formats(config: Mapping[str, Any], policy: Policy) -> None:
    """Raise for formats of sums and reductions that are not the policy's."""
    reduction = config.get("communication_data_type")
    if reduction is not None and not is_auto(reduction) and canonical_name(reduction) != policy.reduce:
        raise SettingError(
            f"DeepSpeed's communication_data_type={reduction!r}, but the precision reduces in {policy.reduce}. Write "
            f"{policy},reduce={canonical_name(reduction)} in the precision, or remove the key."
        )
    sums = _block(config, "data_types").get("grad_accum_dtype")
    if sums is not None and not is_auto(sums) and canonical_name(sums) != "fp32":
        raise SettingError(
            f"DeepSpeed's data_types.grad_accum_dtype={sums!r} adds gradients up in 16 bits, where sums stagnate; remove it, and they are fp32."
        )
