"""The values of a DeepSpeed configuration: quoted numbers, values nobody fills in, duplicates, loose JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule
from halfstep.check.config.deepspeed_schema import TOP_NUMBERS
from halfstep.check.config.edits import replace_value
from halfstep.check.config.node import UNKNOWN, Block, Entry, Scalar, Span, walk
from halfstep.check.finding import Edit, Finding, Fix
from halfstep.check.rule import ConfigRule, Rule

__all__ = ["RULES"]

_DOCS = "https://www.deepspeed.ai/docs/config-json/"


class DuplicateKey(ConfigRule):
    """A key is given twice in the same block."""

    code = "HS254"
    name = "duplicate-key"
    severity = "error"
    reason = (
        "DeepSpeed stops at a key that is given twice in its JSON file. Every other reader (json, PyYAML, Python itself) keeps "
        "the last and forgets the first without a word, so one of the two settings you see has no effect."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}, "fp16": {"enabled": false}}',
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 8\n"
        "mixed_precision: bf16\n",
    )
    good = ('{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}',)
    references = (
        "https://www.rfc-editor.org/rfc/rfc8259#section-4",
        "measured: DeepSpeed 0.19.8 raises ValueError, 'Duplicate keys in DeepSpeed config'",
    )

    def check(self, config: Config) -> Iterator[Finding]:
        """Every block of every kind of configuration."""
        if config.root.call or config.kind == "joint":
            return  # Python refuses a keyword given twice
        for node in walk(config.root):
            seen: dict[str, Entry] = {}
            for entry in node.entries if isinstance(node, Block) else ():
                first = seen.setdefault(entry.key, entry)
                if first is entry:
                    continue
                line = config.where(first.key_span).line
                native = config.kind == "deepspeed" and config.source.language == "json"
                ending = "DeepSpeed refuses that." if native else "only the second counts."
                yield self.finding(
                    config.where(entry.key_span),
                    f"The key {entry.key!r} is given twice, first in line {line}: {ending}",
                    instead="Keep one of the two.",
                    severity=None if native else "warning",
                )


class QuotedNumber(DeepSpeedRule):
    """A number of the top level or of the optimizer is written in quotes."""

    code = "HS255"
    name = "quoted-number"
    severity = "error"
    reason = (
        'Blocks that DeepSpeed validates turn "16" into 16, but the top level and the optimizer\'s parameters are passed on as '
        "they stand: the batch sizes are divided, clipping is compared, the learning rate multiplied, and each raises a "
        'TypeError on a string. In zero_optimization "5e8" is refused as well, since it is no integer\'s text.'
    )
    bad = (
        '{"train_batch_size": "8", "zero_optimization": {"stage": 2}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "gradient_clipping": "1.0"}',
        '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": "1e-5"}}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}',
        '{"train_batch_size": "auto", "zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}',
    )
    references = (_DOCS, 'measured: DeepSpeedConfig of 0.19.8 raises TypeError for a train_batch_size of "8"')

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Strings that are numbers."""
        params = [("optimizer", "params", key) for key in ("lr", "eps", "weight_decay", "momentum")]
        zero = config.block("zero_optimization")
        sizes = [("zero_optimization", entry.key) for entry in (zero.entries if zero else ())]
        for path in [*((key,) for key in TOP_NUMBERS), *params, *sizes]:
            value = config.value(*path)
            number = _number(value) if isinstance(value, str) else None
            found = config.entry(*path)
            if number is None or found is None or not isinstance(found.value, Scalar):
                continue
            if path in sizes and isinstance(number, int):
                continue  # "2" becomes 2 there, "5e8" does not
            if config.source.language == "yaml" and not found.value.text.startswith(("'", '"')):
                continue  # a string to PyYAML, a number to OmegaConf and ruamel
            shown = ".".join(path)
            fix = replace_value(config, found.value, number, f"Write {number!r} without quotes")
            message = f"{shown} is the text {value!r}, not a number, and DeepSpeed computes with it."
            yield self.at(config, path, message, instead=f"Write {number!r} without quotes.", fix=fix)


