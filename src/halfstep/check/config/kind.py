"""Which tool a mapping configures, detected by its keys.

A wrong guess costs more than a missed file: findings about unrelated JSON make people disable a checker. So each tool
has keys that no other tool uses, and a mapping without them is not checked. A DeepSpeed block is detected inside other
files as well, where the other keys belong to the program around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from halfstep.check.config.deepspeed_schema import PARENT_BLOCK
from halfstep.check.regex import regex
from halfstep.precision.deepspeed_keys import BLOCKS, NOT_READ, READ, REJECTED
from halfstep.precision.node import Block, Entry, Node, Scalar, walk

__all__ = [
    "DEEPSPEED_KEYS",
    "LIGHTNING_ALONE",
    "TUNERS",
    "Kind",
    "Match",
    "fill_template",
    "find_configs",
    "has_own_keys",
    "is_comment",
    "is_deepspeed",
    "is_surely_config",
    "is_trainer_part",
    "kind_of",
    "may_be_config",
    "recipe_of",
]

Recipe = Literal["axolotl", "llamafactory", "torchtune", "torchtitan", "kohya", "fairseq", "verl", "nanotron"]
Kind = Literal["deepspeed", "accelerate", "transformers", "lightning", "halfstep", "torch", "joint"] | Recipe

_HINT = regex(
    r"zero_optimization|deepspeed_config|train_batch_size|train_micro_batch_size_per_gpu|fp16|bf16|bfloat16|precision|torch_autocast|float8|\bamp\b|\bamp_(?:level|backend)\b"
)
_SURE = regex(
    r"""["']?(?:zero_optimization|train_micro_batch_size_per_gpu)["']?\s*:|^(?:compute_environment|deepspeed_config)\s*:""",
    re.MULTILINE,
)

_SLOT = regex(r"""(?<![\w"'./-])\{\{[^{}\n]*\}\}(?![\w"'./-])""")  # outside quotes: a value by itself

# Keys that only releases before 0.19.8 read, in addition to the tables of halfstep.precision.deepspeed_keys.
_OLD_KEYS = (
    "allgather_size",
    "zero_hpz_partition_size",
    "use_node_local_storage",
    "dataloader",
    "moe",
)
DEEPSPEED_KEYS = frozenset({*READ, *NOT_READ, *REJECTED, *_OLD_KEYS})

_DEEPSPEED_WITH = frozenset({
    "train_batch_size", "gradient_clipping", "gradient_accumulation_steps", "steps_per_print", "wall_clock_breakdown",
    "optimizer", "scheduler", "communication_data_type", "prescale_gradients", "activation_checkpointing", "data_types",
})  # fmt: skip
# Keys of programs that mix DeepSpeed's keys with their own: GPT-NeoX, Megatron, training scripts with one file for everything.
_FOREIGN = frozenset({
    "num_layers", "num-layers", "hidden_size", "hidden-size", "seq_length", "seq-length", "pipe_parallel_size",
    "pipe-parallel-size", "model_parallel_size", "vocab_file", "vocab-file", "model_name_or_path", "base_model",
    "type", "_target_", "class_path",
})  # fmt: skip

