"""Rules for the values of a DeepSpeed configuration: quoted numbers, batch sizes, unresolved "auto", duplicates, non-strict JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule
from halfstep.check.config.deepspeed_schema import TOP_NUMBERS
from halfstep.check.config.edits import replace_value
from halfstep.check.config.kind import recipe_of
from halfstep.check.finding import Edit, Finding, Fix
from halfstep.check.regex import regex
from halfstep.check.rule import ConfigRule, Rule
from halfstep.precision.node import UNKNOWN, Block, Entry, Scalar, Span, walk

__all__ = ["RULES"]

_DOCS = "https://www.deepspeed.ai/docs/config-json/"
_INITIALIZES = regex(r"\bdeepspeed\.initialize\(")
# The classes of Transformers that replace "auto", and code that does it by itself.
_TRAINERS = regex(r"\b(?:Seq2Seq|SFT|DPO|PPO|GRPO|Reward)?Trainer\b")
_RESOLVES = regex(
    r"""TrainingArguments|DeepSpeedConfig|[=!]= *["']auto["'](?! *:\s*continue\b)|deepspeed_config_process|fill_match"""
)  # `if value == "auto": continue` only leaves it as it is

# Keys that decide how a run computes; of the others (paths, intervals, bucket sizes) a duplicate is only untidy.
_NUMERIC = regex(
    r"fp16|bf16|bfloat16|fp8|amp$|dtype|precision|scale|hysteresis|clip|max_grad_norm|optim|stage$|zero_optimization|"
    r"accumulat|batch_size|learning_rate|^lr$|eps|betas|weight_decay|enabled",
    re.IGNORECASE,
)
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OMEGACONF = {"llamafactory", "torchtune", "verl"}  # the tools that read their files with OmegaConf


class DuplicateKey(ConfigRule):
    """A key is set twice in the same block."""

    code = "HS254"
    name = "duplicate-key"
    severity = "error"
    reason = (
        "DeepSpeed raises an error for a duplicate key in its JSON file, and so does OmegaConf, with which LLaMA-Factory, "
        "torchtune and verl read theirs. Every other reader (json, which Hugging Face uses "
        'for files with "auto", PyYAML, Python itself) silently keeps the last value, so one of the two settings has no effect.'
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}, "fp16": {"enabled": false}}',
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 8\n"
        "mixed_precision: bf16\n",
        "stage: sft\nfinetuning_type: lora\ntemplate: qwen2_vl\nbf16: true\nlearning_rate: 1.0e-4\nbf16: true\n",
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}',
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 8\n"
        "mixed_precision: fp16\n",
        "stage: sft\nfinetuning_type: lora\ntemplate: qwen2_vl\nbf16: true\nlearning_rate: 1.0e-4\n",
    )
    references = (
        "https://www.rfc-editor.org/rfc/rfc8259#section-4",
        "https://github.com/omry/omegaconf/blob/master/omegaconf/_utils.py",
        "measured: DeepSpeed 0.19.8 raises ValueError, 'Duplicate keys in DeepSpeed config'",
    )

    def check(self, config: Config) -> Iterator[Finding]:
        """Check every block of every kind of configuration."""
        if config.root.call or config.kind == "joint":
            return  # a duplicate keyword argument is a SyntaxError in Python
        nodes = list(walk(config.root))
        filled = any(isinstance(node, Scalar) and node.value == "auto" for node in nodes)  # by Hugging Face
        native = config.kind == "deepspeed" and config.source.language == "json" and not filled
        recipe = recipe_of(config.root) if config.source.language in {"json", "yaml"} else None
        strict = native or recipe in _OMEGACONF
        for node in nodes:
            first_entries: dict[str, Entry] = {}
            for entry in node.entries if isinstance(node, Block) else ():
                first = first_entries.setdefault(entry.key, entry)
                if first is entry:
                    continue
                line = config.where(first.key_span).line
                if not strict and _equal(first, entry):
                    continue
                effect = "only the second has an effect"
                if strict:
                    effect = (
                        "DeepSpeed raises an error" if native else "OmegaConf raises an error when it reads the file"
                    )
                yield self.finding(
                    config.where(entry.key_span),
                    f"`{entry.key}` is already set at line {line}; {effect}.",
                    instead="Keep one of the two.",
                    severity=None if strict else "warning" if _NUMERIC.search(entry.key) else "advice",
                )


