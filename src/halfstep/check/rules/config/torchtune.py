"""Rules for torchtune's recipe configurations."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import KindRule, Rule
from halfstep.precision.formats import canonical_name

__all__ = ["RULES"]

_SOURCE = "https://github.com/pytorch/torchtune/blob/main/"
_DOCS = "https://docs.pytorch.org/torchtune/stable/tutorials/memory_optimizations.html#model-precision"
_ADAPTER = regex(r"lora|dora", re.IGNORECASE)
# The models of a recipe: `model`, `policy_model`, `student`; not `teacher_model`, which only gives targets.
_TRAINED = regex(r"^(?!.*(teacher|ref|reward|frozen|judge|old_))(\w+_)?model$|^(student|policy)$")
_OPTIMIZER = regex(
    r"^(?:torch\.optim|bitsandbytes\.optim|torchao\.(?:optim|prototype\.low_bit_optim))\.(?!CPUOffload)\w+$"
)
_FULL = (
    "model:\n  _component_: torchtune.models.qwen3.qwen3_8b_instruct\n"
    "optimizer:\n  _component_: torch.optim.AdamW\n  lr: 5e-6\ngradient_accumulation_steps: 8\n"
)
_TEACHER = "teacher_model:\n  _component_: torchtune.models.qwen3.qwen3_32b\n"


class TorchtuneRule(KindRule):
    """A rule for torchtune's configurations that train."""

    kind = "torchtune"


class TorchtuneBf16Weights(TorchtuneRule):
    """A full fine-tuning recipe trains bf16 weights without an fp32 master copy."""

    code = "HS507"
    name = "torchtune-bf16-weights"
    severity = "warning"
    reason = (
        "torchtune has no mixed precision: `dtype` is the format of weights, activations, gradients and optimizer "
        "states. In bf16, with 8 significant bits, an update below 1/512 of a weight has no effect; at a learning "
        "rate of 5e-6 that is most of them. LoRA recipes are not reported: the weights that they train start near 0."
    )
    bad = (
        _FULL + "dtype: bf16\n",
        _FULL.replace("torch.optim.AdamW", "bitsandbytes.optim.PagedAdamW8bit") + "dtype: bf16\n",
        _FULL.replace("torch.optim.AdamW", "torchao.prototype.low_bit_optim.AdamW8bit") + "dtype: bf16\n",
        _TEACHER + _FULL.replace("model:", "student_model:") + "dtype: bf16\n",
    )
    good = (
        _FULL + "dtype: fp32\n",
        _FULL.replace("qwen3_8b", "lora_qwen3_8b") + "dtype: bf16\n",
        _TEACHER + _FULL.replace("qwen3_8b", "lora_qwen3_8b") + "dtype: bf16\n",
        _FULL.replace("torch.optim.AdamW", "torchao.optim.AdamW8bit\n  bf16_stochastic_round: true") + "dtype: bf16\n",
    )
    references = (
        _DOCS,
        _SOURCE + "recipes/full_finetune_distributed.py",
        "https://github.com/NVIDIA-NeMo/Automodel/pull/2248",
    )

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report bf16 where the model is trained itself, by an optimizer of torch, bitsandbytes or torchao without stochastic rounding."""
        entry = config.entry("dtype")
        names = filter(_TRAINED.search, config.root.keys())
        models = [model for name in names if isinstance(model := config.value(name, "_component_"), str)]
        optimizer = str(config.value("optimizer", "_component_"))
        rounds = config.value("optimizer", "bf16_stochastic_round") is True
        full = bool(models) and not any(map(_ADAPTER.search, models)) and not rounds
        if entry and full and canonical_name(str(config.value("dtype"))) == "bf16" and _OPTIMIZER.match(optimizer):
            message = (
                f"`dtype: {config.value('dtype')}` trains bf16 weights with {optimizer} and no fp32 master copy; updates "
                "below 1/512 of a weight are lost."
            )
            instead = "Use `dtype: fp32`, a torchao optimizer with stochastic rounding, or a LoRA recipe."
            yield self.finding(config.where(entry), message, instead=instead)


class TorchtuneFp16(TorchtuneRule):
    """A torchtune recipe is to train in fp16, which none of them supports."""

    code = "HS508"
    name = "torchtune-fp16"
    severity = "error"
    reason = (
        "torchtune has no loss scaling. Its recipes raise 'full fp16 training is not supported with this recipe. "
        "Please use bf16 or fp32 instead' (LoRA: 'fp16 precision is not supported in this recipe')."
    )
    bad = (_FULL + "dtype: fp16\n",)
    good = (_FULL + "dtype: fp32\n",)
    references = (
        _SOURCE + "recipes/full_finetune_single_device.py",
        "https://github.com/meta-pytorch/torchtune/issues/1039",
    )

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report fp16 in a configuration with an optimizer."""
        entry = config.entry("dtype")
        if entry and canonical_name(str(config.value("dtype"))) == "fp16":
            message = "torchtune's recipes do not support fp16 and raise a ValueError."
            yield self.finding(config.where(entry), message, instead="Use `dtype: bf16` or `dtype: fp32`.")


RULES: tuple[type[Rule], ...] = (TorchtuneBf16Weights, TorchtuneFp16)
