"""ZeRO, offloading, gradient division, clipping and batch sizes of a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule
from halfstep.check.files.source import Settings
from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.precision.node import Block, Items, Scalar

__all__ = ["RULES"]

_DOCS = "https://www.deepspeed.ai/docs/config-json/"
_ZERO = _DOCS + "#zero-optimizations-for-fp16-training"


class PrescaledGradients(DeepSpeedRule):
    """Gradients are divided before their reduction under ZeRO-2 or 3, which cannot do that."""

    code = "HS231"
    name = "prescaled-gradients"
    severity = "error"
    reason = (
        "With reduce_scatter (the default) ZeRO-2 and ZeRO-3 divide after the reduction only: an assertion stops the run for "
        "prescale_gradients and for a gradient_predivide_factor other than 1."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}, "prescale_gradients": true}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "gradient_predivide_factor": 8.0}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "prescale_gradients": false}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_scatter": false}, "prescale_gradients": true}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "prescale_gradients": true}',
    )
    references = (_DOCS + "#communication-options", "measured: DeepSpeed 0.19.8 raises AssertionError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Either key at stage 2 or 3 with reduce_scatter."""
        scatter = config.value("zero_optimization", "reduce_scatter")
        if deepspeed.stage not in {2, 3} or scatter not in {None, True}:
            return
        if config.value("prescale_gradients") is True:
            message = f"prescale_gradients is refused by ZeRO stage {deepspeed.stage} with reduce_scatter."
            yield self.at(config, ("prescale_gradients",), message, instead="Remove it.")
        factor = config.number("gradient_predivide_factor")
        if factor is not None and factor != 1:
            message = (
                f"gradient_predivide_factor {factor:g} is refused by ZeRO stage {deepspeed.stage} with reduce_scatter."
            )
            yield self.at(config, ("gradient_predivide_factor",), message, instead="Remove it.")


