"""Rules for Hugging Face's TrainingArguments and its subclasses, in calls and in YAML or JSON files."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.flags import PAIRS, by_default, offered, on_by_itself
from halfstep.check.config.named_models import model_names
from halfstep.check.config.overflowing import OVERFLOWING
from halfstep.check.config.recipes import needs_sharding, trained_dtype
from halfstep.check.config.text_flags import FALSE_TEXTS
from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import KindRule, Rule
from halfstep.precision.node import Entry, Scalar

__all__ = ["RULES"]

_DOCS = "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"
_SUPPORTED = regex(r"[\w.]*\b(is_bf16_supported|is_bfloat16_supported|is_torch_bf16_gpu_available)\(\)")
_APEX = "https://github.com/NVIDIA/apex/pull/1896"


_FLAGS = """\
import torch
from transformers import TrainingArguments

training = TrainingArguments("out", fp16={fp16}, bf16={bf16})
"""
_CHOSEN = """\
import torch
from transformers import TrainingArguments

def train(config):
    supported = torch.cuda.is_bf16_supported(including_emulation=False)
    if {test}:
        config.bf16 = supported
    return TrainingArguments("out", fp16=config.fp16 or False, bf16=config.bf16 or False)
"""


class TrainerRule(KindRule):
    """A rule for TrainingArguments."""

    kind = "transformers"


class Fp16AndBf16(TrainerRule):
    """`fp16` and `bf16` are both true."""

    code = "HS271"
    name = "fp16-and-bf16"
    severity = "error"
    reason = (
        "TrainingArguments raises 'At most one of fp16 and bf16 can be True, but not both', and likewise for "
        "`fp16_full_eval` and `bf16_full_eval`. Use fp16 on GPUs older than Ampere and bf16 on newer ones."
    )
    bad = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True, bf16=True)\n",
        "output_dir: out\nper_device_train_batch_size: 8\nlearning_rate: 1.0e-4\nfp16: true\nbf16: true\n",
        "from trl import SFTConfig\n\nargs = SFTConfig(output_dir='out', fp16_full_eval=True, bf16_full_eval=True)\n",
        "import torch\nfrom transformers import TrainingArguments\n\n"
        "args = TrainingArguments('out', fp16=True, bf16=torch.cuda.is_bf16_supported())\n",
        "from transformers import TrainingArguments\n\noptions = dict(output_dir='out', fp16=True)\n"
        "options['bf16'] = True\nargs = TrainingArguments(**options)\n",
        _FLAGS.format(fp16="args.fp16", bf16="True"),
        _FLAGS.format(fp16="config.get('fp16', False)", bf16="torch.cuda.is_bf16_supported(including_emulation=False)"),
        _FLAGS.format(fp16="True", bf16="args.bf16"),
        _FLAGS.format(
            fp16="args.precision == 'fp16'", bf16="args.bf16 or torch.cuda.is_bf16_supported(including_emulation=False)"
        ),
        _CHOSEN.format(test="config.bf16 is None"),
    )
    good = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=not has_bf16, bf16=has_bf16)\n",
        "output_dir: out\nper_device_train_batch_size: 8\nlearning_rate: 1.0e-4\nfp16: false\nbf16: true\n",
        _FLAGS.format(fp16="args.fp16", bf16="args.bf16"),
        _FLAGS.format(fp16="args.fp16", bf16="not args.fp16"),
        _FLAGS.format(fp16="not supported", bf16="True"),
        _CHOSEN.format(test="config.bf16 is None and not config.fp16"),
        "from transformers import TrainingArguments\n\nif args.fp16:\n    raise SystemExit('use bf16')\n"
        "training = TrainingArguments('out', fp16=args.fp16, bf16=True)\n",
    )
    references = (_DOCS, "measured: source code of transformers 5.22, training_args.py")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Check each pair of flags."""
        for first, second in PAIRS:
            for chosen, other in ((first, second), (second, first)):
                if {offered(chosen), on_by_itself(other)} <= config.script and (entry := config.entry(chosen)):
                    where = "" if config.value(other) is True else " on a GPU with the format"
                    where = " by default" if by_default(other) in config.script else where
                    message = f"`{other}` stays true{where} where `{_text(config, chosen)}` is true; TrainingArguments raises a ValueError."
                    yield self.finding(
                        config.where(entry), message, instead=f"Make `{other}` false where `{chosen}` is true."
                    )
            entry = config.entry(second)
            is_both = {on_by_itself(first), on_by_itself(second)} <= config.script
            is_on = _is_on_gpu(config, first) and (config.value(second) is True or _asks_gpu(config, second))
            if entry and (is_on or is_both):
                where = "" if config.value(second) is True else "on a GPU with bfloat16 "
                message = f"{where}`{first}` and `{second}` are both true; TrainingArguments raises a ValueError."
                instead = f"Keep `{second}` on Ampere and later GPUs, `{first}` on older ones."
                yield self.finding(config.where(entry), message, instead=instead)


