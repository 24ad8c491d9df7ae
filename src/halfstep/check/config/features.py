"""What a configuration selects of the features that advisories are about, each with its entry."""

from __future__ import annotations

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed
from halfstep.precision.node import Entry

__all__ = ["features_of_config"]

_ADAM8BIT_NAMES = {"adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"}


def features_of_config(config: Config) -> dict[str, Entry]:
    """The features a configuration selects, each with the entry that selects it."""
    features: dict[str, Entry] = {}
    if config.kind == "deepspeed":
        deepspeed = DeepSpeed(config)
        stage = config.entry("zero_optimization", "stage") or config.entry("zero_optimization")
        if deepspeed.stage == 2 and stage:
            features["deepspeed_stage2"] = stage
        for name, is_on in (("fp16", deepspeed.fp16), ("bf16", deepspeed.bf16)):
            entry = config.entry(name if name == "fp16" else deepspeed.bf16_name, "enabled")
            if is_on and entry:
                features[f"deepspeed_{name}"] = entry
                if deepspeed.stage == 0:
                    features["deepspeed_stage0"] = entry
    elif config.kind == "accelerate":
        version = config.entry("fsdp_config", "fsdp_version")
        if (
            version
            and config.value("distributed_type") == "FSDP"  # Accelerate reads the block only then
            and config.value("fsdp_config", "fsdp_version") in {2, "2"}
            and config.value("mixed_precision") == "fp16"
        ):
            features["fsdp2_fp16"] = version
    elif config.kind == "transformers":
        steps = config.number("gradient_accumulation_steps")
        entry = config.entry("gradient_accumulation_steps")
        if entry and steps is not None and steps > 1:
            features["trainer_accumulation"] = entry
        entry = config.entry("optim")
        if entry and config.value("optim") in _ADAM8BIT_NAMES:
            features["adam8bit"] = entry
    return features