_ACCELERATE = frozenset({
    "compute_environment", "distributed_type", "num_processes", "num_machines", "machine_rank", "main_training_function",
    "deepspeed_config", "fsdp_config", "use_cpu", "same_network", "rdzv_backend", "downcast_bf16", "megatron_lm_config",
})  # fmt: skip
_TRANSFORMERS = frozenset({
    "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "gradient_accumulation_steps",
    "learning_rate", "lr_scheduler_type", "warmup_ratio", "warmup_steps", "logging_steps", "save_steps", "eval_steps",
    "output_dir", "overwrite_output_dir", "save_total_limit", "report_to", "gradient_checkpointing", "optim",
    "logging_strategy", "save_strategy", "evaluation_strategy", "eval_strategy", "micro_batch_size", "num_epochs",
})  # fmt: skip
# Keys of PaddlePaddle's trainers, whose arguments have the same names (`fp16_opt_level` among them) and other meanings.
_PADDLE = frozenset({
    "sharding", "recompute", "recompute_granularity", "recompute_method", "tensor_parallel_degree",
    "pipeline_parallel_degree", "sharding_parallel_degree", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "amp_master_grad", "amp_custom_black_list", "amp_custom_white_list", "unified_checkpoint", "disable_ckpt_quant",
    "continue_training", "eval_with_do_generation", "use_fused_rms_norm", "zero_padding", "freeze_include", "src_length",
})  # fmt: skip
TUNERS = ("tuner_type", "train_type", "sft_type")  # of ms-swift 4, 3 and 2
_TRANSFORMERS_ALONE = ("per_device_train_batch_size", "num_train_epochs")
_LIGHTNING = frozenset({
    "accelerator", "devices", "max_epochs", "gpus", "strategy", "num_nodes", "gradient_clip_val", "max_steps",
    "accumulate_grad_batches", "check_val_every_n_epoch", "log_every_n_steps", "val_check_interval",
})  # fmt: skip
# Keys that no other trainer has.
LIGHTNING_ALONE = frozenset({
    "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval",
    "num_sanity_val_steps", "limit_train_batches", "limit_val_batches", "limit_test_batches", "log_every_n_steps",
    "enable_progress_bar", "enable_checkpointing", "enable_model_summary", "fast_dev_run", "overfit_batches", "sync_batchnorm",
    "use_distributed_sampler", "reload_dataloaders_every_n_epochs",
})  # fmt: skip
_LIGHTNING_PRECISIONS = frozenset({"16-mixed", "bf16-mixed", "16-true", "bf16-true", "32-true", "64-true"})
_INTERPOLATION = regex(r"""["']?\$\{([\w.]+)\}["']?$""")  # of OmegaConf
_LIGHTNING_NAME = regex(
    r"(?:^|_)(?:trainer|fabric|lightning|pl)(?:_(?:args|kwargs|params|config|cfg|defaults|options|opts|settings))?$",
    re.IGNORECASE,
)

# Keys of axolotl's files; a few of them together are no other program's.
_AXOLOTL = frozenset({
    "micro_batch_size", "sequence_len", "sample_packing", "num_epochs", "val_set_size", "dataset_prepared_path",
    "lr_scheduler", "optimizer", "flash_attention", "adapter", "pad_to_sequence_len", "tokenizer_type", "model_type",
    "load_in_8bit", "load_in_4bit", "train_on_inputs", "saves_per_epoch", "evals_per_epoch", "special_tokens",
})  # fmt: skip
_LLAMAFACTORY_STAGES = frozenset({"pt", "sft", "rm", "ppo", "dpo", "kto"})
_LLAMAFACTORY_TYPES = frozenset({"full", "freeze", "lora", "oft"})
# Keys of kohya's training scripts and of their graphical interface.
_KOHYA = frozenset({
    "pretrained_model_name_or_path", "mixed_precision", "save_precision", "optimizer_type", "optimizer", "optimizer_args",
    "network_module", "network_dim", "train_data_dir", "dataset_config", "cache_latents", "min_snr_gamma", "clip_skip",
    "save_model_as", "max_data_loader_n_workers", "learning_rate", "lr_scheduler", "max_train_epochs", "max_train_steps",
})  # fmt: skip
_FAIRSEQ = frozenset(
    {"task", "criterion", "optimization", "optimizer", "checkpoint", "distributed_training", "dataset"}
)


@dataclass(frozen=True, eq=False)
class Match:
    """A mapping that configures a tool; `strict` if all its keys belong to that tool."""

    kind: Kind
    block: Block
    strict: bool


def may_be_config(text: str) -> bool:
    """Whether a file is worth parsing: it mentions precision."""
    return bool(_HINT.search(text))


