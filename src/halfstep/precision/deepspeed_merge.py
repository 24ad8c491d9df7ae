"""Merges a user's DeepSpeed configuration with the decisions of Halfstep.

DeepSpeed gets the user's file with the keys that decide precision, clipping and accumulation replaced by those of
`Policy.to_deepspeed`; every other key (buckets, offloading, profilers) is passed on unchanged. Each replaced value is
returned as a `Decision`, so that a run can log what it does instead of the file. Where the caller gives no policy, norm
or number of micro-batches, the file decides.

Hugging Face's "auto" is resolved wherever Halfstep decides the key, and where it only tunes ZeRO (DeepSpeed's own default
applies). Anywhere else it is rejected with its key, because DeepSpeed would silently use a default.

`halfstep.check.deepspeed.merge_deepspeed` checks the file with the HS2xx rules first; use that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from halfstep.errors import SettingError
from halfstep.precision.deepspeed_batches import Batches, read_batches
from halfstep.precision.deepspeed_faults import Fault, faults
from halfstep.precision.deepspeed_keys import (
    NOT_READ,
    READ,
    REJECTED,
    REMOVED_KEYS,
    Block,
    as_flag,
    auto_value,
    has_effect,
    is_auto,
    rejected,
)
from halfstep.precision.deepspeed_optimizers import (
    MAX_GRAD_NORM_EFFECT,
    ONE_BIT,
    ONE_BIT_REMOVED,
    one_bit_removed,
    one_bit_with_zero,
    untested_advice,
    zero_support,
    zero_support_of_class,
)
from halfstep.precision.deepspeed_setup import Version
from halfstep.precision.deepspeed_write import Driver
from halfstep.precision.policy import Policy, read_deepspeed

__all__ = ["Choices", "Decision", "Merged", "merge_config"]

_AUTO_IS_A_VALUE = "data_types.keep_in_fp32_modules"  # of DeepSpeed itself
_MODES = ("fp16", "bf16", "torch_autocast")
# Keys of zero_optimization that change speed and memory but no number; "auto" there means DeepSpeed's default.
_TUNING = frozenset({
    "reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size", "stage3_prefetch_bucket_size",
    "param_persistence_threshold", "stage3_param_persistence_threshold", "model_persistence_threshold",
    "stage3_model_persistence_threshold", "max_live_parameters", "stage3_max_live_parameters", "max_reuse_distance",
    "stage3_max_reuse_distance", "sub_group_size", "overlap_comm", "contiguous_gradients", "reduce_scatter",
    "allgather_partitions", "round_robin_gradients", "gather_16bit_weights_on_model_save",
    "stage3_gather_16bit_weights_on_model_save", "zero_hpz_partition_size",
})  # fmt: skip
# DeepSpeed's own values of the keys that Halfstep writes.
_DEFAULTS: dict[str, object] = {
    "fp16.loss_scale": 0, "fp16.initial_scale_power": 16, "fp16.loss_scale_window": 1000, "fp16.hysteresis": 2,
    "fp16.consecutive_hysteresis": False, "fp16.min_loss_scale": 1, "gradient_accumulation_steps": 1,
    "zero_optimization.stage": 0, "bf16.check_grad_overflow": True, "bf16.immediate_grad_update": False,
    "fp16.auto_cast": False,
}  # fmt: skip
_PRECISION = "the precision policy decides it"
_REASONS: dict[str, str] = {
    "data_types.grad_accum_dtype": "sums over micro-batches use the policy's grads format; DeepSpeed's default is 16 bits",
    "communication_data_type": "reductions use the policy's reduce format; DeepSpeed's default is 16 bits",
    "gradient_clipping": "always written, because DeepSpeed's default changed from 0 to 1.0 in 0.19.3",
    "gradient_accumulation_steps": "the Engine counts micro-batches",
    "train_micro_batch_size_per_gpu": "your data loader decides the batch; DeepSpeed only logs this number",
    "train_batch_size": "DeepSpeed computes it from the other two",
    "zero_optimization.stage": "the form of older releases",
    "torch_autocast.lower_precision_safe_modules": "otherwise ZeRO reduces their gradients in 16 bits",
    "bf16.check_grad_overflow": "Halfstep skips every step whose gradients are not finite",
    "fp16.auto_cast": "the Engine's forward region casts inputs",
    "fp16.initial_scale_power": "Halfstep caps the scale at 2^24; each excess power of two costs a skipped step",
}
# Those that differ where Halfstep drives.
_DRIVEN_REASONS: dict[str, str] = {
    "fp16.loss_scale": "Halfstep scales the loss, by the policy's rule",
    "fp16.initial_scale_power": "Halfstep scales the loss: the policy has the first scale, at most 2^24",
    "torch_autocast.enabled": "Halfstep's own forward region casts",
    "data_types.grad_accum_dtype": "Halfstep sums in fp32",
}


@dataclass(frozen=True)
class Decision:
    """One key that Halfstep decides instead of the file."""

    key: str
    theirs: object  # None: not set
    ours: object  # None: removed
    reason: str

    def __str__(self) -> str:
        theirs = "not set" if self.theirs is None else f"{self.theirs!r} in the file"
        ours = "removed" if self.ours is None else f"{self.ours!r} in this run"
        return f"{self.key}: {theirs}, {ours}; {self.reason}."


@dataclass(frozen=True)
class Choices:
    """What the program decides next to the file; the file decides whatever is left at its default."""

    policy: Policy | None = None
    max_norm: float | Literal["file"] | None = "file"
    accumulate: int | None = None
    batch_size: int | None = None  # per rank
    world_size: int | None = None
    optimizer: str | None = None  # dotted class name of the optimizer object; None: the file's block creates it
    driver: Driver = "deepspeed"


@dataclass(frozen=True)
class Merged:
    """The configuration for DeepSpeed, what it decides, and everything that differs from the file."""

    config: dict[str, Any]
    policy: Policy
    stage: int
    max_norm: float | None
    accumulate: int
    batch_size: int | None  # per rank; None: neither the file nor the program decides it
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...]
    faults: tuple[Fault, ...] = field(default=(), repr=False)  # of this release with this configuration


def merge_config(values: Mapping[str, Any], choices: Choices, version: Version) -> Merged:
    """Merge a configuration, as plain values, with the program's choices."""
    return _Merge(copy.deepcopy(dict(values)), choices, version).run()


