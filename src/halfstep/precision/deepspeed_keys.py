"""The keys of a DeepSpeed configuration: which exist, how Halfstep treats each, and how to read one.

DeepSpeed silently ignores an unknown top-level key, so a misspelt `gradient_cliping` trains without clipping. Here
every key is treated in one of three ways, and these tables are complete:

    read        it is about precision, clipping or accumulation: `READ` and `BLOCKS`
    not read    it is about something else: `NOT_READ` has what replaces it in Halfstep
    rejected    it needs a number format that Halfstep does not have, or is not a key at all: `REJECTED`

The tables contain the keys of DeepSpeed 0.19.8 and those that earlier releases removed.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.errors import SettingError, unknown
from halfstep.precision.formats import canonical_name

__all__ = [
    "BLOCKS",
    "DTYPES",
    "NOT_READ",
    "READ",
    "REJECTED",
    "REMOVED_KEYS",
    "Block",
    "auto_value",
    "has_effect",
    "is_auto",
    "rejected",
]

# Blocks about precision, with all their keys.
BLOCKS: dict[str, tuple[str, ...]] = {
    "fp16": (
        "enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
        "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads",
    ),
    "bf16": (
        "enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads",
        "bf16_optimizer_states",
    ),
    "torch_autocast": ("enabled", "dtype", "lower_precision_safe_modules"),
    # Everything but `enabled` was passed to apex.amp.initialize.
    "amp": (
        "enabled", "opt_level", "loss_scale", "min_loss_scale", "max_loss_scale", "cast_model_type",
        "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "cast_model_outputs", "num_losses",
        "verbosity",
    ),
    "data_types": ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"),
    "optimizer": ("type", "params", "legacy_fusion"),
}  # fmt: skip
BLOCKS["bfloat16"] = BLOCKS["bf16"]

READ = (
    *BLOCKS, "zero_optimization", "communication_data_type", "gradient_clipping", "gradient_accumulation_steps",
    "gradient_allreduce_op",
)  # fmt: skip

_DATA = "batch sizes are set in your data loader; use the same values there"
_RUN_FILE = "Halfstep logs and profiles to its run file"
_RANKS = "parallelism and sharding are up to the backend, not the policy"
_CHECKPOINT = "Halfstep writes its own checkpoints"
_DIVISION = (
    "Halfstep averages gradients in the `reduce` format after summing them; dividing first only protects a 16-bit sum"
)
_OFFLOAD = "Halfstep does not offload"
_MODEL = "configure it in the model or the data pipeline; Halfstep changes neither"

# key -> what replaces it. Reported only if the value has an effect.
NOT_READ: dict[str, str] = {
    "train_batch_size": _DATA,
    "train_micro_batch_size_per_gpu": _DATA,
    "dataloader_drop_last": _DATA,
    "data_efficiency": _MODEL,
    "curriculum_learning": _MODEL,
    "progressive_layer_drop": _MODEL,
    "sparse_attention": _MODEL,
    "activation_checkpointing": _MODEL,
    "scheduler": "pass a torch scheduler to the Engine: Engine(scheduler=...)",
    "managed_gradient_accumulation": "the Engine counts micro-batches itself: Engine(accumulate=...)",
    "compile": "use Engine(compile=...)",
    "graph_harvesting": "use Engine(compile=...)",
    "zero_allow_untested_optimizer": "Halfstep's lean presets support Adam, AdamW and SGD, the others any optimizer",
    "zero_force_ds_cpu_optimizer": _OFFLOAD,
    "aio": _OFFLOAD,
    "seq_parallel_communication_data_type": _RANKS,
    "sequence_parallel_size": _RANKS,
    "data_parallel_size": _RANKS,
    "tensor_parallel": _RANKS,
    "expert_parallel": _RANKS,
    "pipeline": _RANKS,
    "elasticity": _RANKS,
    "use_data_before_expert_parallelism": _RANKS,
    "disable_allgather": _RANKS,
    "hybrid_engine": _RANKS,
    "sparse_gradients": "gradients are reduced as autograd produces them: sparse only for embeddings with sparse=True",
    "prescale_gradients": _DIVISION,
    "gradient_predivide_factor": _DIVISION,
    "checkpoint": _CHECKPOINT,
    "nebula": _CHECKPOINT,
    "datastates": _CHECKPOINT,
    "steps_per_print": _RUN_FILE,
    "wall_clock_breakdown": _RUN_FILE,
    "memory_breakdown": _RUN_FILE,
    "dump_state": _RUN_FILE,
    "log_level": _RUN_FILE,
    "timers": _RUN_FILE,
    "flops_profiler": _RUN_FILE,
    "comms_logger": _RUN_FILE,
    "tensorboard": _RUN_FILE,
    "wandb": _RUN_FILE,
    "comet": _RUN_FILE,
    "csv_monitor": _RUN_FILE,
    "eigenvalue": _RUN_FILE,
    "autotuning": "`halfstep plan` finds a batch size",
    "vocabulary_size": "DeepSpeed only warns if it is not a multiple of 8",
    "disable_python_gc": "call gc.disable() yourself",
}

# Values without effect: each is DeepSpeed's default.
_NEUTRAL: dict[str, object] = {
    "gradient_predivide_factor": 1,
    "managed_gradient_accumulation": True,
    "sequence_parallel_size": 1,
    "zero_force_ds_cpu_optimizer": True,
}

_QUANTISED = "it trains in formats that a policy cannot express; remove it, or keep training with DeepSpeed"
REJECTED: dict[str, str] = {
    "compression_training": _QUANTISED,
    "quantize_training": _QUANTISED,
    "weight_quantization": _QUANTISED,
    "fp32_allreduce": 'DeepSpeed replaced it and now ignores it; write "communication_data_type": "fp32"',
}

# Features that DeepSpeed removed: 0.19.8 raises an error for the key, even when it is disabled.
REMOVED_KEYS = (
    "amp", "nebula", "compression_training", "quantize_training", "sparse_gradients", "eigenvalue", "sparse_attention",
    "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop",
)  # fmt: skip

DTYPES = ("fp32", "bf16", "fp16")  # the number formats that DeepSpeed accepts


def has_effect(key: str, value: object) -> bool:
    """Whether the value of a key that Halfstep does not read has an effect in DeepSpeed."""
    if isinstance(value, Mapping):
        return bool(value) and value.get("enabled", True) is not False
    return value is not None and value is not False and value != _NEUTRAL.get(key)


def rejected(path: str, value: object, reason: str) -> SettingError:
    """The error for one key of a DeepSpeed configuration, with its path and value."""
    return SettingError(f"DeepSpeed key {path}={reprlib.repr(value)}: {reason}.")


def is_auto(value: object) -> bool:
    """Whether a value is Hugging Face's "auto"."""
    return isinstance(value, str) and value.strip().casefold() == "auto"


