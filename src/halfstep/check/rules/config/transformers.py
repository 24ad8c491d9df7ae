"""Hugging Face's TrainingArguments and its relatives, as a call or as the YAML or JSON their parser reads."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.finding import Finding
from halfstep.check.rule import ConfigRule, Rule

__all__ = ["RULES"]

_DOCS = "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"
_APEX = "https://github.com/NVIDIA/apex/pull/1896"


class TrainerRule(ConfigRule):
    """A rule over TrainingArguments."""

    def check(self, config: Config) -> Iterator[Finding]:
        """The findings in `config`, if it is a Trainer's."""
        if config.kind == "transformers":
            yield from self.inspect(config)

    def inspect(self, config: Config) -> Iterator[Finding]:
        """The findings in one set of arguments."""
        raise NotImplementedError


class Fp16AndBf16(TrainerRule):
    """fp16 and bf16 are both true."""

    code = "HS271"
    name = "fp16-and-bf16"
    severity = "error"
    reason = (
        "TrainingArguments raises 'At most one of fp16 and bf16 can be True, but not both', and the same for fp16_full_eval and "
        "bf16_full_eval. fp16 is the choice for GPUs before Ampere, bf16 for the others."
    )
    bad = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True, bf16=True)\n",
        "output_dir: out\nper_device_train_batch_size: 8\nlearning_rate: 1.0e-4\nfp16: true\nbf16: true\n",
        "from trl import SFTConfig\n\nargs = SFTConfig(output_dir='out', fp16_full_eval=True, bf16_full_eval=True)\n",
    )
    good = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=not has_bf16, bf16=has_bf16)\n",
        "output_dir: out\nper_device_train_batch_size: 8\nlearning_rate: 1.0e-4\nfp16: false\nbf16: true\n",
    )
    references = (_DOCS, "measured: read in transformers 5.22, training_args.py")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Each pair of flags."""
        for first, second in (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval")):
            found = config.entry(second)
            if config.value(first) is True and config.value(second) is True and found:
                message = f"{first} and {second} are both true, and the arguments refuse that."
                yield self.finding(
                    config.where(found), message, instead=f"Keep {second} on Ampere and later, else {first}."
                )


class TrainerFp16OnCpu(TrainerRule):
    """fp16 is asked for on the CPU."""

    code = "HS272"
    name = "trainer-fp16-on-cpu"
    severity = "error"
    reason = (
        "fp16 mixed precision needs a GPU: the Trainer, or Accelerate under it, stops with a ValueError when use_cpu (formerly "
        "no_cuda) is true."
    )
    bad = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True, use_cpu=True)\n",
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True, no_cuda=True)\n",
    )
    good = ("from transformers import TrainingArguments\n\nargs = TrainingArguments('out', bf16=True, use_cpu=True)\n",)
    references = (_DOCS, "measured: read in accelerate 1.15, accelerator.py")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """fp16 with the CPU asked for."""
        found = config.entry("fp16")
        on_cpu = config.value("use_cpu") is True or config.value("no_cuda") is True
        if found and config.value("fp16") is True and on_cpu:
            message = "fp16 on the CPU: the Trainer stops with a ValueError."
            yield self.finding(config.where(found), message, instead="Use bf16, or neither.")


class Fp16WeightsWithFp16(TrainerRule):
    """The model is loaded in fp16 and trained with fp16=True, whose scaler cannot unscale its gradients."""

    code = "HS273"
    name = "fp16-weights-with-fp16"
    severity = "error"
    reason = (
        "fp16=True is autocast over fp32 weights with a GradScaler. Weights loaded with torch_dtype=float16 have fp16 gradients, "
        "and the first step raises 'Attempting to unscale FP16 gradients'. There would be no fp32 master either: at fp16's 11 "
        "bits an update below 1/4096 of a weight changes nothing."
    )
    bad = (
        "import torch\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2', torch_dtype=torch.float16)\n"
        "args = TrainingArguments('out', fp16=True)\nTrainer(model=model, args=args).train()\n",
    )
    good = (
        "import torch\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2')\n"
        "args = TrainingArguments('out', fp16=True)\nTrainer(model=model, args=args).train()\n",
        "import torch\nfrom peft import LoraConfig, get_peft_model\n"
        "from transformers import AutoModelForCausalLM, TrainingArguments\n\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2', torch_dtype=torch.float16)\n"
        "model = get_peft_model(model, LoraConfig())\nargs = TrainingArguments('out', fp16=True)\n",
    )
    references = (
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/945",
        "https://huggingface.co/docs/peft/developer_guides/troubleshooting",
    )

    def inspect(self, config: Config) -> Iterator[Finding]:
        """The flag in a script whose one model has fp16 weights."""
        found = config.entry("fp16")
        if found and config.value("fp16") is True and config.root.call and "fp16 weights" in config.script:
            yield self.finding(
                config.where(found),
                "The model is loaded in fp16, and fp16=True needs fp32 weights: the first step raises 'Attempting to unscale "
                "FP16 gradients'.",
                instead="Load the model without torch_dtype; fp16=True casts what it computes.",
            )


class Bf16WeightsTrained(TrainerRule):
    """The model is loaded in bf16 and trained as it is, with no fp32 copy of its weights."""

    code = "HS277"
    name = "bf16-weights-trained"
    severity = "advice"
    reason = (
        "bf16=True is autocast: it keeps the weights in the dtype they were loaded in. Loaded in bf16 they have 8 significant bits, "
        "and an update below 1/512 of a weight changes nothing: at a learning rate of 1e-5 most do not. It saves half the "
        "memory, which may be why; loaded in fp32, the same flag trains with fp32 weights."
    )
    bad = (
        "import torch\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2', torch_dtype=torch.bfloat16)\n"
        "args = TrainingArguments('out', bf16=True)\nTrainer(model=model, args=args).train()\n",
    )
    good = (
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2')\n"
        "args = TrainingArguments('out', bf16=True)\nTrainer(model=model, args=args).train()\n",
    )
    references = (_DOCS, "https://arxiv.org/abs/2010.06192")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """The flag in a script whose one model has bf16 weights."""
        found = config.entry("bf16")
        if found and config.value("bf16") is True and config.root.call and "bf16 weights" in config.script:
            message = "The model is loaded in bf16, and bf16=True keeps it so: updates below 1/512 of a weight vanish."
            instead = "Load the model in fp32, or use an optimizer that keeps its own master."
            yield self.finding(config.where(found), message, instead=instead)


class ApexArguments(TrainerRule):
    """An argument of Apex is given, which no longer exists."""

    code = "HS274"
    name = "apex-arguments"
    severity = "warning"
    reason = (
        "Apex deleted its amp module in May 2025, and Transformers 5 the arguments for it (half_precision_backend, fp16_backend, "
        "fp16_opt_level): they raise a TypeError there. In Transformers 4 the opt level is read only with the apex backend, "
        "which then fails to import."
    )
    bad = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True, fp16_opt_level='O2')\n",
        "from transformers import TrainingArguments\n\n"
        "args = TrainingArguments('out', fp16=True, half_precision_backend='apex')\n",
    )
    good = ("from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True)\n",)
    references = (_APEX, _DOCS, "measured: transformers 5.22 has none of the three arguments")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Each of the three."""
        for key in ("half_precision_backend", "fp16_backend", "fp16_opt_level"):
            found = config.entry(key)
            value = config.value(key)
            if found is None or value is None:
                continue
            apex = value == "apex" or key == "fp16_opt_level"
            message = f"{key} belongs to Apex AMP, which is gone; Transformers 5 has no such argument."
            used = apex and config.value("fp16") is not False
            yield self.finding(config.where(found), message, instead="Remove it.", severity=None if used else "advice")