class PredivideIgnored(DeepSpeedRule):
    """gradient_predivide_factor is set beside prescale_gradients, which makes DeepSpeed ignore it."""

    code = "HS232"
    name = "predivide-ignored"
    severity = "warning"
    reason = (
        "With prescale_gradients the gradients are divided by the number of ranks before the reduction and the predivide factor "
        "is not read."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "prescale_gradients": true, "gradient_predivide_factor": 4}',
    )
    good = ('{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "gradient_predivide_factor": 4}',)
    references = (_DOCS + "#communication-options",)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Both keys at stage 0 or 1."""
        factor = config.number("gradient_predivide_factor")
        if config.value("prescale_gradients") is True and factor not in {None, 1} and deepspeed.stage in {0, 1}:
            message = f"gradient_predivide_factor {factor:g} is not read: prescale_gradients is on."
            yield self.at(config, ("gradient_predivide_factor",), message, instead="Keep one of the two keys.")


class SummedGradients(DeepSpeedRule):
    """Gradients are summed over ranks instead of averaged."""

    code = "HS233"
    name = "summed-gradients"
    severity = "error"
    reason = (
        "gradient_allreduce_op sum makes the update grow with the number of ranks: the same configuration on 8 GPUs takes steps "
        "8 times as large as on 1, and clipping hides it. ZeRO-3, ZenFlow and DeepCompile refuse it."
    )
    bad = ('{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"}',)
    good = ('{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "gradient_allreduce_op": "mean"}',)
    references = (_DOCS + "#communication-options", "measured: DeepSpeed 0.19.8 raises ValueError at stage 3")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """The sum at stage 3, and below it."""
        value = config.value("gradient_allreduce_op")
        if not isinstance(value, str) or value.casefold() != "sum" or deepspeed.stage is None:
            return
        refused = deepspeed.stage == 3
        message = (
            "gradient_allreduce_op sum is refused by ZeRO stage 3."
            if refused
            else "Gradients are summed over ranks, so the step grows with their number."
        )
        yield self.at(
            config, ("gradient_allreduce_op",), message, instead="Remove it.", severity=None if refused else "advice"
        )


class PartialOffload(DeepSpeedRule):
    """A part of the optimizer is to be offloaded below ZeRO-3."""

    code = "HS234"
    name = "partial-offload"
    severity = "error"
    reason = "offload_optimizer.ratio below 1 exists for ZeRO-3 alone; at other stages the configuration is refused."
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}}',
    )
    references = (_DOCS + "#optimizer-offloading", "measured: DeepSpeedConfig of 0.19.8 raises ValidationError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """ratio below 1 outside stage 3."""
        path = ("zero_optimization", "offload_optimizer", "ratio")
        ratio = config.number(*path)
        if ratio is not None and ratio < 1 and deepspeed.stage in {0, 1, 2}:
            message = f"offload_optimizer.ratio {ratio:g} needs ZeRO stage 3, and the stage is {deepspeed.stage}."
            yield self.at(config, path, message, instead="Remove ratio, or use stage 3.")


class ParameterOffloadIgnored(DeepSpeedRule):
    """Parameters are to be offloaded below ZeRO-3, where the block is not read."""

    code = "HS235"
    name = "parameter-offload-ignored"
    severity = "warning"
    reason = (
        "Only ZeRO-3 partitions parameters, so only it can move them to the CPU or to NVMe. Below it offload_param is accepted "
        "and read by nobody, and the memory it was to save is not saved."
    )
    bad = ('{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}',)
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_param": {"device": "none"}}}',
    )
    references = (_DOCS + "#parameter-offloading",)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """offload_param with a device at stage 0 to 2."""
        device = config.value("zero_optimization", "offload_param", "device")
        if device in {"cpu", "nvme"} and deepspeed.stage in {0, 1, 2}:
            yield self.at(
                config,
                ("zero_optimization", "offload_param"),
                f"offload_param has no effect at ZeRO stage {deepspeed.stage}; only stage 3 partitions parameters.",
                instead="Use stage 3, or remove the block.",
            )


class QuantizedWeightsConflict(DeepSpeedRule):
    """ZeRO++ weight quantization is combined with a precision mode it does not work with."""

    code = "HS236"
    name = "quantized-weights-conflict"
    severity = "error"
    reason = (
        "zero_quantized_nontrainable_weights is written for fp16 tensors and fails on bf16 ones; zero_quantized_weights and "
        "torch_autocast are refused together."
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
        """Each flag with the mode it fails in."""
        for key, conflict in (
            ("zero_quantized_nontrainable_weights", "bf16" if deepspeed.bf16 else ""),
            ("zero_quantized_weights", "torch_autocast" if deepspeed.autocast else ""),
        ):
            if conflict and config.is_on("zero_optimization", key):
                message = f"{key} does not work with {conflict}."
                yield self.at(config, ("zero_optimization", key), message, instead=f"Remove it, or {conflict}.")


class StageOutOfRange(DeepSpeedRule):
    """The ZeRO stage is not one of 0, 1, 2, 3, or not given as a block."""

    code = "HS237"
    name = "stage-out-of-range"
    severity = "error"
    reason = (
        "zero_optimization is a block with a stage from 0 to 3 (or, in its first form, true for stage 1). Anything else stops "
        "the run with a validation or type error."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 4}, "bf16": {"enabled": true}}',
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "zero_optimization": 2}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3}}',
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "zero_optimization": true}',
    )
    references = (_ZERO, "measured: DeepSpeedConfig of 0.19.8 raises ValidationError or TypeError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Stages and forms that do not exist."""
        found = config.entry("zero_optimization")
        is_number = found is not None and isinstance(config.value("zero_optimization"), int | float)
        if found is not None and not isinstance(found.value, Block) and not _is_switch(found.value) and is_number:
            value = config.value("zero_optimization")
            message = f"zero_optimization is {value!r}, and DeepSpeed takes a block."
            yield self.at(config, ("zero_optimization",), message, instead=f'Write {{"stage": {value}}}.')
        elif deepspeed.stage is not None and deepspeed.stage not in {0, 1, 2, 3}:
            message = f"ZeRO has stages 0 to 3, and no stage {deepspeed.stage}."
            yield self.at(config, ("zero_optimization", "stage"), message, instead="Write a stage from 0 to 3.")