def as_flag(value: Any) -> Any:
    """The value, with "true" and "false" as booleans: DeepSpeed's validated blocks accept the text as well."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().casefold(), value)
    return value


def auto_value(path: str, argument: str | None = None) -> SettingError:
    """The error for an "auto" that nothing resolves; `argument` is the setting that would."""
    advice = f"pass {argument}, or write the value" if argument else "write the value"
    return rejected(path, "auto", f"only Hugging Face's Trainer and Accelerate resolve it; {advice}")


@dataclass(frozen=True)
class Block:
    """One block of a configuration, read key by key with checks; null counts as absent, "auto" raises."""

    path: str  # "fp16", or "" for the configuration itself
    values: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str) -> Block:
        """The block called `name`, empty where it is absent; its key names are checked."""
        values = config.get(name)
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            raise rejected(name, values, f'it must be a block, such as {{"{BLOCKS[name][0]}": ...}}')
        for key in values:
            if key not in BLOCKS[name]:
                raise unknown(f"key in the DeepSpeed block {name}", key, BLOCKS[name])
        return cls(name, values)

    def where(self, key: str) -> str:
        """The path of a key in notes and errors."""
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> Any:
        """The value of a key, or None where it is absent."""
        value = self.values.get(key)
        if is_auto(value):
            raise rejected(
                self.where(key),
                value,
                "Hugging Face's Trainer replaces 'auto' with its own arguments, and DeepSpeed alone uses its default "
                "instead; write the value",
            )
        return value

    def present(self, *keys: str) -> list[str]:
        """The paths of those keys that are present."""
        return [self.where(key) for key in keys if self.values.get(key) is not None]

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A boolean."""
        value = as_flag(self.get(key))
        if value is None:
            return default
        if not isinstance(value, bool):
            raise rejected(self.where(key), value, "it must be true or false")
        return value

    def number(self, key: str) -> float | None:
        """A finite number that is not negative."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise rejected(self.where(key), value, "it must be a number")
        if isinstance(value, int) and abs(value) > 2**128:  # beyond fp32, and float() raises for much larger ones
            raise rejected(self.where(key), value, "it does not fit in fp32")
        if not math.isfinite(value) or value < 0:
            raise rejected(self.where(key), value, "it must be finite and not negative")
        return float(value)

    def whole(self, key: str) -> int | None:
        """A whole number that is not negative."""
        value = self.number(key)
        if value is None:
            return None
        if value != int(value):
            raise rejected(self.where(key), self.values[key], "it must be a whole number")
        return int(value)

    def dtype(self, key: str) -> str | None:
        """A number format, in Halfstep's spelling."""
        value = self.get(key)
        if value is None:
            return None
        name = canonical_name(value)
        if name not in DTYPES:
            raise unknown(f"dtype for the DeepSpeed key {self.where(key)}", reprlib.repr(value), DTYPES)
        return name