def _is_on_gpu(config: Config, key: str) -> bool:
    """Whether a flag is true on every GPU."""
    return config.value(key) is True or _text(config, key) == "torch.cuda.is_available()"


def _asks_gpu(config: Config, key: str) -> bool:
    """Whether a flag is true on every GPU with bfloat16: `torch.cuda.is_bf16_supported()` and nothing else."""
    return bool(_SUPPORTED.fullmatch(_text(config, key)))


def _text(config: Config, key: str) -> str:
    """A value that is no literal, as it is written."""
    entry = config.entry(key)
    return entry.value.text if entry is not None and isinstance(entry.value, Scalar) and entry.value.text else ""


class TrainerFp16OnCpu(TrainerRule):
    """fp16 is requested on the CPU."""

    code = "HS272"
    name = "trainer-fp16-on-cpu"
    severity = "error"
    reason = (
        "fp16 mixed precision requires a GPU: the Trainer, or Accelerate below it, raises a ValueError if `use_cpu` "
        "(formerly `no_cuda`) is true."
    )
    bad = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True, use_cpu=True)\n",
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True, no_cuda=True)\n",
    )
    good = ("from transformers import TrainingArguments\n\nargs = TrainingArguments('out', bf16=True, use_cpu=True)\n",)
    references = (_DOCS, "measured: source code of accelerate 1.15, accelerator.py")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report fp16 with an explicit CPU setting."""
        entry = config.entry("fp16")
        on_cpu = config.value("use_cpu") is True or config.value("no_cuda") is True
        if entry and config.value("fp16") is True and on_cpu:
            message = "fp16 is requested on the CPU; the Trainer raises a ValueError."
            yield self.finding(config.where(entry), message, instead="Use bf16, or neither.")


class Bf16WeightsConfigured(TrainerRule):
    """A file of training arguments loads the model in bf16 and trains all of its weights."""

    code = "HS278"
    name = "bf16-weights-configured"
    severity = "advice"
    reason = (
        "`bf16: true` is autocast: the weights keep the dtype they were loaded in. bf16 has 8 significant bits, so an "
        "update below 1/512 of a weight has no effect: at a learning rate of 1e-5 that is most updates. DeepSpeed, or FSDP "
        "with mixed precision, keep an fp32 copy; a single GPU and DDP do not."
    )
    bad = (
        "model_name_or_path: Qwen/Qwen3-4B\ntorch_dtype: bfloat16\nbf16: true\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-5\n",
        "model_name_or_path: Qwen/Qwen3-4B\ndtype: bfloat16\nbf16: true\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-5\n"
        "use_peft: false\nlora_r: 64\nlora_target_modules: all-linear\nload_in_4bit: false\nbnb_4bit_quant_type: nf4\n",
        "model_name_or_path: Qwen/Qwen3-4B\ntorch_dtype: bfloat16\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-5\n",
        "model_revision: main\ntorch_dtype: bfloat16\nattn_implementation: flash_attention_2\nbf16: true\n"
        "per_device_train_batch_size: 1\nnum_train_epochs: 1\n",
        "model: Qwen/Qwen3-4B\ntuner_type: full\ntorch_dtype: bfloat16\nper_device_train_batch_size: 1\nnum_train_epochs: 1\n",
    )
    good = (
        "model_name_or_path: Qwen/Qwen3-4B\ntorch_dtype: float32\nbf16: true\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-5\n",
        "model_name_or_path: Qwen/Qwen3-4B\ntorch_dtype: bfloat16\nuse_peft: true\nbf16: true\nper_device_train_batch_size: 2\n"
        "learning_rate: 1.0e-4\n",
        "model_name_or_path: Qwen/Qwen3-4B\ndtype: bfloat16\nbf16: true\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-5\n"
        "use_peft: false\nlora_enable: true\nlora_r: 64\n",
    )
    references = (_DOCS, "https://arxiv.org/abs/2010.06192")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report the dtype in a file of arguments."""
        entry = trained_dtype(config)
        if entry and config.value(entry.key) in {"bfloat16", "torch.bfloat16", "bf16"} and not needs_sharding(config):
            message = (
                f"`{entry.key}` loads the model in bf16; unless the launcher adds DeepSpeed or FSDP, the weights are "
                "trained in bf16 and updates below 1/512 of a weight are lost."
            )
            yield self.finding(
                config.where(entry), message, instead=f"Set `{entry.key}: float32`; `bf16: true` computes in bf16."
            )