class BatchSizesDisagree(DeepSpeedRule):
    """The three batch sizes cannot be right for any number of GPUs."""

    code = "HS238"
    name = "batch-sizes-disagree"
    severity = "error"
    reason = (
        "DeepSpeed asserts that train_batch_size equals train_micro_batch_size_per_gpu times gradient_accumulation_steps times "
        "the number of ranks. Where the first is no multiple of the product of the others, no number of ranks can satisfy it."
    )
    bad = ('{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}',)
    good = ('{"train_batch_size": 48, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}',)
    references = (_DOCS + "#batch-size-related-parameters", "measured: DeepSpeedConfig of 0.19.8 raises AssertionError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """The total against the product."""
        total, micro = (config.number(k) for k in ("train_batch_size", "train_micro_batch_size_per_gpu"))
        steps = config.number("gradient_accumulation_steps")
        given = config.value("gradient_accumulation_steps")
        if total is None or micro is None or (steps is None and given is not None):
            return
        product = micro * (steps or 1)
        if product > 0 and total % product != 0:
            yield self.at(
                config,
                ("train_batch_size",),
                f"train_batch_size {total:g} is no multiple of {micro:g} per GPU times {steps or 1:g} micro-batches = {product:g}.",
                instead="Leave one of the three out; DeepSpeed computes it.",
            )


class ClippingByDefault(DeepSpeedRule):
    """gradient_clipping is left out, and its default changed."""

    code = "HS239"
    name = "clipping-by-default"
    severity = "advice"
    reason = (
        "Up to 0.19.2 an omitted gradient_clipping meant none; from 0.19.3 on it means 1.0. The same file trains differently "
        "after an upgrade, and no line of the log says so."
    )
    bad = ('{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}',)
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "gradient_clipping": 0.0}',
    )
    references = (_DOCS + "#gradient-clipping", "https://github.com/deepspeedai/DeepSpeed/pull/8068")
    settings = Settings(deepspeed=(0, 19, 8))

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """A complete native configuration without the key."""
        native = config.strict and not deepspeed.has_auto and not config.may_hold("gradient_clipping")
        # Without a version this would be said of nearly every file; only a known one makes it this run's matter.
        if native and config.entry("gradient_clipping") is None and deepspeed.since(0, 19, 3):
            message = "gradient_clipping is not set: DeepSpeed clips at 1.0 since 0.19.3, and did not clip before."
            yield self.at(config, (), message, instead='Write "gradient_clipping": 1.0, or 0.0 for none.')


class UnmanagedAccumulation(DeepSpeedRule):
    """Accumulation is taken out of DeepSpeed's hands where it cannot be."""

    code = "HS230"
    name = "unmanaged-accumulation"
    severity = "error"
    reason = (
        "managed_gradient_accumulation set to false leaves the count of micro-batches to the script. DeepCompile, pipelines and "
        "Apex AMP count them themselves, and DeepSpeed refuses the combination."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "managed_gradient_accumulation": false,\n'
        ' "compile": {"deepcompile": true}}',
    )
    good = ('{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "managed_gradient_accumulation": false}',)
    references = (_DOCS + "#batch-size-related-parameters", "measured: read in DeepSpeed 0.19.6, engine.py")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """The key false beside DeepCompile or amp."""
        other = "DeepCompile" if config.is_on("compile", "deepcompile") else ("amp" if deepspeed.amp else "")
        if other and config.value("managed_gradient_accumulation") is False:
            message = f"managed_gradient_accumulation false is refused with {other}."
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
    BatchSizesDisagree,
    ClippingByDefault,
    UnmanagedAccumulation,
)
