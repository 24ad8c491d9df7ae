"""Rules for ZeRO, offloading, gradient averaging and clipping in a DeepSpeed configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule
from halfstep.check.files.source import Settings
from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.precision.node import Block, Items, Scalar

__all__ = ["RULES"]

_DOCS = "https://www.deepspeed.ai/docs/config-json/"
_ZERO = _DOCS + "#zero-optimizations-for-fp16-training"
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu")
_WHOLE = ("zero_optimization", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu")
_INFERENCE = regex(r"infer|eval|^test_|generat|predict", re.IGNORECASE)  # in the name of a file or a variable
_REFERENCE = regex(r"(^|_)ref(erence)?(_|$)|teacher", re.IGNORECASE)  # in the name of a variable
_ASSIGNED = regex(r"(\w+)(?:: [\w\[\], ]+)? = \Z")
_TRAINING = regex(r"\.(?:backward|train_batch|fit|train)\(|TrainingArguments|Config\(|\breturn\b")
_COMPLETE = 5  # top-level keys of a file that is a whole configuration
_SHORT = 3  # the same of a file with a batch size and ZeRO settings that is named for DeepSpeed
_NAMED = regex(r"(?:deepspeed|ds)_?config\.json$", re.IGNORECASE)


class PrescaledGradients(DeepSpeedRule):
    """Gradients are divided before the reduction at ZeRO stage 2 or 3, which do not support it."""

    code = "HS231"
    name = "prescaled-gradients"
    severity = "error"
    reason = (
        "With `reduce_scatter` (the default), ZeRO-2 and ZeRO-3 divide after the reduction only: `prescale_gradients` "
        "and a `gradient_predivide_factor` other than 1 raise an AssertionError."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}, "prescale_gradients": true}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "gradient_predivide_factor": 8.0}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}, "prescale_gradients": false}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "prescale_gradients": false}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_scatter": false}, "prescale_gradients": true}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "prescale_gradients": true}',
    )
    references = (_DOCS + "#communication-options", "measured: DeepSpeed 0.19.8 raises AssertionError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report either key at stage 2 or 3 with reduce_scatter."""
        scatter = config.value("zero_optimization", "reduce_scatter")
        if deepspeed.stage not in {2, 3} or scatter not in {None, True}:
            return
        unsupported = f"not supported by ZeRO stage {deepspeed.stage} with `reduce_scatter`"
        if config.value("prescale_gradients") is True:
            message = f"`prescale_gradients` is {unsupported}."
            yield self.at(config, ("prescale_gradients",), message, instead="Remove it.")
        factor = config.number("gradient_predivide_factor")
        if factor is not None and factor != 1:
            message = f"`gradient_predivide_factor` {factor:g} is {unsupported}."
            yield self.at(config, ("gradient_predivide_factor",), message, instead="Remove it.")


class PredivideIgnored(DeepSpeedRule):
    """`gradient_predivide_factor` has no effect with `prescale_gradients`."""

    code = "HS232"
    name = "predivide-ignored"
    severity = "warning"
    reason = (
        "With `prescale_gradients`, DeepSpeed divides the gradients by the number of ranks before the reduction and "
        "ignores `gradient_predivide_factor`."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "prescale_gradients": true, "gradient_predivide_factor": 4}',
    )
    good = ('{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "gradient_predivide_factor": 4}',)
    references = (_DOCS + "#communication-options",)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report both keys at stage 0 or 1."""
        factor = config.number("gradient_predivide_factor")
        if config.value("prescale_gradients") is True and factor not in {None, 1} and deepspeed.stage in {0, 1}:
            message = f"DeepSpeed ignores `gradient_predivide_factor` {factor:g} because `prescale_gradients` is true."
            yield self.at(config, ("gradient_predivide_factor",), message, instead="Keep one of the two keys.")


class SummedGradients(DeepSpeedRule):
    """Gradients are summed over ranks instead of averaged."""

    code = "HS233"
    name = "summed-gradients"
    severity = "error"
    reason = (
        "With `gradient_allreduce_op` set to sum, the gradient grows with the number of ranks: the same configuration "
        "computes 8 times larger gradients on 8 GPUs than on 1, which clipping or Adam can hide. ZeRO-3, ZenFlow and "
        "DeepCompile raise an error for it."
    )
    bad = ('{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"}',)
    good = ('{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "gradient_allreduce_op": "mean"}',)
    references = (_DOCS + "#communication-options", "measured: DeepSpeed 0.19.8 raises ValueError at stage 3")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report the sum: an error at stage 3, advice below."""
        value = config.value("gradient_allreduce_op")
        if not isinstance(value, str) or value.casefold() != "sum" or deepspeed.stage is None:
            return
        rejected = deepspeed.stage == 3
        message = (
            "ZeRO stage 3 does not support `gradient_allreduce_op` sum; DeepSpeed raises a ValueError."
            if rejected
            else "Gradients are summed over ranks, so they grow with the number of ranks."
        )
        yield self.at(
            config, ("gradient_allreduce_op",), message, instead="Remove it.", severity=None if rejected else "advice"
        )