def is_surely_config(text: str) -> bool:
    """Whether a file that cannot be parsed is clearly meant as a configuration, and is not a template of one."""
    return bool(_SURE.search(text)) and "{%" not in text and "{{" not in text


def fill_template(text: str) -> str:
    """The text with `{{ name }}` replaced by a string of the same length that stands for an unknown value.

    A template of Jinja or Helm is then JSON or YAML and can be checked; one with `{% if %}` usually is neither.
    """
    return _SLOT.sub(lambda slot: '"${' + "_" * (len(slot.group()) - 5) + '}"', text)


def find_configs(root: Node, name: str = "") -> Iterator[Match]:
    """Every configuration in a document, outer ones first; `name` is what the document as a whole is called."""
    inside: set[int] = set()
    names = {id(root): name}
    for node in walk(root):
        if not isinstance(node, Block) or id(node) in inside:
            continue
        names |= {id(entry.value): entry.key for entry in node.entries}
        if "lightning" in _text(node, "class_path") and (arguments := _child(node, "init_args")):
            names[id(arguments)] = _text(node, "class_path").rpartition(".")[2]
        recipe = recipe_of(node)
        tables = node is root and recipe is None and recipe_of(_flat(node)) == "kohya"
        if tables:
            recipe = "kohya"  # sd-scripts ignores the names of tables
        if recipe is not None:
            yield Match(recipe, _flat(node) if tables else node, strict=True)
        if recipe in {"kohya", "verl"}:
            inside.update(id(inner) for inner in walk(node))
        kind = kind_of(node) if recipe in {None, "llamafactory"} else None  # LLaMA-Factory reads TrainingArguments too
        if kind is None:
            if recipe is None and is_trainer_part(node, names.get(id(node), "")):
                yield Match("lightning", _interpolated(node, root), strict=False)
            continue
        if kind == "lightning":
            yield Match(kind, _interpolated(node, root), strict=True)
            continue
        yield Match(kind, node, kind != "deepspeed" or has_own_keys(node))
        if kind == "deepspeed":
            inside.update(id(inner) for inner in walk(node))
        elif kind == "accelerate" and (plugin := _child(node, "deepspeed_config")):
            inside.update(id(inner) for inner in walk(plugin))  # these are Accelerate's keys, some with the same names


def recipe_of(block: Block) -> Recipe | None:
    """The training program a mapping is a recipe of, or None."""
    keys = set(block.keys())
    if "base_model" in keys and keys & {"datasets", "pretraining_dataset"} and len(keys & _AXOLOTL) >= 2:
        return "axolotl"
    if "finetuning_type" in keys and keys & {"stage", "template"}:
        known = _text(block, "finetuning_type") in _LLAMAFACTORY_TYPES
        return "llamafactory" if known and _text(block, "stage") in {*_LLAMAFACTORY_STAGES, ""} else None
    if "dtype" in keys and _text(block, "optimizer", "_component_"):
        parts = (_text(block, name, "_component_") for name in keys)
        return "torchtune" if any(part.startswith("torchtune.") for part in parts) else None
    training = _child(block, "training")
    if training is not None and _child(block, "model") is not None and keys & {"job", "parallelism", "metrics"}:
        return "torchtitan" if set(training.keys()) & {"seq_len", "local_batch_size", "batch_size", "steps"} else None
    if keys & {"full_bf16", "full_fp16"}:
        return "kohya" if len(keys & _KOHYA) >= 3 else None
    common, optimizer = _child(block, "common"), _child(block, "optimizer")
    if common is not None and {"memory_efficient_fp16", "memory_efficient_bf16"} & set(common.keys()):
        return "fairseq" if keys & _FAIRSEQ else None
    if optimizer is not None and "accumulate_grad_in_fp32" in optimizer:
        return "nanotron" if {"model", "parallelism"} <= keys else None
    return "verl" if _is_verl(block) else None


