"""Rules for LLaMA-Factory's YAML and JSON files, and its arguments in a dictionary."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.recipes import is_absent
from halfstep.check.finding import Finding, Severity
from halfstep.check.rule import KindRule, Rule

__all__ = ["RULES"]

_SOURCE = "https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/"
_FULL = "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\ndo_train: true\nfinetuning_type: full\ntemplate: qwen3\n"
_MEMORY_SAVERS = ("use_galore", "use_apollo", "use_badam", "use_adam_mini")


class LlamaFactoryRule(KindRule):
    """A rule for LLaMA-Factory's arguments."""

    kind = "llamafactory"

    def check(self, config: Config) -> Iterator[Finding]:
        """The findings in `config`, if it is LLaMA-Factory's and trains all weights or some layers."""
        trains_weights = config.value("finetuning_type") in {"full", "freeze"}
        if config.kind == self.kind and trains_weights and config.value("do_train") is True:
            yield from self.inspect(config)


class PureBf16(LlamaFactoryRule):
    """`pure_bf16` trains the weights in bf16 without an fp32 master copy."""

    code = "HS505"
    name = "llamafactory-pure-bf16"
    severity = "warning"
    reason = (
        "LLaMA-Factory casts trainable weights to fp32 unless `pure_bf16` is true; then the optimizer updates bf16 "
        "weights. bf16 has 8 significant bits: an update below 1/512 of a weight has no effect, and at a learning "
        "rate of 1e-5 that is most of them. `bf16: true` computes in bf16 and keeps fp32 weights. With GaLore, APOLLO "
        "or BAdam the saved memory is the point, so it is advice there."
    )
    bad = (
        _FULL + "pure_bf16: true\nlearning_rate: 1.0e-5\n",
        _FULL + "use_galore: true\npure_bf16: true\n",
        "import json\n\nargs = dict(stage='sft', do_train=True, finetuning_type='full', template='llama3', pure_bf16=True)\n"
        "json.dump(args, open('train.json', 'w'))\n",
    )
    good = (
        _FULL + "bf16: true\nlearning_rate: 1.0e-5\n",
        _FULL.replace("full", "lora") + "pure_bf16: true\n",
        _FULL + "pure_bf16: true\ndeepspeed: ds_z2_config.json\n",
    )
    references = (
        _SOURCE + "model/adapter.py",
        "https://github.com/hiyouga/LlamaFactory/issues/9591",
        "https://arxiv.org/abs/2010.06192",
    )

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report the flag without DeepSpeed, whose ZeRO optimizers keep fp32 weights."""
        entry = config.entry("pure_bf16")
        if entry is None or config.value("pure_bf16") is not True or not is_absent(config, "deepspeed"):
            return
        saves_memory = any(config.value(key) is True for key in _MEMORY_SAVERS)
        message = (
            "`pure_bf16` trains bf16 weights without an fp32 master copy; updates below 1/512 of a weight are lost."
        )
        instead = "Use `bf16: true`, which keeps fp32 weights."
        severity: Severity | None = "advice" if saves_memory else None
        yield self.finding(config.where(entry), message, instead=instead, severity=severity)


class QuantizedFullTuning(LlamaFactoryRule):
    """Quantized weights are to be trained themselves, not through an adapter."""

    code = "HS506"
    name = "llamafactory-quantized-weights"
    severity = "error"
    reason = (
        "Weights in 8 or 4 bits cannot be trained. For `finetuning_type` full and freeze, LLaMA-Factory raises "
        "'Quantized models can only be used for the LoRA or OFT tuning' after it has loaded the model."
    )
    bad = (_FULL + "bf16: true\nquantization_bit: 4\n",)
    good = (_FULL + "bf16: true\n", _FULL.replace("full", "lora") + "bf16: true\nquantization_bit: 4\n")
    references = (_SOURCE + "model/adapter.py",)

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report a number of bits."""
        entry = config.entry("quantization_bit")
        bits = config.number("quantization_bit")
        if entry and bits:
            kind = config.value("finetuning_type")
            message = f"`quantization_bit: {bits:g}` cannot be combined with `finetuning_type: {kind}`; LLaMA-Factory raises a ValueError."
            yield self.finding(config.where(entry), message, instead="Remove it, or use `finetuning_type: lora`.")


RULES: tuple[type[Rule], ...] = (PureBf16, QuantizedFullTuning)
