"""Recipes: the configuration files of fine-tuning and pre-training programs, detected by their content.

axolotl, LLaMA-Factory, torchtune and torchtitan each load the model in the format that their file names, and most of
them then train the weights in that format. The functions here answer what rules ask of such a file. Each was read from
the program's own source: which keys decide the weights' format, and what else adds fp32 master weights.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Literal

from halfstep.check.config.config import Config
from halfstep.check.config.kind import TUNERS
from halfstep.check.regex import regex
from halfstep.precision.node import UNKNOWN, Block, Entry, Items

__all__ = ["axolotl_fsdp", "is_absent", "needs_sharding", "trained_dtype", "trains_all_weights"]

# Optimizers that update the weights they get and keep no other copy of them, with neither stochastic rounding nor Kahan
# summation, by the names of transformers and axolotl.
PLAIN_OPTIMIZERS = frozenset({
    "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit",
    "paged_adamw", "paged_adamw_32bit", "paged_adamw_8bit", "lion_8bit", "lion_32bit", "paged_lion_8bit",
    "paged_lion_32bit", "ademamix", "ademamix_8bit", "sgd", "adagrad", "rmsprop", "adafactor", "muon",
})  # fmt: skip
# Keys that mean an adapter, quantized weights, or an engine with fp32 master weights.
_NOT_PLAIN = regex(r"lora|peft|adapter|load_in_|quantiz|deepspeed|fsdp|zero_stage", re.IGNORECASE)
_ADAPTER = regex(r"lora|dora|peft|adapter|quantiz", re.IGNORECASE)  # idle if an adapter is switched off
_SWITCHES = ("use_peft", "use_lora", "lora", "lora_enable", "enable_lora", "peft")
_ENGINE_NAME = regex(r"deepspeed|(?:^|[_-])(?:ds|fsdp|q?lora|peft)(?:[_.-]|$)|zero_?[123]", re.IGNORECASE)  # of a file
# A comment that names the engine of the launcher: "FSDP ZeRO-3 (TRANSFORMER_BASED_WRAP), bf16"; not one that is switched off.
_ENGINE_COMMENT = regex(
    r"(?:^|\s)#(?!.*(?:\b(?:no|not|without|unless)\b|:\s)).*\b(?:fsdp\d?|deepspeed|zero-?[123])\b",
    re.IGNORECASE | re.MULTILINE,
)
_NAME_KEYS = ("model_name_or_path", "model_id", "model_name", "model", "base_model")
_SIZE = regex(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)  # `70B`, `8x7b`
# bf16 weights, gradients and Adam's two moments are 8 bytes a parameter: 240 GB for 30 billion.
_MAX_BILLIONS = 30
# Keys of TRL's ModelConfig next to the dtype, in files whose model is named on the command line.
_MODEL_KEYS = ("model_name_or_path", "model_id", "model_name", "model_revision", "attn_implementation")


def is_absent(config: Config, *path: str) -> bool:
    """Whether a key is certainly not set: missing, null, false or an empty string."""
    entry = config.entry(*path)
    if entry is not None and isinstance(entry.value, Block | Items):
        return False
    value = config.value(*path)
    return value is not UNKNOWN and value in (None, False, "")


def trains_all_weights(config: Config) -> bool:
    """Whether an axolotl file trains the model's own weights: no adapter, and nothing quantized."""
    return all(is_absent(config, key) for key in ("adapter", "load_in_8bit", "load_in_4bit", "gptq", "relora"))


def axolotl_fsdp(config: Config) -> Literal[0, 1, 2]:
    """The FSDP version of an axolotl file; 0 without FSDP. Version 2 has to be named."""
    if is_absent(config, "fsdp") and is_absent(config, "fsdp_config"):
        return 0
    version = config.number("fsdp_version") or config.number("fsdp_config", "fsdp_version")
    return 2 if version == 2 else 1


def needs_sharding(config: Config) -> bool:
    """Whether every size in the model's name is too large for full fine-tuning on one GPU: the launcher adds an engine."""
    names = [str(config.value(key)) for key in _NAME_KEYS if not is_absent(config, key)]
    sizes = [float(size) * int(experts or 1) for name in names for experts, size in _SIZE.findall(name)]
    return bool(sizes) and min(sizes) >= _MAX_BILLIONS


def trained_dtype(config: Config) -> Entry | None:
    """The dtype that a file of trainer arguments (TRL's format) loads a model in, if it trains all the weights itself."""
    dtype = config.entry("torch_dtype") or config.entry("dtype")
    if dtype is None or config.root.call:
        return None
    tuners = {config.value(key) for key in TUNERS} - {None}
    named = any(config.entry(key) for key in _MODEL_KEYS) if not tuners else tuners == {"full"}
    off = any(config.value(key) is False for key in _SWITCHES)
    keys = [entry.key for entry in config.root.entries if _NOT_PLAIN.search(entry.key)]
    plain = all(is_absent(config, key) or (off and _is_idle(key)) for key in keys)
    plain = plain and not _ENGINE_NAME.search(PurePath(config.source.path).name)
    plain = plain and named and not _ENGINE_COMMENT.search(config.source.text)
    return dtype if plain else None


def _is_idle(key: str) -> bool:
    """Whether a key only configures an adapter; a switch is not one: another of them may be on."""
    return key not in _SWITCHES and not key.startswith("load_in_") and bool(_ADAPTER.search(key))