def _equal(first: Entry, second: Entry) -> bool:
    """Whether two entries have the same plain value, so that it does not matter which of them is read."""
    one, two = first.value, second.value
    return isinstance(one, Scalar) and isinstance(two, Scalar) and UNKNOWN != one.value == two.value


class QuotedNumber(DeepSpeedRule):
    """A number at the top level or in `optimizer.params` is a string."""

    code = "HS255"
    name = "quoted-number"
    severity = "error"
    reason = (
        'The validated blocks convert "16" to 16, but DeepSpeed uses the top level and `optimizer.params` '
        "unconverted: dividing the batch sizes, comparing the clipping norm and multiplying by the learning rate each "
        'raise a TypeError for a string. In `zero_optimization`, "5e8" fails as well, because it does not parse as an '
        "integer."
    )
    bad = (
        '{"train_batch_size": "8", "zero_optimization": {"stage": 2}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "gradient_clipping": "1.0"}',
        '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": "1e-5"}}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}',
        '{"train_batch_size": "auto", "zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}',
    )
    references = (_DOCS, 'measured: DeepSpeed 0.19.8, DeepSpeedConfig raises TypeError for a train_batch_size of "8"')

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report strings that parse as numbers."""
        params = [("optimizer", "params", key) for key in ("lr", "eps", "weight_decay", "momentum")]
        zero = config.block("zero_optimization")
        sizes = [("zero_optimization", entry.key) for entry in (zero.entries if zero else ())]
        for path in [*((key,) for key in TOP_NUMBERS), *params, *sizes]:
            value = config.value(*path)
            number = _number(value) if isinstance(value, str) else None
            entry = config.entry(*path)
            if number is None or entry is None or not isinstance(entry.value, Scalar):
                continue
            if path in sizes and isinstance(number, int):
                continue  # "2" is converted there, "5e8" is not
            if config.source.language == "yaml" and not entry.value.text.startswith(("'", '"')):
                continue  # a string for PyYAML, a number for OmegaConf and ruamel
            name = ".".join(path)
            fix = replace_value(config, entry.value, number, f"Replace with the number {number!r}")
            message = f"`{name}` is the string {value!r}; DeepSpeed expects a number and raises an error."
            yield self.at(config, path, message, instead=f"Write {number!r} without quotes.", fix=fix)


class BlockExpected(DeepSpeedRule):
    """A plain value is set where DeepSpeed expects a block."""

    code = "HS258"
    name = "block-expected"
    severity = "error"
    reason = (
        '`fp16`, `bf16`, `torch_autocast` and `zero_optimization` are blocks: `"fp16": true` raises a TypeError, and '
        "so does null. Only `zero_optimization` also accepts a boolean, its original form."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": true}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": null}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}',
        '{"train_batch_size": 8, "zero_optimization": true, "bf16": {"enabled": true}}',
    )
    references = (_DOCS, "measured: DeepSpeed 0.19.8, DeepSpeedConfig raises TypeError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report plain values where DeepSpeed unpacks a mapping."""
        for name in ("fp16", "bf16", "zero_optimization"):
            entry = config.entry(name)
            if entry is None or not isinstance(entry.value, Scalar) or not config.strict:
                continue
            value = entry.value.value
            is_flag = isinstance(value, bool) and name != "zero_optimization"
            if is_flag or value is None:
                fix = (
                    replace_value(config, entry.value, {"enabled": value}, "Replace with a block") if is_flag else None
                )
                message = f"`{name}` is {entry.value.text}; DeepSpeed expects a block and raises a TypeError."
                yield self.at(config, (name,), message, instead=f'Write `"{name}": {{"enabled": ...}}`.', fix=fix)