class FlagAsText(TrainerRule):
    """A precision flag is a text, which is true whatever it says."""

    code = "HS275"
    name = "flag-as-text"
    severity = "error"
    reason = (
        "TrainingArguments does not convert what it is given: fp16='False' is a non-empty string, and switches fp16 on. In YAML "
        "quotes do the same."
    )
    bad = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16='False')\n",
        "output_dir: out\nper_device_train_batch_size: 8\nlearning_rate: 1.0e-4\nbf16: 'false'\n",
    )
    good = ("from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=False)\n",)
    references = (_DOCS,)

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Flags that say no and mean yes."""
        for key in ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval"):
            value = config.value(key)
            found = config.entry(key)
            if found and isinstance(value, str) and value.casefold() in {"false", "no", "off"}:
                message = f"{key} is the text {value!r}, which is true: {key.split('_')[0]} is switched on."
                yield self.finding(config.where(found), message, instead=f"Write {key} without quotes, or remove it.")


class NanFilter(TrainerRule):
    """NaN losses are filtered out of the log of an fp16 run."""

    code = "HS276"
    name = "nan-filter"
    severity = "advice"
    reason = (
        "logging_nan_inf_filter (true by default) replaces a NaN or inf loss in the log with the average of the others, so a run "
        "that has diverged looks healthy. fp16 is where losses overflow."
    )
    bad = (
        "from transformers import TrainingArguments\n\n"
        "args = TrainingArguments('out', fp16=True, logging_nan_inf_filter=True)\n",
    )
    good = (
        "from transformers import TrainingArguments\n\n"
        "args = TrainingArguments('out', fp16=True, logging_nan_inf_filter=False)\n",
    )
    references = (_DOCS,)

    def inspect(self, config: Config) -> Iterator[Finding]:
        """The filter asked for in so many words."""
        found = config.entry("logging_nan_inf_filter")
        if found and config.value("logging_nan_inf_filter") is True and config.value("fp16") is True:
            message = "logging_nan_inf_filter hides NaN losses from the log of this fp16 run."
            yield self.finding(config.where(found), message, instead="Write logging_nan_inf_filter=False.")


RULES: tuple[type[Rule], ...] = (
    Fp16AndBf16,
    TrainerFp16OnCpu,
    Fp16WeightsWithFp16,
    Bf16WeightsTrained,
    ApexArguments,
    FlagAsText,
    NanFilter,
)