def _is_verl(block: Block) -> bool:
    """Whether a mapping is verl's: an actor, or an optimizer, next to FSDP settings that name the weights' dtype."""
    actor, model = _child(block, "actor"), _child(block, "model")
    owners = [actor, *((block, model) if _child(block, "optim") is not None else ())]
    settings = [_child(owner, "fsdp_config") for owner in owners if owner is not None]
    return any(part is not None and "model_dtype" in part for part in settings)


def _flat(block: Block) -> Block:
    """The mapping with the entries of its tables in place of the tables."""
    parts = [e.value.entries if isinstance(e.value, Block) else (e,) for e in block.entries]
    return replace(block, entries=tuple(entry for part in parts for entry in part))


def _child(block: Block, key: str) -> Block | None:
    entry = block.entry(key)
    return entry.value if entry is not None and isinstance(entry.value, Block) else None


def _text(block: Block, *path: str) -> str:
    """The string at a path, or ""."""
    for key in path[:-1]:
        child = _child(block, key)
        if child is None:
            return ""
        block = child
    entry = block.entry(path[-1])
    value = entry.value.value if entry is not None and isinstance(entry.value, Scalar) else None
    return value if isinstance(value, str) else ""


def kind_of(block: Block) -> Kind | None:
    """The tool a mapping configures, or None."""
    keys = set(block.keys())
    if len(keys & _ACCELERATE) >= 2 and keys & {"compute_environment", "distributed_type", "mixed_precision"}:
        return "accelerate"
    if is_deepspeed(block):
        return "deepspeed"
    precision = keys & {"fp16", "bf16", "tf32", "fp16_full_eval", "bf16_full_eval", "half_precision_backend"}
    if (keys & {"model_name_or_path", *TUNERS}) and _text(block, "torch_dtype") + _text(block, "dtype"):
        precision = precision | {"torch_dtype"}  # TRL and ms-swift, which decide `bf16` themselves
    trainer = len(keys & _TRANSFORMERS)
    if precision and trainer >= 2 and (keys & set(_TRANSFORMERS_ALONE) or trainer >= 4) and not keys & _PADDLE:
        return "transformers"
    target = block.entry("_target_")
    is_target = target is not None and isinstance(target.value, Scalar) and "lightning" in str(target.value.value)
    if "precision" in keys and (is_target or len(keys & _LIGHTNING) >= 3 or _is_litgpt(block)):
        return "lightning"
    return None


def _interpolated(block: Block, root: Node) -> Block:
    """The block with a `precision` of `${trainer.precision}` replaced by the value the document has there."""
    entry = block.entry("precision")
    path = _INTERPOLATION.match(entry.value.text) if entry is not None and isinstance(entry.value, Scalar) else None
    node: Node | None = root
    inner: Entry | None = None
    for key in path.group(1).split(".") if path else ():
        inner = node.entry(key) if isinstance(node, Block) else None
        node = inner.value if inner is not None else None
    if path is None or entry is None or inner is None or not isinstance(node, Scalar):
        return block
    new = Entry("precision", inner.key_span, node)
    return replace(block, entries=tuple(new if e is entry else e for e in block.entries))


def is_trainer_part(block: Block, name: str) -> bool:
    """Whether a mapping with few keys is a part of the Trainer's arguments, by its name or by keys of Lightning alone."""
    keys = set(block.keys())
    removed = keys & {"amp_level", "amp_backend"}
    if not (removed or "precision" in keys) or block.entry("_target_") or block.entry("class_path"):
        return False
    known = keys & (_LIGHTNING | LIGHTNING_ALONE)
    if known and _text(block, "precision") in _LIGHTNING_PRECISIONS:
        return True
    return len(keys & LIGHTNING_ALONE) >= 2 or len(known) >= 3 or (bool(known) and bool(_LIGHTNING_NAME.search(name)))


def _is_litgpt(block: Block) -> bool:
    """Whether a mapping is a recipe of LitGPT, whose `precision` is that of Fabric."""
    train = _child(block, "train")
    return train is not None and {"micro_batch_size", "global_batch_size"} <= set(train.keys())


