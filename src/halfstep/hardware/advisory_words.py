"""What advisories are about, in words: packages and features. Most checks need these and not the table itself."""

from __future__ import annotations

__all__ = ["FEATURES", "FEATURE_WORDS", "PACKAGES", "WORDS"]

# Every package whose version an advisory depends on, in the order of the table.
PACKAGES = (
    "torch", "cudnn", "deepspeed", "accelerate", "transformers", "diffusers", "bitsandbytes", "liger-kernel", "flash-attn-4",
)  # fmt: skip

# What a program can be seen to use, as a phrase for messages and documentation.
FEATURES = {
    "sdpa": "`scaled_dot_product_attention`",
    "sdpa_mask": "`scaled_dot_product_attention` with an `attn_mask`",
    "long_sequence": "sequences of more than 65,536 tokens",
    "float_mask": "`generate_square_subsequent_mask`, which returns fp32",
    "half_model": "a model cast to fp16 or bf16",
    "generate": "`generate()` of a Transformers model",
    "compile": "`torch.compile`",
    "conv": "convolutions",
    "autocast_bf16": "bf16 autocast",
    "shared_modulation": "a parameter that is split with `chunk()`",
    "no_grad_in_autocast": "a `no_grad` forward followed by a forward with gradients in one autocast region",
    "fused_optimizer": "an optimizer with `fused=True`",
    "grad_scaler": "a GradScaler",
    "sharded_scaler": "a ShardedGradScaler",
    "unscale": "`unscale_()`",
    "adam": "Adam or AdamW",
    "mps": "the `mps` device",
    "group_norm": "GroupNorm",
    "layer_norm": "LayerNorm or RMSNorm",
    "fsdp2_fp16": "FSDP2 with fp16 through Accelerate",
    "trainer_accumulation": "gradient accumulation with the Transformers Trainer",
    "adam8bit": "an 8-bit Adam",
    "liger_none": "`LigerFusedLinearCrossEntropyLoss` with `reduction='none'`",
    "diffusers_cudnn": "the cuDNN attention backend of Diffusers with context parallelism",
    "te_attention": "`DotProductAttention` of Transformer Engine",
    "deepspeed_stage0": "DeepSpeed without ZeRO",
    "deepspeed_stage2": "DeepSpeed's ZeRO stage 2",
    "deepspeed_fp16": "DeepSpeed's fp16 block",
    "deepspeed_bf16": "DeepSpeed's bf16 block",
}

# A text without any of these uses none of the features that an advisory starts from.
WORDS = (
    "scaled_dot_product_attention", "generate_square_subsequent_mask", ".generate(", "torch.compile", ".compile(",
    "no_grad", "fused", "mps", "GroupNorm", "LayerNorm", "RMSNorm", "8bit", "LigerFusedLinear", "_native_cudnn",
    "DotProductAttention", "gradient_accumulation_steps", "zero_optimization", "fsdp_version",
)  # fmt: skip

# A text that uses a feature contains one of its words. Searching for them is a hundred times faster than parsing.
FEATURE_WORDS: dict[str, tuple[str, ...]] = {
    "sdpa": ("scaled_dot_product_attention",),
    "sdpa_mask": ("scaled_dot_product_attention",),
    "long_sequence": ("",),  # a number in any form
    "float_mask": ("generate_square_subsequent_mask",),
    "half_model": ("half", "float16"),
    "generate": ("generate",),
    "compile": ("compile",),
    "conv": ("Conv",),
    "autocast_bf16": ("autocast",),
    "shared_modulation": ("chunk",),
    "no_grad_in_autocast": ("no_grad",),
    "fused_optimizer": ("fused",),
    "grad_scaler": ("GradScaler",),
    "sharded_scaler": ("ShardedGradScaler",),
    "unscale": ("unscale_",),
    "adam": ("Adam",),
    "mps": ("mps",),
    "group_norm": ("GroupNorm",),
    "layer_norm": ("LayerNorm", "RMSNorm"),
    "fsdp2_fp16": ("fsdp_version",),
    "trainer_accumulation": ("gradient_accumulation_steps",),
    "adam8bit": ("8bit",),
    "liger_none": ("LigerFusedLinearCrossEntropyLoss",),
    "diffusers_cudnn": ("_native_cudnn",),
    "te_attention": ("DotProductAttention",),
    "deepspeed_stage0": ("fp16", "bf16", "bfloat16"),
    "deepspeed_stage2": ("zero_optimization",),
    "deepspeed_fp16": ("fp16",),
    "deepspeed_bf16": ("bf16", "bfloat16"),
}