class BlockExpected(DeepSpeedRule):
    """A block is given as a plain value."""

    code = "HS258"
    name = "block-expected"
    severity = "error"
    reason = (
        'fp16, bf16, torch_autocast and zero_optimization are blocks: "fp16": true ends in a TypeError, and so does null. Only '
        "zero_optimization takes a boolean, in its first form."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": true}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": null}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}',
        '{"train_batch_size": 8, "zero_optimization": true, "bf16": {"enabled": true}}',
    )
    references = (_DOCS, "measured: DeepSpeedConfig of 0.19.8 raises TypeError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Plain values where a mapping is unpacked."""
        for name in ("fp16", "bf16", "zero_optimization"):
            found = config.entry(name)
            if found is None or not isinstance(found.value, Scalar) or not config.strict:
                continue
            value = found.value.value
            is_flag = isinstance(value, bool) and name != "zero_optimization"
            if is_flag or value is None:
                fix = replace_value(config, found.value, {"enabled": value}, "Write it as a block") if is_flag else None
                message = f"{name} is {found.value.text}, and DeepSpeed takes a block."
                yield self.at(config, (name,), message, instead=f'Write "{name}": {{"enabled": ...}}.', fix=fix)


class AutoWithoutTransformers(DeepSpeedRule):
    """A value is "auto" although nothing fills it in."""

    code = "HS259"
    name = "auto-without-transformers"
    severity = "error"
    reason = (
        '"auto" is a word of Hugging Face\'s Trainer and of Accelerate, which replace it before DeepSpeed sees it. Handed to '
        'deepspeed.initialize directly, "auto" in fp16, bf16 and zero_optimization silently becomes the default (fp16.enabled '
        '"auto" is false: fp32), and elsewhere it raises a TypeError at the first comparison.'
    )
    bad = (
        "import deepspeed\n\nds_config = {\n    'train_batch_size': 8,\n    'fp16': {'enabled': 'auto'},\n"
        "    'zero_optimization': {'stage': 2},\n}\nengine, *_ = deepspeed.initialize(model=model, config=ds_config)\n",
    )
    good = (
        "import deepspeed\n\nds_config = {\n    'train_batch_size': 8,\n    'bf16': {'enabled': True},\n"
        "    'zero_optimization': {'stage': 2},\n}\nengine, *_ = deepspeed.initialize(model=model, config=ds_config)\n",
        '{"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}',
    )
    references = (
        "https://huggingface.co/docs/transformers/deepspeed",
        "measured: DeepSpeed 0.19.8, fp16.enabled auto is False, gradient_clipping auto raises TypeError",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Literal "auto" in what goes straight to deepspeed.initialize."""
        if config.origin != "deepspeed.initialize" or config.script & {"transformers", "accelerate", "lightning"}:
            return
        for path in (("fp16", "enabled"), ("bf16", "enabled"), *((key,) for key in TOP_NUMBERS)):
            found = config.entry(*path)
            if found and isinstance(found.value, Scalar) and found.value.value == "auto":
                message = (
                    f'{".".join(path)} is "auto", which only Hugging Face fills in; here it goes straight to DeepSpeed.'
                )
                yield self.at(config, path, message, instead="Write the value.")


class LooseJsonWithAuto(DeepSpeedRule):
    """A file for Hugging Face has comments or stray commas, which its reader does not take."""

    code = "HS260"
    name = "loose-json-with-auto"
    severity = "error"
    reason = (
        'DeepSpeed reads its file with an hjson parser that takes comments and trailing commas. A file with "auto" in it is read '
        "by Transformers or Accelerate first, with Python's json, which stops at the first of them with a JSONDecodeError."
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
        "measured: read in accelerate 1.15, utils/deepspeed.py",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Text that only a tolerant reader takes."""
        text = config.source.text
        if config.source.language != "json" or not deepspeed.has_auto:
            return
        if any(isinstance(node, Scalar) and node.value is UNKNOWN for node in walk(config.root)):
            return  # a template, which something fills in first
        try:
            json.loads(text.removeprefix("\ufeff"))
        except json.JSONDecodeError as error:
            at = min(error.pos + text.startswith("\ufeff"), len(text) - 1)
            yield self.finding(
                config.where(Span(at, at + 1)),
                'Hugging Face reads a file with "auto" in it as strict JSON, and stops here.',
                instead="Remove comments and trailing commas.",
                fix=self._without_commas(config),
            )
        except (ValueError, RecursionError):
            return  # numbers and depths that other rules and readers refuse

    @staticmethod
    def _without_commas(config: Config) -> Fix | None:
        """The fix, where commas before a closing bracket are all that is wrong; comments are their author's."""
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


RULES: tuple[type[Rule], ...] = (DuplicateKey, QuotedNumber, BlockExpected, AutoWithoutTransformers, LooseJsonWithAuto)
