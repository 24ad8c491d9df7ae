"""Rules for axolotl's YAML files."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.recipes import PLAIN_OPTIMIZERS, axolotl_fsdp, is_absent, needs_sharding, trains_all_weights
from halfstep.check.finding import Finding
from halfstep.check.rule import KindRule, Rule
from halfstep.precision.node import UNKNOWN, Entry, Scalar

__all__ = ["RULES"]

_DOCS = "https://docs.axolotl.ai/docs/config-reference.html"
_SOURCE = "https://github.com/axolotl-ai-cloud/axolotl/blob/main/src/axolotl/"
_MODEL = "base_model: Qwen/Qwen3-1.7B\ndatasets:\n  - path: tatsu-lab/alpaca\n    type: alpaca\nsequence_len: 2048\n"
_TRAIN = "micro_batch_size: 2\nnum_epochs: 1\noptimizer: adamw_torch_fused\nlearning_rate: 1e-5\n"


class AxolotlRule(KindRule):
    """A rule for axolotl's files."""

    kind = "axolotl"


class AxolotlBf16Weights(AxolotlRule):
    """axolotl trains all weights in bf16 without an fp32 master copy."""

    code = "HS501"
    name = "axolotl-bf16-weights"
    severity = "warning"
    reason = (
        "axolotl loads the model in bf16 wherever `bf16` is true or auto (on a GPU with bf16), and without an adapter "
        "the optimizer updates these bf16 weights. bf16 has 8 significant bits: an update below 1/512 of a weight has "
        "no effect, and at a learning rate of 1e-5 that is most of them. DeepSpeed and FSDP1 add fp32 master weights; "
        "axolotl's FSDP2 path shards the bf16 weights as they are, unless a release with `fp32_master_weights` is "
        "used."
    )
    bad = (
        _MODEL + _TRAIN + "bf16: true\n",
        _MODEL + "micro_batch_size: 2\nnum_epochs: 1\noptimizer: adamw_bnb_8bit\nbf16: auto\nload_in_8bit: false\n",
        _MODEL + _TRAIN + "bf16: true\nfsdp_version: 2\nfsdp_config:\n  reshard_after_forward: true\n",
        _MODEL + _TRAIN + "bf16: false\nbfloat16: true\n",
        _MODEL.replace("Qwen3-1.7B", "Qwen2.5-72B")
        + _TRAIN
        + "bf16: true\nfsdp_version: 2\nfsdp_config:\n  reshard_after_forward: true\n",
    )
    good = (
        _MODEL + _TRAIN + "bf16: true\ndeepspeed: deepspeed_configs/zero1.json\n",
        _MODEL + _TRAIN + "bf16: true\nadapter: lora\n",
        _MODEL + _TRAIN + "bf16: false\nfp16: false\n",
        _MODEL + _TRAIN + "bf16: true\nfsdp:\n  - full_shard\nfsdp_config:\n  fsdp_offload_params: true\n",
        _MODEL
        + _TRAIN
        + "bf16: true\nfsdp_version: 2\nfsdp_config:\n  reshard_after_forward: true\nfp32_master_weights: true\n",
        _MODEL + "micro_batch_size: 2\nnum_epochs: 1\noptimizer: optimi_adamw\nbf16: true\n",
        _MODEL.replace("Qwen/Qwen3-1.7B", "") + _TRAIN + "bf16: true\n",
        _MODEL.replace("Qwen3-1.7B", "Qwen2.5-72B") + _TRAIN + "bf16: true\n",
        "base_model: a/b\nmodels:\n  - model: a/b\nmerge_method: slerp\ndtype: bfloat16\n",
    )
    references = (
        _DOCS,
        _SOURCE + "utils/config/__init__.py",
        "https://github.com/axolotl-ai-cloud/axolotl/issues/3154",
        "https://github.com/axolotl-ai-cloud/axolotl/pull/3894",
    )

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report full fine-tuning in bf16 with a plain optimizer, where neither DeepSpeed nor FSDP1 keeps a copy."""
        optimizer = config.value("optimizer")
        plain = optimizer is None or str(optimizer).casefold() in PLAIN_OPTIMIZERS
        fsdp = axolotl_fsdp(config)
        master = fsdp == 1 or not is_absent(config, "deepspeed") or not is_absent(config, "fp32_master_weights")
        master = master or (fsdp == 0 and needs_sharding(config))
        # Without a model nothing is loaded: such a file is completed elsewhere, or rejected.
        if not trains_all_weights(config) or not plain or master or is_absent(config, "base_model"):
            return
        entry = _bf16_entry(config)
        if entry is None or config.value("fp16") is True:
            return
        shards = ", and FSDP2 shards them as they are" if fsdp else ""
        message = (
            f"`{entry.key}` loads the weights in bf16{shards}; unless the launcher adds DeepSpeed there is no fp32 master "
            "copy, and updates below 1/512 of a weight are lost."
        )
        instead = "Set `deepspeed:` to a ZeRO file (fp32 master weights), or train an adapter."
        yield self.finding(config.where(entry), message, instead=instead)


def _bf16_entry(config: Config) -> Entry | None:
    """The key that makes axolotl load the model in bf16."""
    written = _written(config, "bf16")
    if written in (True, "auto", "full"):
        return config.entry("bf16")
    return config.entry("bfloat16") if config.value("bfloat16") is True and written in (None, False) else None


def _written(config: Config, key: str) -> object:
    """The value of a key, with axolotl's "auto" as it is; None if it is absent."""
    entry = config.entry(key)
    if entry is None:
        return None
    return entry.value.value if isinstance(entry.value, Scalar) else UNKNOWN