def is_deepspeed(block: Block) -> bool:
    """Whether a mapping is a DeepSpeed configuration."""
    keys = set(block.keys())
    if _describes_keys(block):
        return False
    zero = block.entry("zero_optimization")
    if zero is not None and (isinstance(zero.value, Block) or _is_flag(zero.value)):
        return True
    if "train_micro_batch_size_per_gpu" in keys or "zero_allow_untested_optimizer" in keys:
        return len(keys & DEEPSPEED_KEYS) >= 2 and not _has_own_switches(block)
    if keys & {"fsdp", "fsdp_config"}:
        return False  # blocks in DeepSpeed's style for another engine
    modes = [name for name in ("fp16", "bf16", "bfloat16", "torch_autocast", "amp") if _has_mode(block, name)]
    if _is_foreign_mode(block, modes):
        return False
    if modes and len(keys & _DEEPSPEED_WITH) >= 1:
        return len(keys & DEEPSPEED_KEYS) * 2 >= len(keys)
    if keys <= DEEPSPEED_KEYS and "train_batch_size" in keys and len(keys & _DEEPSPEED_WITH) >= 3:
        return True
    return bool(modes) and len(keys) == len(modes) and any(_is_typical(block, name) for name in modes)


def _has_own_switches(block: Block) -> bool:
    """Whether `bf16: true` stands among keys of which DeepSpeed does not know half: the settings of a script."""
    switches = [entry for entry in block.entries if entry.key in {"fp16", "bf16", "amp"}]
    keys = set(block.keys())
    return len(keys - DEEPSPEED_KEYS) * 2 >= len(keys) and any(_is_flag(entry.value) for entry in switches)


def _is_foreign_mode(block: Block, modes: list[str]) -> bool:
    """Whether `amp: {enabled: true, amp_dtype: bfloat16}` next to an optimizer is a block of another trainer."""
    amp, optimizer = _child(block, "amp"), _child(block, "optimizer")
    if modes != ["amp"] or amp is None:
        return False
    instantiated = optimizer is not None and bool({"_target_", "class_path"} & set(optimizer.keys()))
    return instantiated or any("dtype" in entry.key for entry in amp.entries)


def _describes_keys(block: Block) -> bool:
    """Whether the values are sentences: a table that documents the keys (help texts, reasons), not a configuration."""
    values = [entry.value for entry in block.entries if not is_comment(entry.key)]
    texts = [v.value for v in values if isinstance(v, Scalar) and isinstance(v.value, str)]
    return len([text for text in texts if " " in text.strip()]) * 4 >= len(values) >= 3


def is_comment(key: str) -> bool:
    """Whether a key is a comment in a format that has none: `_comment`, `//`, `note`."""
    return key.startswith(("_", "#", "//", "$")) or "comment" in key.casefold() or key.casefold() in {"note", "notes"}


def _has_mode(block: Block, name: str) -> bool:
    entry = block.entry(name)
    return entry is not None and isinstance(entry.value, Block) and entry.value.entry("enabled") is not None


def _is_typical(block: Block, name: str) -> bool:
    """Whether a lone block such as fp16 has DeepSpeed's keys in addition to `enabled`."""
    entry = block.entry(name)
    return (
        entry is not None and isinstance(entry.value, Block) and len(set(entry.value.keys()) & set(BLOCKS[name])) >= 2
    )


def _is_flag(node: Node) -> bool:
    return isinstance(node, Scalar) and isinstance(node.value, bool)


def has_own_keys(block: Block) -> bool:
    """Whether a mapping contains only DeepSpeed's keys, not mixed with those of a larger program."""
    keys = set(block.keys())
    if any("." in key for key in keys):
        return False  # dotted paths of keys, which some program merges into a configuration
    known = DEEPSPEED_KEYS | set(PARENT_BLOCK)  # a setting outside its block is DeepSpeed's too
    return not keys & _FOREIGN and len(keys - known) <= max(1, len(keys) // 3)
