"""HS290: misspelt keys in the YAML file of Accelerate."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.edits import rename
from halfstep.check.finding import Finding
from halfstep.check.rule import KindRule, Rule

__all__ = ["RULES"]

_DOCS = "https://huggingface.co/docs/accelerate/package_reference/cli"
_CUTOFF = 0.87  # of difflib: one or two letters
# Options of `accelerate launch` that each block sets; any other key becomes an attribute that nothing reads.
_DEEPSPEED = (
    "deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path",
    "offload_param_nvme_path", "gradient_accumulation_steps", "gradient_clipping", "zero3_init_flag",
    "zero3_save_16bit_model", "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher", "deepspeed_moe_layer_cls_names",
)  # fmt: skip
_FSDP = (
    "auto_wrap_policy", "backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "offload_params",
    "sharding_strategy", "state_dict_type", "sync_module_states", "transformer_layer_cls_to_wrap", "min_num_params",
    "cpu_ram_efficient_loading", "use_orig_params", "activation_checkpointing", "reshard_after_forward", "version",
)  # fmt: skip
_BLOCKS = {"deepspeed_config": _DEEPSPEED, "fsdp_config": (*(f"fsdp_{key}" for key in _FSDP), *_FSDP)}
_TOP = ("mixed_precision", "distributed_type", "deepspeed_config", "fsdp_config", "num_processes", "downcast_bf16")
# Every key of the file for a local machine, in all versions.
_CLUSTER = frozenset({
    *_TOP, "compute_environment", "use_cpu", "debug", "machine_rank", "num_machines", "gpu_ids", "main_process_ip",
    "main_process_port", "rdzv_backend", "same_network", "main_training_function", "enable_cpu_affinity", "fp8_config",
    "tp_config", "parallelism_config", "megatron_lm_config", "ipex_config", "mpirun_config", "tpu_name", "tpu_zone",
    "tpu_use_cluster", "tpu_use_sudo", "tpu_cluster", "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config",
    "dynamo_backend", "fp16", "use_xpu", "use_mps_device",
})  # fmt: skip
_FILE = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n  {stage}: 3\n{mode}: bf16\nnum_processes: 8\n"


class MisspeltAccelerateKey(KindRule):
    """A key of Accelerate's file is misspelt."""

    code = "HS290"
    name = "misspelt-accelerate-key"
    severity = "warning"
    kind = "accelerate"
    reason = (
        "`accelerate launch` copies each key of `deepspeed_config` and `fsdp_config` to an option of that name, known or not. A misspelt "
        "one sets an option that nothing reads: with `zero_stge: 3` the run uses stage 2, with `gradient_cliping: 0.5` it clips at 1.0, and "
        "nothing is logged. An unknown key at the top level raises a ValueError."
    )
    bad = (
        _FILE.format(stage="zero_stge", mode="mixed_precision"),
        _FILE.format(stage="zero_stage", mode="mixed_precison"),
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_shardin_strategy: FULL_SHARD\nmixed_precision: bf16\n",
        _FILE.format(stage="zero_stage", mode="mixed_precision") + "distributed_library: PyTorch DDP\n",
    )
    good = (
        _FILE.format(stage="zero_stage", mode="mixed_precision"),
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\nmixed_precision: bf16\n",
    )
    references = (
        _DOCS,
        "measured: source code of accelerate 1.15, commands/launch.py and commands/config/config_args.py",
    )

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Keys of the file that are a letter or two away from one that Accelerate knows."""
        if config.root.call:
            return
        for entry in config.root.entries:
            if key := _intended(entry.key, _TOP):
                fix = rename(config, entry, key, f"Rename to {key}") if key not in config.root else None
                yield self.finding(
                    config.where(entry.key_span),
                    f"Accelerate raises ValueError for the unknown key `{entry.key}`.",
                    instead=f"Rename it to `{key}`.",
                    fix=fix,
                    severity="error",
                )
            elif _is_unknown(config, entry.key):
                yield self.finding(
                    config.where(entry.key_span),
                    f"Accelerate raises ValueError for the unknown key `{entry.key}`.",
                    instead="Remove it.",
                    severity="error",
                )
        for name, known in _BLOCKS.items():
            block = config.block(name)
            for entry in block.entries if block is not None else ():
                if block is not None and (key := _intended(entry.key, known)):
                    fix = rename(config, entry, key, f"Rename to {key}") if key not in block else None
                    yield self.finding(
                        config.where(entry.key_span),
                        f"Accelerate ignores the unknown key `{entry.key}` in `{name}`.",
                        instead=f"Rename it to `{key}`.",
                        fix=fix,
                    )


def _is_unknown(config: Config, key: str) -> bool:
    """Whether no version of Accelerate knows a key of a file that `accelerate config` would write for a local machine."""
    is_local = config.value("compute_environment") == "LOCAL_MACHINE" and "distributed_type" in config.root
    return is_local and key.isidentifier() and key not in _CLUSTER


def _intended(key: str, known: tuple[str, ...]) -> str:
    """The known key that a misspelt one stands for; "" if the key is known, or like none."""
    plain = key.strip().lower().replace("-", "_").replace(" ", "_")
    if key in known:
        return ""
    close = difflib.get_close_matches(plain, known, n=1, cutoff=_CUTOFF)
    return close[0] if close else ""


RULES: tuple[type[Rule], ...] = (MisspeltAccelerateKey,)