class Fp16WeightsConfigured(TrainerRule):
    """A file of training arguments loads the model in fp16 and trains it with `fp16: true`."""

    code = "HS279"
    name = "fp16-weights-configured"
    severity = "warning"
    reason = (
        "`fp16: true` is autocast with a GradScaler, which needs fp32 weights: gradients of fp16 weights are fp16, and "
        "clipping them raises 'Attempting to unscale FP16 gradients.' DeepSpeed scales the loss itself and keeps an fp32 "
        "copy; a single GPU and DDP do not."
    )
    bad = (
        "model_name_or_path: Qwen/Qwen3-4B\ntorch_dtype: float16\nfp16: true\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-5\n",
    )
    good = (
        "model_name_or_path: Qwen/Qwen3-4B\ntorch_dtype: float32\nfp16: true\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-5\n",
        "model_name_or_path: Qwen/Qwen3-4B\ntorch_dtype: float16\nfp16: true\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-5\n"
        "deepspeed: ds_config.json\n",
        "model_name_or_path: Qwen/Qwen3-4B\ntorch_dtype: float16\nfp16: true\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-4\n"
        "use_peft: true\n",
    )
    references = (_DOCS, "https://github.com/haotian-liu/LLaVA/issues/363")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report the dtype next to the flag."""
        entry = trained_dtype(config)
        if entry and config.value("fp16") is True and config.value(entry.key) in {"float16", "torch.float16", "fp16"}:
            message = (
                f"`{entry.key}` loads the model in fp16; unless the launcher adds DeepSpeed, the GradScaler of "
                "`fp16: true` rejects the gradients of fp16 weights."
            )
            yield self.finding(
                config.where(entry), message, instead=f"Set `{entry.key}: float32`; `fp16: true` computes in fp16."
            )


class OverflowingModelConfigured(TrainerRule):
    """A file of training arguments trains a model in fp16 whose activations exceed its range."""

    code = "HS280"
    name = "overflowing-model-configured"
    severity = "warning"
    reason = (
        "T5 v1.1, FLAN-T5, mT5, T0 and the large T5 checkpoints, and Gemma 3 with models derived from it (MedGemma), were pre-trained in bfloat16 and have "
        "activations above 65504, the largest fp16 number. In fp16 they become inf and the loss NaN, or 0 in the "
        "Trainer's log; loss scaling does not help, because the forward pass overflows."
    )
    bad = (
        "model_name_or_path: google/flan-t5-large\nfp16: true\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-4\n",
        "model_name_or_path: google/gemma-3-4b-it\nfp16: true\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-4\n",
        "base_model: google/gemma-3-4b-it\ndatasets:\n  - path: x\nadapter: lora\nfp16: true\nmicro_batch_size: 1\nnum_epochs: 1\n",
    )
    good = (
        "model_name_or_path: google/flan-t5-large\nbf16: true\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-4\n",
        "model_name_or_path: t5-base\nfp16: true\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-4\n",
        "base_model: google/gemma-3-4b-it\ndatasets:\n  - path: x\nadapter: lora\nbf16: true\nmicro_batch_size: 1\nnum_epochs: 1\n",
    )
    references = (
        "https://github.com/huggingface/transformers/issues/23918",
        "https://github.com/huggingface/trl/issues/3236",
    )

    def check(self, config: Config) -> Iterator[Finding]:
        """The findings in a file of training arguments, also in axolotl's."""
        yield from self.inspect(config) if config.kind == "axolotl" else super().check(config)

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report fp16 next to the name of such a model."""
        entry = config.entry("fp16")
        model = next((name for name in model_names(config) if OVERFLOWING.search(name)), None)
        if entry and config.value("fp16") is True and model:
            message = f"{model} has activations above 65504, which fp16 turns into inf: the loss becomes NaN."
            yield self.finding(config.where(entry), message, instead="Use `bf16: true`, or fp32 on a GPU without it.")


class ApexArguments(TrainerRule):
    """An Apex argument is set, although Apex AMP no longer exists."""

    code = "HS274"
    name = "apex-arguments"
    severity = "warning"
    reason = (
        "Apex removed its amp module in May 2025, and Transformers 5 removed the arguments for it "
        "(`half_precision_backend`, `fp16_backend`, `fp16_opt_level`), which now raise a TypeError. Transformers 4 "
        "reads the opt level only with the apex backend, which fails to import with a current Apex."
    )
    bad = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True, fp16_opt_level='O2')\n",
        "from transformers import TrainingArguments\n\n"
        "args = TrainingArguments('out', fp16=True, half_precision_backend='apex')\n",
        "output_dir: out\nnum_train_epochs: 3\nper_device_train_batch_size: 8\nfp16: true\nfp16_opt_level: O2\n",
    )
    good = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True)\n",
        "output_dir: out\nnum_train_epochs: 3\nper_device_train_batch_size: 8\nfp16: true\nfp16_opt_level: O1\n"
        "half_precision_backend: auto\nfp16_backend: auto\n",
        "output_dir: out\nnum_train_epochs: 3\nper_device_train_batch_size: 8\nfp16: true\nfp16_opt_level: O2\nsharding: stage2\n",
    )
    references = (_APEX, _DOCS, "measured: transformers 5.22 has none of the three arguments")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Check each of the three arguments."""
        for key in ("half_precision_backend", "fp16_backend", "fp16_opt_level"):
            entry = config.entry(key)
            value = config.value(key)
            if entry is None or value is None:
                continue
            apex = value == "apex" or (key == "fp16_opt_level" and value != "O1")
            if not config.root.call and not (apex and config.value("fp16") is True):
                continue  # files often list every argument with its default
            apex |= key == "fp16_opt_level"
            message = f"`{key}` configures Apex AMP, which no longer exists; Transformers 5 raises a TypeError for it."
            used = apex and config.value("fp16") is not False
            yield self.finding(config.where(entry), message, instead="Remove it.", severity=None if used else "advice")