class PartialOffload(DeepSpeedRule):
    """Partial optimizer offload is requested below ZeRO stage 3."""

    code = "HS234"
    name = "partial-offload"
    severity = "error"
    reason = (
        "`offload_optimizer.ratio` below 1 is supported by ZeRO-3 only; at other stages DeepSpeed raises a validation "
        "error."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}}',
    )
    references = (_DOCS + "#optimizer-offloading", "measured: DeepSpeed 0.19.8, DeepSpeedConfig raises ValidationError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report a ratio below 1 outside stage 3."""
        path = ("zero_optimization", "offload_optimizer", "ratio")
        ratio = config.number(*path)
        if ratio is not None and ratio < 1 and deepspeed.stage in {0, 1, 2}:
            message = f"`offload_optimizer.ratio` {ratio:g} requires ZeRO stage 3, but the stage is {deepspeed.stage}."
            yield self.at(config, path, message, instead="Remove `ratio`, or use stage 3.")


class ParameterOffloadIgnored(DeepSpeedRule):
    """Parameter offload is requested below ZeRO stage 3, where DeepSpeed ignores it."""

    code = "HS235"
    name = "parameter-offload-ignored"
    severity = "warning"
    reason = (
        "Only ZeRO-3 partitions parameters, so only ZeRO-3 can offload them to CPU or NVMe. Lower stages accept "
        "`offload_param` but ignore it, and no memory is saved."
    )
    bad = ('{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}',)
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_param": {"device": "none"}}}',
    )
    references = (_DOCS + "#parameter-offloading",)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report offload_param with a device at stages 0 to 2."""
        device = config.value("zero_optimization", "offload_param", "device")
        if device in {"cpu", "nvme"} and deepspeed.stage in {0, 1, 2}:
            yield self.at(
                config,
                ("zero_optimization", "offload_param"),
                f"`offload_param` has no effect at ZeRO stage {deepspeed.stage}; only stage 3 partitions parameters.",
                instead="Use stage 3, or remove the block.",
            )


class QuantizedWeightsConflict(DeepSpeedRule):
    """ZeRO++ weight quantization is combined with an unsupported precision mode."""

    code = "HS236"
    name = "quantized-weights-conflict"
    severity = "error"
    reason = (
        "`zero_quantized_nontrainable_weights` supports fp16 tensors only and fails on bf16 ones; "
        "`zero_quantized_weights` together with `torch_autocast` raises an error."
    )
    bad = (
        '{"train_batch_size": 8, "bf16": {"enabled": true},\n'
        ' "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": true}}',
        '{"train_batch_size": 8, "torch_autocast": {"enabled": true, "dtype": "bfloat16"},\n'
        ' "zero_optimization": {"stage": 3, "zero_quantized_weights": true}}',
    )
    good = (
        '{"train_batch_size": 8, "fp16": {"enabled": true},\n'
        ' "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": true}}',
    )
    references = ("https://www.deepspeed.ai/tutorials/zeropp/",)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report each flag with the mode it does not support."""
        for key, conflict in (
            ("zero_quantized_nontrainable_weights", "bf16" if deepspeed.bf16 else ""),
            ("zero_quantized_weights", "torch_autocast" if deepspeed.autocast else ""),
        ):
            if conflict and config.is_on("zero_optimization", key):
                message = f"`{key}` does not support {conflict}."
                yield self.at(config, ("zero_optimization", key), message, instead=f"Remove it, or disable {conflict}.")


