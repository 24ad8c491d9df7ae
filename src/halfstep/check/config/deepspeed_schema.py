"""DeepSpeed's valid keys per block, and its renamed and removed keys: one table for all key rules.

Source: the validators of DeepSpeed 0.19.8 (runtime/precision_config.py, zero/config.py, zero/offload_config.py). Keys
that earlier releases accepted and 0.19.8 removed are listed in `REMOVED`, so that they are not reported as misspelled.
"""

from __future__ import annotations

from halfstep.precision.deepspeed_keys import BLOCKS, REMOVED_KEYS

__all__ = ["ARGUMENTS", "BLOCK_KEYS", "OFF_BY_DEFAULT", "PARENT_BLOCK", "REMOVED", "RENAMED", "TOP_NUMBERS"]

_ZERO = (
    "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "compute_grad_norm", "load_from_fp32_weights",
    "elastic_checkpoint", "offload_param", "offload_optimizer", "zenflow", "sub_group_size", "cpu_offload_param",
    "cpu_offload_use_pin_memory", "cpu_offload", "prefetch_bucket_size", "stage3_prefetch_bucket_size",
    "param_persistence_threshold", "stage3_param_persistence_threshold", "model_persistence_threshold",
    "stage3_model_persistence_threshold", "max_live_parameters", "stage3_max_live_parameters", "max_reuse_distance",
    "stage3_max_reuse_distance", "gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save",
    "module_granularity_threshold", "stage3_module_granularity_threshold", "use_all_reduce_for_fetch_params",
    "stage3_use_all_reduce_for_fetch_params", "allgather_sequential", "stage3_allgather_sequential",
    "stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters", "legacy_stage1", "round_robin_gradients",
    "parameter_alignment", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients", "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply",
    "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module",
)  # fmt: skip
_OFFLOAD_PARAM = ("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory")
_OFFLOAD_OPTIMIZER = (
    "device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init",
    "ratio", "super_offload", "cpuadam_cores_perc",
)  # fmt: skip

# Block -> valid keys; any other key is a validation error.
BLOCK_KEYS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("fp16",): BLOCKS["fp16"],
    ("bf16",): BLOCKS["bf16"],
    ("bfloat16",): BLOCKS["bf16"],
    ("zero_optimization",): _ZERO,
    ("zero_optimization", "offload_param"): _OFFLOAD_PARAM,
    ("zero_optimization", "offload_optimizer"): _OFFLOAD_OPTIMIZER,
}

# Key -> the block it belongs to, for keys that exist in one block only.
PARENT_BLOCK: dict[str, str] = {
    **{key: "zero_optimization" for key in _ZERO if key not in {"elastic_checkpoint", "zenflow", "leaf_module"}},
    **{key: "fp16" for key in BLOCKS["fp16"] if key not in {"enabled", "auto_cast"}},
    "grad_accum_dtype": "data_types",
    **{f"{end}_train_micro_batch_size_per_gpu": "autotuning" for end in ("min", "max")},
    "num_tuning_micro_batch_sizes": "autotuning",
    "max_grad_norm": "",  # in no block: DeepSpeed's name for it is the top-level gradient_clipping
}

# Keys of PARENT_BLOCK whose default is false, 0 or none.
OFF_BY_DEFAULT = frozenset({
    "stage", "offload_param", "offload_optimizer", "cpu_offload_param", "cpu_offload_use_pin_memory", "cpu_offload",
    "gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save", "module_granularity_threshold",
    "stage3_module_granularity_threshold", "use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential", "stage3_allgather_sequential", "stage3_gather_fp16_weights_on_model_save", "legacy_stage1",
    "round_robin_gradients", "parameter_alignment", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients", "pipeline_loading_checkpoint", "log_trace_cache_warnings", "enable_sanity_checks",
    "save_muon_momentum_buffer_in_memory", "loss_scale", "consecutive_hysteresis", "fp16_master_weights_and_grads",
    "grad_accum_dtype", "max_grad_norm",
})  # fmt: skip

# Key -> where it was valid, for removed features that 0.19.8 raises an error for. `amp` has a separate rule.
REMOVED: dict[str, str] = {
    **{key: "top" for key in REMOVED_KEYS if key != "amp"},
    "mics_shard_size": "zero_optimization",
    "mics_hierarchical_params_gather": "zero_optimization",
    "zeropp_loco_param": "zero_optimization",
}

RENAMED: dict[tuple[str, ...], str] = {
    ("bfloat16",): "bf16",
    ("zero_optimization", "cpu_offload"): "offload_optimizer",
    ("zero_optimization", "cpu_offload_param"): "offload_param",
    ("zero_optimization", "stage3_gather_fp16_weights_on_model_save"): "stage3_gather_16bit_weights_on_model_save",
}

# Top-level numbers that DeepSpeed uses without converting or validating them.
TOP_NUMBERS: tuple[str, ...] = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "gradient_predivide_factor",
)
# Arguments of the optimizers and schedules that DeepSpeed creates by name; they are read from `params` only.
ARGUMENTS: dict[str, frozenset[str]] = {
    "optimizer": frozenset({
        "lr", "betas", "eps", "weight_decay", "bias_correction", "adam_w_mode", "torch_adam", "amsgrad", "momentum",
        "dampening", "nesterov", "alpha", "centered", "max_coeff", "min_coeff", "max_grad_norm", "freeze_step",
        "cuda_aware", "comm_backend_name", "coeff_beta", "factor_max", "factor_min", "factor_threshold",
        "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper", "fused", "foreach",
    }),
    "scheduler": frozenset({
        "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "warmup_min_ratio", "cos_min_ratio",
        "total_num_steps", "last_batch_iteration", "lr_range_test_min_lr", "lr_range_test_step_size",
        "lr_range_test_step_rate", "lr_range_test_staircase", "cycle_min_lr", "cycle_max_lr", "decay_lr_rate",
        "cycle_first_step_size", "cycle_second_step_size", "cycle_first_stair_count", "cycle_second_stair_count",
        "decay_step_size", "cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate",
    }),
}  # fmt: skip