class _Merge:
    """One pass over a copy of the configuration, which collects decisions and notes."""

    def __init__(self, config: dict[str, Any], choices: Choices, version: Version) -> None:
        self.config = config
        self.choices = choices
        self.version = version
        self.decisions: list[Decision] = []
        self.notes: list[str] = []
        self.driven = _DRIVEN_REASONS

    def run(self) -> Merged:
        for name in (*_MODES, "bfloat16", "data_types"):
            block = Block.of(self.config, name)  # must be a block of known keys: DeepSpeed ignores some unknown ones
            if block.values:
                self.config[name] = {key: as_flag(value) for key, value in block.values.items()}
        self.drop_without_effect()
        stage = self.zero()
        self.optimizer(stage)
        self.reject_amp()
        choices = self.choices
        batches = read_batches(
            self.config, accumulate=choices.accumulate, batch_size=choices.batch_size, world_size=choices.world_size
        )
        self.total_batch(batches)
        max_norm, policy = self.settings(batches.accumulate)
        ours = policy.to_deepspeed(
            stage=stage,
            max_norm=max_norm,
            accumulate=batches.accumulate,
            batch_size=batches.size,
            offload_optimizer=self.offloads,
            driver=choices.driver,
        )
        del ours["zero_optimization"]
        clips = f"clips at {max_norm:g}" if max_norm else "clips nothing here"
        self.driven = {
            **_DRIVEN_REASONS,
            "gradient_clipping": f"Halfstep {clips}",
            "gradient_accumulation_steps": f"Halfstep counts micro-batches, {batches.accumulate} per step",
        }
        self.overlay_modes(ours)
        self.overlay(ours)
        for path, value in _leaves(self.config):
            if is_auto(value) and path != _AUTO_IS_A_VALUE:
                raise auto_value(path)
        return Merged(
            config=self.config,
            policy=policy,
            stage=stage,
            max_norm=max_norm,
            accumulate=batches.accumulate,
            batch_size=batches.size if batches.is_decided else None,
            decisions=tuple(self.decisions),
            notes=tuple(self.notes),
            faults=tuple(faults(self.version, self.config)),
        )

    def decide(self, key: str, theirs: object, ours: object, reason: str | None = None) -> None:
        driven = self.driven.get(key) if self.choices.driver == "halfstep" else None
        self.decisions.append(Decision(key, theirs, ours, reason or driven or _REASONS.get(key, _PRECISION)))

    def total_batch(self, batches: Batches) -> None:
        total, ranks = self.config.pop("train_batch_size", None), self.choices.world_size
        if total is None:
            return
        product = None if ranks is None else batches.size * batches.accumulate * ranks
        if is_auto(total) or product in {None, total}:
            self.decide("train_batch_size", total, None)
            return
        self.decide("train_batch_size", total, product, f"it is {batches} and {ranks} ranks")

    def drop_without_effect(self) -> None:
        for key in list(self.config):
            value = self.config[key]
            if key in REMOVED_KEYS and not has_effect(key, value):
                reason = "disabled, but DeepSpeed 0.19.8 raises an error for the key of a removed feature"
            elif key not in READ and key not in NOT_READ and key not in REJECTED:
                reason = "not a key of DeepSpeed, which ignores it"
            elif key == "managed_gradient_accumulation" and value is False:
                reason = _REASONS["gradient_accumulation_steps"]
            else:
                continue
            del self.config[key]
            self.decide(key, value, None, reason)

    def zero(self) -> int:
        value = self.config.get("zero_optimization")
        if value is None or isinstance(value, bool):
            self.config["zero_optimization"] = {"stage": int(bool(value))}
            if value is not None:
                self.decide("zero_optimization.stage", value, int(value))
        zero = self.config["zero_optimization"]
        if not isinstance(zero, dict):
            raise rejected("zero_optimization", zero, 'it must be a block, such as {"stage": 2}')
        for key in [key for key, value in zero.items() if is_auto(value) and key in _TUNING]:
            del zero[key]
            reason = "DeepSpeed's default applies; only Hugging Face computes another"
            self.decide(f"zero_optimization.{key}", "auto", None, reason)
        if is_auto(zero.get("stage")):
            raise auto_value("zero_optimization.stage")
        stage = Block("zero_optimization", zero).whole("stage") or 0
        if stage > 3:
            raise rejected("zero_optimization.stage", stage, "it must be 0, 1, 2 or 3")
        zero["stage"] = stage
        for key in ("zero_quantized_weights", "zero_quantized_gradients"):
            if zero.get(key) is True:
                self.notes.append(
                    f"zero_optimization.{key}: ZeRO++ quantizes this communication, whatever `reduce` is."
                )
        return stage

    @property
    def offloads(self) -> bool:
        block = self.config["zero_optimization"].get("offload_optimizer")
        return isinstance(block, Mapping) and block.get("device") in {"cpu", "nvme"}

    def optimizer(self, stage: int) -> None:
        block = self.config.get("optimizer")
        block = block if isinstance(block, dict) else {}
        kind = block.get("type")
        self.move_max_grad_norm(block)
        chosen = self.choices.optimizer
        if isinstance(kind, str) and kind.casefold() in ONE_BIT:
            if chosen is None and self.version >= ONE_BIT_REMOVED:
                raise rejected("optimizer.type", kind, one_bit_removed(kind))
            if chosen is None and stage:
                raise rejected("optimizer.type", kind, one_bit_with_zero(stage))
            self.notes.append(f"optimizer.type={kind}: {one_bit_removed(kind)}.")
        if chosen is not None:
            for key, ours in (("optimizer", chosen), ("scheduler", None)):
                if (theirs := self.config.pop(key, None)) is not None:
                    name = theirs.get("type") if isinstance(theirs, Mapping) else theirs
                    self.decide(f"{key}.type", name, ours, "your program passes its own object, with its own settings")
            if self.offloads and self.config.get("zero_force_ds_cpu_optimizer") is not False:
                theirs = self.config.get("zero_force_ds_cpu_optimizer")
                self.config["zero_force_ds_cpu_optimizer"] = False
                reason = "DeepSpeed otherwise rejects an optimizer object with offloading"
                self.decide("zero_force_ds_cpu_optimizer", theirs, False, reason)
        self.untested(chosen or kind, stage)

    def move_max_grad_norm(self, block: dict[str, Any]) -> None:
        params = block.get("params")
        if not isinstance(params, dict) or params.get("max_grad_norm") is None:
            return
        norm = params.pop("max_grad_norm")
        key = "optimizer.params.max_grad_norm"
        if self.config.get("gradient_clipping") is None:
            self.config["gradient_clipping"] = Block("optimizer.params", {"max_grad_norm": norm}).number(
                "max_grad_norm"
            )
            self.decide(key, norm, None, f"moved to gradient_clipping. {MAX_GRAD_NORM_EFFECT}".removesuffix("."))
        else:
            self.decide(key, norm, None, f"gradient_clipping is set. {MAX_GRAD_NORM_EFFECT}".removesuffix("."))

    def untested(self, kind: object, stage: int) -> None:
        if not isinstance(kind, str) or not stage:
            return
        support = zero_support_of_class(kind) if self.choices.optimizer else zero_support(kind)
        if support in {"tested", "one bit"}:
            return
        watch = untested_advice(kind, support)
        allowed = self.config.get("zero_allow_untested_optimizer")
        if allowed is not True and self.choices.driver == "halfstep" and support == "elementwise":
            self.config["zero_allow_untested_optimizer"] = True
            reason = f"{kind} treats every element alone, so it steps shards as it steps whole parameters"
            self.decide("zero_allow_untested_optimizer", allowed, True, reason)
            return
        if allowed is not True:
            raise SettingError(
                f"{kind} is not in ZeRO's list of tested optimizers, and DeepSpeed fails an assertion at stage {stage}. Set "
                f'"zero_allow_untested_optimizer": true, or use AdamW. If you set it: {watch}.'
            )
        self.notes.append(f"zero_allow_untested_optimizer: {watch}.")

    def reject_amp(self) -> None:
        if self.config.get("amp") is not None:
            reason = (
                "DeepSpeed 0.19.8 removed Apex AMP, which never worked with ZeRO; use precision='fp16-lean' (the fp16 "
                "block, similar to O2), 'bf16-lean', or 'bf16' (torch_autocast)"
            )
            raise rejected("amp", self.config["amp"], reason)

    def settings(self, accumulate: int) -> tuple[float | None, Policy]:
        """The clipping norm and the policy: the program's, else the file's."""
        choices = self.choices
        readable = {key: self.config[key] for key in READ if key in self.config and key != "optimizer"}
        readable["zero_optimization"] = {"stage": self.config["zero_optimization"]["stage"]}
        readable["gradient_accumulation_steps"] = accumulate
        if choices.policy is not None:
            for key in (*_MODES, "bfloat16", "data_types", "communication_data_type"):
                readable.pop(key, None)
        if choices.max_norm != "file":
            readable["gradient_clipping"] = choices.max_norm or 0.0
        for path, value in _leaves(readable):
            if is_auto(value) and path != _AUTO_IS_A_VALUE:
                raise auto_value(path, "max_norm" if path == "gradient_clipping" else "precision")
        reading = read_deepspeed(readable)
        return reading.max_norm, choices.policy or reading.policy

    def overlay_modes(self, ours: dict[str, Any]) -> None:
        if "bfloat16" in self.config:
            self.config.setdefault("bf16", self.config.pop("bfloat16"))
        for mode in _MODES:
            theirs = self.config.pop(mode, None) or {}
            enabled = theirs.get("enabled", False)
            block = ours.get(mode)
            if (block is not None) != enabled:  # "auto" is neither
                self.decide(f"{mode}.enabled", theirs.get("enabled"), block is not None)
            if block is None:
                continue
            if enabled is True:
                self.overlay_block(mode, theirs, block)
            self.config[mode] = block

    def overlay_block(self, mode: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
        for key in dict.fromkeys([*ours, *theirs]):
            path = f"{mode}.{key}"
            if key in {"enabled", "dtype"}:
                continue
            if key == "immediate_grad_update" or (key == "lower_precision_safe_modules" and key not in ours):
                ours[key] = theirs[key]  # when gradients are accumulated, or which modules use the policy's format
                continue
            old = theirs.get(key, _DEFAULTS.get(path))
            if old is not None and old != ours.get(key, _DEFAULTS.get(path)):
                self.decide(path, theirs.get(key), ours.get(key))
            elif old is None and key in ours:
                self.decide(path, None, ours[key])

    def overlay(self, ours: dict[str, Any]) -> None:
        types = self.config.get("data_types")
        types = types if isinstance(types, dict) else {}
        weights = next((mode for mode in ("fp16", "bf16") if mode in ours), "fp32")
        if types.get("param_dtype") not in {None, weights}:
            self.decide("data_types.param_dtype", types.pop("param_dtype"), None, "it contradicts the policy's weights")
        summed = "data_types.grad_accum_dtype"
        flat = {summed: ours["data_types"]["grad_accum_dtype"]}
        flat |= {key: value for key, value in ours.items() if key not in {*_MODES, "data_types"}}
        for path, value in flat.items():
            theirs = types.get("grad_accum_dtype") if path == summed else self.config.get(path)
            default = weights if path in {summed, "communication_data_type"} else _DEFAULTS.get(path)
            if theirs != value and not (theirs is None and value == default):
                self.decide(path, theirs, value)
        self.config |= {path: value for path, value in flat.items() if path != summed}
        self.config["data_types"] = types | {"grad_accum_dtype": flat[summed]}


def _leaves(values: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every plain value with its path."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _leaves(value, path)
    else:
        yield path, values