class StageOutOfRange(DeepSpeedRule):
    """The ZeRO stage is not 0, 1, 2 or 3, or is not in a block."""

    code = "HS237"
    name = "stage-out-of-range"
    severity = "error"
    reason = (
        "`zero_optimization` is a block with a stage from 0 to 3, or (its original form) true for stage 1. Anything "
        "else raises a validation error or a TypeError."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 4}, "bf16": {"enabled": true}}',
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "zero_optimization": 2}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3}}',
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "zero_optimization": true}',
    )
    references = (_ZERO, "measured: DeepSpeed 0.19.8, DeepSpeedConfig raises ValidationError or TypeError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report invalid stages and a bare number."""
        entry = config.entry("zero_optimization")
        is_number = entry is not None and isinstance(config.value("zero_optimization"), int | float)
        if entry is not None and not isinstance(entry.value, Block) and not _is_switch(entry.value) and is_number:
            value = config.value("zero_optimization")
            message = f"`zero_optimization` is {value!r}; DeepSpeed expects a block and raises a TypeError."
            instead = f'Write `"zero_optimization": {{"stage": {value}}}`.'
            yield self.at(config, ("zero_optimization",), message, instead=instead)
        elif deepspeed.stage is not None and deepspeed.stage not in {0, 1, 2, 3}:
            message = f"Invalid ZeRO stage {deepspeed.stage}; valid stages are 0, 1, 2 and 3."
            yield self.at(config, ("zero_optimization", "stage"), message, instead="Use a stage from 0 to 3.")


class ClippingByDefault(DeepSpeedRule):
    """`gradient_clipping` is not set, and its default changed."""

    code = "HS239"
    name = "clipping-by-default"
    severity = "advice"
    reason = (
        "Up to 0.19.2 gradients were not clipped by default; since 0.19.3 the default `gradient_clipping` is 1.0. The "
        "same file trains differently after an upgrade, and nothing is logged. Hugging Face's Trainer passes its "
        '`max_grad_norm` on only to a file with `"gradient_clipping": "auto"`.'
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}',
        '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",\n'
        ' "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}',
        "import deepspeed\n\nds_config = {'train_batch_size': 8, 'zero_optimization': {'stage': 2}, 'fp16': {'enabled': True}}\n"
        "engine = deepspeed.initialize(model=model, config=ds_config)[0]\nengine.backward(loss)\n",
        '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",\n'
        ' "zero_optimization": {"stage": 2}}',
        "from transformers import Trainer, TrainingArguments\n\ndef options(steps):\n    return {'train_batch_size': 'auto', 'bf16': {'enabled': True},\n"
        "        'gradient_accumulation_steps': steps, 'zero_optimization': {'stage': 2}}\n\n"
        "args = TrainingArguments('out', bf16=True, gradient_accumulation_steps=steps, deepspeed=options(steps) if sharded else None)\n"
        "Trainer(model, args).train()\n",
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "gradient_clipping": 1.0}',
        '{"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}}',
        '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",\n'
        ' "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}',
        "import deepspeed\n\nds_config = {'train_batch_size': 8, 'zero_optimization': {'stage': 3}, 'bf16': {'enabled': True}}\n"
        "engine = deepspeed.initialize(model=model, config=ds_config)[0]\nengine.eval()\n",
        "import deepspeed\n\nref_config = {'train_batch_size': 8, 'zero_optimization': {'stage': 3}, 'bf16': {'enabled': True}}\n"
        "reference = deepspeed.initialize(model=model, config=ref_config)[0]\nloss.backward()\n",
    )
    references = (_DOCS + "#gradient-clipping", "https://github.com/deepspeedai/DeepSpeed/pull/8068")
    settings = Settings(deepspeed=(0, 19, 8))

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report a complete configuration without the key."""
        if not config.strict or config.entry("gradient_clipping") or config.may_hold("gradient_clipping"):
            return
        text = config.source.text
        if _INFERENCE.search(PurePath(config.source.path).name) or (config.origin and not _TRAINING.search(text)):
            return  # the default changes nothing without an optimizer step
        variable = _ASSIGNED.search(text, 0, config.root.span.start) if config.origin else None
        name = variable.group(1) if variable else ""
        if "optimizer" not in config.root and (_INFERENCE.search(name) or _REFERENCE.search(name)):
            return  # of a reference model, in the script that trains another
        if config.origin and "DeepSpeedStrategy" in text:
            return  # Lightning sets it from the Trainer's gradient_clip_val
        changed = deepspeed.since(0, 19, 3)
        trains = any(key in config.root for key in ("optimizer", "fp16", "torch_autocast", deepspeed.bf16_name))
        has_batch, num_keys = any(key in config.root for key in _BATCH_KEYS), len(config.root.entries)
        named = (
            not config.origin and _NAMED.search(config.source.path) is not None and "zero_optimization" in config.root
        )
        trains = trains or (named and has_batch and num_keys >= _SHORT)  # in float32
        # A short file is often a part that a program completes; it is reported only for a known release.
        is_whole = num_keys >= _COMPLETE or (config.origin not in {"", "a dictionary"} and trains)
        # A file with ZeRO and everything about the batch leaves nothing to the program but the values of "auto".
        is_whole |= not config.origin and all(key in config.root for key in _WHOLE)
        trains |= is_whole and deepspeed.has_auto
        if (changed and trains) or (changed is None and has_batch and is_whole):
            message = (
                "`gradient_clipping` is not set; the default is 1.0 since DeepSpeed 0.19.3 and was 0.0 (no clipping) "
                "before."
            )
            value = '"auto"' if deepspeed.has_auto else "1.0"
            instead = f'Set `"gradient_clipping": {value}`, or 0.0 to disable clipping.'
            yield self.at(config, (), message, instead=instead)


class UnmanagedAccumulation(DeepSpeedRule):
    """`managed_gradient_accumulation` is disabled where DeepSpeed requires it."""

    code = "HS230"
    name = "unmanaged-accumulation"
    severity = "error"
    reason = (
        "With `managed_gradient_accumulation` set to false, the script counts micro-batches. DeepCompile, pipeline "
        "parallelism and Apex AMP count them internally, and DeepSpeed raises an error for the combination."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "managed_gradient_accumulation": false,\n'
        ' "compile": {"deepcompile": true}}',
    )
    good = ('{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "managed_gradient_accumulation": false}',)
    references = (_DOCS + "#batch-size-related-parameters", "measured: source code of DeepSpeed 0.19.6, engine.py")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report the key set to false with DeepCompile or amp."""
        other = "DeepCompile" if config.is_on("compile", "deepcompile") else ("amp" if deepspeed.amp else "")
        if other and config.value("managed_gradient_accumulation") is False:
            message = f"`managed_gradient_accumulation` is false, which {other} does not support."
            yield self.at(config, ("managed_gradient_accumulation",), message, instead="Remove it.")


def _is_switch(node: Block | Items | Scalar) -> bool:
    return isinstance(node, Scalar) and isinstance(node.value, bool)


RULES: tuple[type[Rule], ...] = (
    PrescaledGradients,
    PredivideIgnored,
    SummedGradients,
    PartialOffload,
    ParameterOffloadIgnored,
    QuantizedWeightsConflict,
    StageOutOfRange,
    ClippingByDefault,
    UnmanagedAccumulation,
)