class AutoWithoutTransformers(DeepSpeedRule):
    """A value is "auto", but nothing resolves it."""

    code = "HS259"
    name = "auto-without-transformers"
    severity = "error"
    reason = (
        'Hugging Face\'s Trainer and Accelerate replace "auto" before DeepSpeed reads the configuration. Passed '
        'directly to `deepspeed.initialize`, or to Lightning\'s `DeepSpeedStrategy`, "auto" in `fp16`, `bf16` and `zero_optimization` silently becomes the '
        "default (`fp16.enabled` becomes false, so the run is fp32); elsewhere it raises a TypeError at the first "
        "comparison."
    )
    bad = (
        "import deepspeed\n\nds_config = {\n    'train_batch_size': 8,\n    'fp16': {'enabled': 'auto'},\n"
        "    'zero_optimization': {'stage': 2},\n}\nengine, *_ = deepspeed.initialize(model=model, config=ds_config)\n",
        "import deepspeed\nfrom transformers import AutoModel\n\ndef config():\n    return {'train_batch_size': 8,\n"
        "            'bf16': {'enabled': True}, 'zero_optimization': {'stage': 2},\n"
        "            'optimizer': {'type': 'AdamW', 'params': {'lr': 'auto'}}}\n\n"
        "engine, *_ = deepspeed.initialize(model=AutoModel.from_pretrained(name), config=config())\n",
        "import deepspeed\n\nds_config = {\n    'train_batch_size': 8,\n    'bf16': {'enabled': True},\n"
        "    'zero_optimization': {'stage': 3, 'sub_group_size': 'auto', 'reduce_bucket_size': 'auto'},\n}\n"
        "engine, *_ = deepspeed.initialize(model=model, config=ds_config)\n",
        "from lightning.pytorch.strategies import DeepSpeedStrategy\n\n"
        "strategy = DeepSpeedStrategy(config={'bf16': {'enabled': 'auto'}, 'zero_optimization': {'stage': 2}})\n",
    )
    good = (
        "import deepspeed\n\nds_config = {\n    'train_batch_size': 8,\n    'bf16': {'enabled': True},\n"
        "    'zero_optimization': {'stage': 2},\n}\nengine, *_ = deepspeed.initialize(model=model, config=ds_config)\n",
        "import deepspeed\n\nds_config = {'train_batch_size': 'auto', 'zero_optimization': {'stage': 2}}\n"
        "if ds_config['train_batch_size'] == 'auto':\n    fill(ds_config)\n"
        "engine, *_ = deepspeed.initialize(model=model, config=ds_config)\n",
        '{"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}',
    )
    references = (
        "https://huggingface.co/docs/transformers/deepspeed",
        "measured: DeepSpeed 0.19.8, fp16.enabled auto is False, gradient_clipping auto raises TypeError",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report a literal "auto" in a dictionary of a script that calls deepspeed.initialize and does not resolve it."""
        text = config.source.text
        passed = config.origin == "deepspeed.initialize" or (
            config.origin == "a dictionary" and _INITIALIZES.search(text) and config.script & {"deepspeed"}
        )
        lightning = "lightning" in config.origin and config.origin.endswith("DeepSpeedStrategy")
        if not lightning and not passed:
            return
        hugging_face = bool(config.script & {"accelerate", "lightning", "pytorch_lightning"})
        hugging_face |= bool(config.script & {"transformers", "trl"} and _TRAINERS.search(text))
        if (hugging_face and not lightning) or _RESOLVES.search(text):
            return
        params = [("optimizer", "params", key) for key in ("lr", "betas", "eps", "weight_decay")]
        for path in (("fp16", "enabled"), ("bf16", "enabled"), *((key,) for key in TOP_NUMBERS), *params):
            entry = config.entry(*path)
            if entry and isinstance(entry.value, Scalar) and entry.value.value == "auto":
                message = f'`{".".join(path)}` is "auto", which only Hugging Face resolves; DeepSpeed does not.'
                yield self.at(config, path, message, instead="Set an explicit value.")
        zero = config.block("zero_optimization")
        names = [
            e.key for e in (zero.entries if zero else ()) if isinstance(e.value, Scalar) and e.value.value == "auto"
        ]
        if names:
            keys = ", ".join(f"`{name}`" for name in names)
            message = (
                f'"auto" in `zero_optimization` ({keys}) is resolved by Hugging Face only; DeepSpeed uses its defaults.'
            )
            path = ("zero_optimization", names[0])
            yield self.at(config, path, message, instead="Set explicit values, or remove the keys.", severity="warning")


class LooseJsonWithAuto(DeepSpeedRule):
    """A file for Hugging Face has comments or trailing commas, which its JSON reader rejects."""

    code = "HS260"
    name = "loose-json-with-auto"
    severity = "error"
    reason = (
        "DeepSpeed reads its file with an hjson parser, which allows comments and trailing commas. A file that "
        'contains "auto" is first read by Transformers or Accelerate with Python\'s json module, which raises a '
        "JSONDecodeError."
    )
    bad = (
        '{\n  "train_batch_size": "auto",\n  "zero_optimization": {"stage": 2}, // partition gradients\n'
        '  "bf16": {"enabled": "auto"}\n}',
        '{\n  "train_batch_size": "auto",\n  "zero_optimization": {"stage": 2,},\n  "bf16": {"enabled": "auto"},\n}',
    )
    good = (
        '{\n  "train_batch_size": "auto",\n  "zero_optimization": {"stage": 2},\n  "bf16": {"enabled": "auto"}\n}',
        '{\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 2}, // partition gradients\n}',
        '{\n  "train_batch_size": "auto",\n  "zero_optimization": {"stage": ${STAGE}}\n}',
    )
    references = (
        "https://huggingface.co/docs/transformers/deepspeed",
        "measured: source code of accelerate 1.15, utils/deepspeed.py",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report text that only a tolerant parser accepts."""
        text = config.source.text
        if config.source.language != "json" or not deepspeed.has_auto:
            return
        if any(isinstance(node, Scalar) and node.value is UNKNOWN for node in walk(config.root)):
            return  # a template, rendered before it is read
        try:
            json.loads(text.removeprefix("\ufeff"))
        except json.JSONDecodeError as error:
            at = min(error.pos + text.startswith("\ufeff"), len(text) - 1)
            yield self.finding(
                config.where(Span(at, at + 1)),
                'Hugging Face reads a configuration with "auto" as strict JSON and raises a JSONDecodeError here.',
                instead="Remove comments and trailing commas.",
                fix=self._without_commas(config),
            )
        except (ValueError, RecursionError):
            return  # oversized numbers and nesting, which other rules and readers reject

    @staticmethod
    def _without_commas(config: Config) -> Fix | None:
        """The fix, if trailing commas are the only problem; comments are left to their author."""
        text = config.source.text
        edits = []
        for node in walk(config.root):
            inner = [e.value for e in node.entries] if isinstance(node, Block) else getattr(node, "items", ())
            comma = re.compile(r"\s*,(?=\s*[}\]])").match(text, inner[-1].span.end) if inner else None
            edits += [Edit(comma.end() - 1, comma.end(), "")] if comma else []
        after = text
        for edit in sorted(edits, reverse=True):
            after = after[: edit.start] + after[edit.end :]
        try:
            json.loads(after)
        except ValueError:
            return None
        return Fix("Remove the trailing commas", tuple(sorted(edits)))


class BatchSizesDisagree(DeepSpeedRule):
    """The batch sizes are not positive, or inconsistent for any number of GPUs."""

    code = "HS238"
    name = "batch-sizes-disagree"
    severity = "error"
    reason = (
        "DeepSpeed asserts that `train_batch_size` equals `train_micro_batch_size_per_gpu` times "
        "`gradient_accumulation_steps` times the number of ranks. If it is not a multiple of the first two, no number "
        "of ranks satisfies that. It also asserts that each of them is greater than 0: a 0 is not a default. An integration "
        'that fills in "auto" does not replace a 0 either.'
    )
    bad = (
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}',
        '{"train_batch_size": 0, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}',
        '{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": -1, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}',
    )
    good = (
        '{"train_batch_size": 48, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}',
        '{"train_batch_size": "auto", "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}',
        '{"train_batch_size": 8, "gradient_accumulation_steps": null, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}',
    )
    references = (
        _DOCS + "#batch-size-related-parameters",
        "measured: DeepSpeed 0.19.8, DeepSpeedConfig raises AssertionError, and ZeroDivisionError where it divides by a 0",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Compare each size with 0, then the total with the product."""
        sizes = [(key, config.number(key)) for key in _SIZES]
        low = [(key, size) for key, size in sizes if size is not None and size <= 0]
        for key, size in low:
            message = f"`{key}` is {size:g}; DeepSpeed asserts that it is greater than 0."
            yield self.at(config, (key,), message, instead="Write the size, or remove the key.")
        (_, total), (_, micro), (_, steps) = sizes
        is_set = config.value("gradient_accumulation_steps") is not None
        if low or total is None or micro is None or (steps is None and is_set):
            return
        product = micro * (steps or 1)
        if total % product != 0:
            yield self.at(
                config,
                ("train_batch_size",),
                f"`train_batch_size` {total:g} is not a multiple of {product:g} ({micro:g} per GPU x {steps or 1:g} "
                "accumulation steps).",
                instead="Remove one of the three; DeepSpeed computes it.",
            )


def _number(text: str) -> float | int | None:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


RULES: tuple[type[Rule], ...] = (
    DuplicateKey,
    QuotedNumber,
    BlockExpected,
    AutoWithoutTransformers,
    LooseJsonWithAuto,
    BatchSizesDisagree,
)