class FlagAsText(TrainerRule):
    """A precision flag is a string, and every non-empty string is true."""

    code = "HS275"
    name = "flag-as-text"
    severity = "error"
    reason = (
        "TrainingArguments does not convert its values: `fp16='False'` is a non-empty string and enables fp16. Quoted "
        "values in YAML behave the same, and so does the `fp16` block of a DeepSpeed configuration: any dictionary that is not empty is true."
    )
    bad = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16='False')\n",
        "import json\nfrom transformers import TrainingArguments\n\nds = json.load(open('ds.json'))\n"
        "args = TrainingArguments('out', fp16=ds['fp16'], learning_rate=ds['optimizer']['params']['lr'])\n",
        "output_dir: out\nper_device_train_batch_size: 8\nlearning_rate: 1.0e-4\nbf16: 'false'\n",
    )
    good = ("from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=False)\n",)
    references = (_DOCS,)

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report strings that read as false but are true."""
        for key in ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval"):
            value = config.value(key)
            entry = config.entry(key)
            if entry and isinstance(value, str) and value.casefold() in FALSE_TEXTS:
                message = f"`{key}` is the string {value!r}, which is true and enables {key.split('_')[0]}."
                yield self.finding(config.where(entry), message, instead="Write false without quotes, or remove it.")
            elif entry and (table := self._block_of(config, entry, key)):
                message = f"`{key}` is the whole block `{table}[{key!r}]` of a DeepSpeed configuration: a dictionary, which is true whatever it contains."
                instead = f"Pass `{table}[{key!r}]['enabled']`."
                yield self.finding(config.where(entry), message, instead=instead, severity="warning")

    @staticmethod
    def _block_of(config: Config, entry: Entry, key: str) -> str:
        """The variable of a DeepSpeed configuration whose block `config["fp16"]` is passed as a flag; "" if it is none."""
        text = entry.value.text if isinstance(entry.value, Scalar) else ""
        item = re.fullmatch(rf"(\w+)\[['\"]{key}['\"]\]", text)
        other = rf"\b{item[1]}\[['\"](zero_optimization['\"]\]|optimizer['\"]\]\[['\"]params)" if item else ""
        return item[1] if item and re.search(other, config.source.text) else ""


class NanFilter(TrainerRule):
    """NaN losses are filtered out of the log of an fp16 run."""

    code = "HS276"
    name = "nan-filter"
    severity = "advice"
    reason = (
        "`logging_nan_inf_filter` (true by default) replaces a NaN or inf loss in the log with the average of the "
        "other losses, so a diverged run looks healthy. In fp16, losses can overflow. The rule reports only an explicit "
        "True; a run that leaves the default filters the log in the same way."
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
        """Report the filter only if it is set explicitly."""
        entry = config.entry("logging_nan_inf_filter")
        if entry and config.value("logging_nan_inf_filter") is True and config.value("fp16") is True:
            message = "`logging_nan_inf_filter` hides NaN and inf losses in the log of this fp16 run."
            yield self.finding(config.where(entry), message, instead="Set `logging_nan_inf_filter=False`.")


RULES: tuple[type[Rule], ...] = (
    Fp16AndBf16,
    TrainerFp16OnCpu,
    Bf16WeightsConfigured,
    Fp16WeightsConfigured,
    OverflowingModelConfigured,
    ApexArguments,
    FlagAsText,
    NanFilter,
)