class AxolotlFp16Weights(AxolotlRule):
    """axolotl trains all weights in fp16, and the GradScaler rejects their gradients."""

    code = "HS502"
    name = "axolotl-fp16-weights"
    severity = "error"
    reason = (
        "With `fp16: true` and no bf16, axolotl loads the model in fp16 and passes `fp16=True` to the Trainer, which "
        "adds a GradScaler. Without an adapter the gradients are fp16, and the first step raises 'Attempting to "
        "unscale FP16 gradients'. DeepSpeed and FSDP train an fp32 copy."
    )
    bad = (
        _MODEL + _TRAIN + "bf16: false\nfp16: true\n",
        _MODEL + _TRAIN + "bf16: auto\nfp16: true\n",
    )
    good = (
        _MODEL + _TRAIN + "bf16: false\nfp16: true\ndeepspeed: deepspeed_configs/zero2.json\n",
        _MODEL + _TRAIN + "bf16: false\nfp16: true\nadapter: lora\n",
    )
    references = (
        _DOCS,
        _SOURCE + "utils/schemas/validation.py",
        "https://huggingface.co/docs/peft/developer_guides/troubleshooting",
    )

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report fp16 without an adapter, DeepSpeed or FSDP."""
        entry = config.entry("fp16")
        off = _written(config, "bf16") in (None, False, "auto")
        alone = axolotl_fsdp(config) == 0 and is_absent(config, "deepspeed") and is_absent(config, "bfloat16")
        if entry and config.value("fp16") is True and off and alone and trains_all_weights(config):
            message = (
                "`fp16: true` without an adapter loads the weights in fp16 and adds a GradScaler; the first step raises "
                "'Attempting to unscale FP16 gradients'."
            )
            instead = "Train an adapter, use bf16, or set `deepspeed:` to a ZeRO file."
            yield self.finding(config.where(entry), message, instead=instead)


class AxolotlTwoFormats(AxolotlRule):
    """`fp16` and `bf16` are both set, and axolotl drops one of them."""

    code = "HS503"
    name = "axolotl-two-formats"
    severity = "advice"
    reason = (
        "axolotl does not reject the pair. `bf16: true` sets `fp16` to false, and `fp16: true` disables `bf16: auto`, "
        "even on a GPU with bf16 (releases before May 2025 enabled both there, which the Trainer rejects). fp16 needs a loss scale and overflows above 65504; bf16 needs neither."
    )
    bad = (
        _MODEL + _TRAIN + "adapter: lora\nbf16: true\nfp16: true\n",
        _MODEL + _TRAIN + "adapter: lora\nbf16: auto\nfp16: true\n",
    )
    good = (
        _MODEL + _TRAIN + "adapter: lora\nbf16: true\n",
        _MODEL + _TRAIN + "adapter: lora\nbf16: true\nfp16: false\n",
    )
    references = (_DOCS, _SOURCE + "utils/config/__init__.py")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report both keys set."""
        fp16 = config.entry("fp16")
        written = _written(config, "bf16")
        if fp16 is None or config.value("fp16") is not True or written not in (True, "auto"):
            return
        if written is True:
            message = "axolotl ignores `fp16: true`, because `bf16` is true."
            yield self.finding(config.where(fp16), message, instead="Remove `fp16`.")
        else:
            message = "`fp16: true` disables `bf16: auto`; axolotl trains in fp16 even on a GPU with bf16."
            yield self.finding(config.where(fp16), message, instead="Remove `fp16`, or set `bf16: false`.")


class AxolotlQuantizedWeights(AxolotlRule):
    """Quantized weights are to be trained without an adapter."""

    code = "HS504"
    name = "axolotl-quantized-weights"
    severity = "error"
    reason = (
        "Weights in 8 or 4 bits cannot be trained; an adapter in a floating-point format is trained on top of them. "
        "axolotl raises 'load_in_8bit and load_in_4bit are not supported without setting an adapter for training'."
    )
    bad = (
        _MODEL + _TRAIN + "bf16: true\nload_in_8bit: true\n",
        _MODEL + _TRAIN + "bf16: true\nload_in_4bit: true\nadapter:\n",
    )
    good = (
        _MODEL + _TRAIN + "bf16: true\nload_in_8bit: true\nadapter: lora\n",
        _MODEL + _TRAIN + "bf16: true\nload_in_4bit: true\nadapter: qlora\n",
    )
    references = (_DOCS, _SOURCE + "utils/schemas/peft.py")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report quantized loading without an adapter."""
        if not is_absent(config, "adapter") or not is_absent(config, "inference"):
            return
        for key in ("load_in_8bit", "load_in_4bit"):
            entry = config.entry(key)
            if entry and config.value(key) is True:
                message = f"`{key}: true` needs an adapter; axolotl raises a ValueError without one."
                adapter = "lora" if key == "load_in_8bit" else "qlora"
                instead = f"Add `adapter: {adapter}`, or set `{key}: false`."
                yield self.finding(config.where(entry), message, instead=instead)
                return


RULES: tuple[type[Rule], ...] = (AxolotlBf16Weights, AxolotlFp16Weights, AxolotlTwoFormats, AxolotlQuantizedWeights)
