"""DeepSpeed's precision modes: combinations that do not start, do not scale the loss, or no longer exist."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule
from halfstep.check.config.edits import remove
from halfstep.check.files.source import Settings
from halfstep.check.finding import Finding
from halfstep.check.rule import Rule

__all__ = ["RULES"]

_CONFIG_DOCS = "https://www.deepspeed.ai/docs/config-json/"
_REMOVALS = "https://github.com/deepspeedai/DeepSpeed/issues/8489"


class TwoModes(DeepSpeedRule):
    """The fp16 and the bf16 mode are both enabled."""

    code = "HS201"
    name = "two-precision-modes"
    severity = "error"
    reason = (
        "DeepSpeed casts the whole model to one 16-bit format and refuses to start with two: an assertion, 'bfloat16 and "
        "fp16 modes cannot be simultaneously enabled'. fp16 needs a loss scale and has 11 significant bits; bf16 has fp32's "
        "range and 8. They are different runs, so only you can say which one you mean."
    )
    bad = (
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}',
        '{\n  "zero_optimization": {"stage": 2},\n  "fp16": {"enabled": true},\n  "bfloat16": {"enabled": true}\n}',
        "import deepspeed\n\nds_config = {\n    'train_batch_size': 8,\n    'fp16': {'enabled': True},\n"
        "    'bf16': {'enabled': True},\n}\nengine = deepspeed.initialize(model=model, config=ds_config)\n",
    )
    good = (
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": false}, "bf16": {"enabled": true}, "gradient_clipping": 1.0}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}',
    )
    references = (_CONFIG_DOCS + "#fp16-training-options", "measured: DeepSpeedConfig of 0.19.8 raises AssertionError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Both blocks on."""
        if deepspeed.fp16 and deepspeed.bf16:
            name = deepspeed.bf16_name
            yield self.at(
                config,
                (name, "enabled"),
                f"fp16 and {name} are both enabled, and DeepSpeed does not start with two modes.",
                instead=f'Set "enabled": false in fp16 or in {name}.',
            )


class AutocastWithFp16Mode(DeepSpeedRule):
    """The fp16 mode and fp16 torch_autocast are both enabled, each with a loss scale of its own."""

    code = "HS202"
    name = "autocast-with-fp16-mode"
    severity = "error"
    reason = (
        "With torch_autocast the loss is multiplied by torch's GradScaler (65536 at the start), but the fp16 mode divides "
        "the gradients by its own loss scale. The two differ from the first growth or overflow on: with a scale of 2^8 in the "
        "fp16 block, gradient norms came out 256 times too large. DeepSpeed accepts the pair without a word."
    )
    bad = (
        '{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0, "fp16": {"enabled": true},\n'
        ' "torch_autocast": {"enabled": true, "dtype": "float16"}}',
    )
    good = (
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true}}',
        '{"zero_optimization": {"stage": 1}, "torch_autocast": {"enabled": true, "dtype": "bfloat16"}}',
    )
    references = (
        _CONFIG_DOCS,
        "measured: DeepSpeed 0.19.8, fp16 with scale 2^8 and torch_autocast: norm 256 times too large",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """fp16 mode with fp16 autocast."""
        if deepspeed.fp16 and deepspeed.autocast and deepspeed.dtype("torch_autocast", "dtype") in {"fp16", None}:
            yield self.at(
                config,
                ("torch_autocast", "enabled"),
                "fp16 and torch_autocast are both enabled: the loss is scaled by one loss scale and the gradients are divided "
                "by the other.",
                instead="Keep one of the two blocks; fp16 with ZeRO is the one that works.",
            )


class AutocastWithoutDtype(DeepSpeedRule):
    """torch_autocast is enabled with no dtype, which on a GPU means fp16 without loss scaling."""

    code = "HS203"
    name = "autocast-without-dtype"
    severity = "error"
    reason = (
        "Without a dtype DeepSpeed passes None to torch.autocast, which takes the device's default: fp16 on CUDA. Its "
        "GradScaler is made only when the dtype is float16, and None is not, so the run is fp16 with no loss scale: gradients "
        "below 6e-8 become 0 and nothing says so."
    )
    bad = ('{"zero_optimization": {"stage": 2}, "torch_autocast": {"enabled": true}}',)
    good = ('{"zero_optimization": {"stage": 2}, "torch_autocast": {"enabled": true, "dtype": "bfloat16"}}',)
    references = (_CONFIG_DOCS, "measured: DeepSpeed 0.19.8 accepts the block and makes no GradScaler")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """A block that is on and has no dtype."""
        if deepspeed.autocast and config.value("torch_autocast", "dtype") is None and not deepspeed.fp16:
            yield self.at(
                config,
                ("torch_autocast", "enabled"),
                "torch_autocast is enabled without a dtype: on a GPU that is fp16, and DeepSpeed then makes no GradScaler.",
                instead='Add "dtype": "bfloat16" to the block.',
            )


class Fp16AutocastWithZero(DeepSpeedRule):
    """torch_autocast in fp16 is combined with ZeRO, where its loss scaling is broken."""

    code = "HS204"
    name = "fp16-autocast-with-zero"
    severity = "error"
    reason = (
        "ZeRO's optimizers were written for DeepSpeed's own loss scale, not for the GradScaler that torch_autocast adds. "
        "Clipping (1.0 by default since 0.19.3) then acts on the scaled gradient: a true gradient of 0.5 was applied as 1.5e-5. "
        "In 0.19.8 the first overflow ends training: 24 of 24 later steps were skipped, the scale stuck at 65536. In 0.19.6 ranks "
        "drift apart, with scales of 16384 and 32768. And the scaler's state is in no checkpoint. bf16 has none of this."
    )
    bad = (
        '{"zero_optimization": {"stage": 2}, "torch_autocast": {"enabled": true, "dtype": "float16"}}',
        '{"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0,\n "torch_autocast": {"enabled": true, "dtype": "fp16"}}',
    )
    good = (
        '{"zero_optimization": {"stage": 2}, "torch_autocast": {"enabled": true, "dtype": "bfloat16"}}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}',
    )
    references = ("measured: DeepSpeed 0.19.6, 0.19.7 and 0.19.8 on two processes", _CONFIG_DOCS)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """fp16 autocast at stage 1 to 3."""
        is_fp16 = deepspeed.dtype("torch_autocast", "dtype") == "fp16"
        if deepspeed.autocast and is_fp16 and deepspeed.stage and not deepspeed.fp16:
            yield self.at(
                config,
                ("torch_autocast", "dtype"),
                f"torch_autocast in fp16 with ZeRO stage {deepspeed.stage}: gradients are clipped while still scaled, and one "
                "overflow stops training for good (0.19.8) or lets the ranks drift apart (0.19.6).",
                instead='Use "dtype": "bfloat16", or the fp16 block, which ZeRO scales by itself.',
            )


class AmpWithZero(DeepSpeedRule):
    """Apex AMP is combined with ZeRO or with another precision mode."""

    code = "HS205"
    name = "amp-with-zero"
    severity = "error"
    reason = (
        "Apex AMP and ZeRO both want to own the casts and the loss scale, and DeepSpeed refuses the pair: 'Amp and ZeRO are not "
        "currently compatible, please use (legacy) fp16 mode which performs similar to amp opt_mode=O2'. The same holds for amp "
        "with fp16 or bf16. From 0.19.8 on, any amp block is refused."
    )
    bad = (
        '{"train_batch_size": 8, "amp": {"enabled": true, "opt_level": "O1"}, "zero_optimization": {"stage": 2}}',
        '{"train_batch_size": 8, "amp": {"enabled": true}, "fp16": {"enabled": true}, "zero_optimization": {"stage": 0}}',
    )
    good = ('{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}',)
    references = (
        _CONFIG_DOCS + "#automatic-mixed-precision-amp-training-options",
        "https://github.com/deepspeedai/DeepSpeed/issues/7662",
        _REMOVALS,
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """amp on with something it cannot stand beside."""
        if not deepspeed.amp:
            return
        others = [f"ZeRO stage {deepspeed.stage}"] if deepspeed.stage else []
        others += ["fp16"] if deepspeed.fp16 else []
        others += [deepspeed.bf16_name] if deepspeed.bf16 else []
        if others:
            yield self.at(
                config,
                ("amp", "enabled"),
                f"amp is enabled together with {' and '.join(others)}, which DeepSpeed refuses.",
                instead="Remove the amp block and use the fp16 block, which is like Apex's O2.",
            )


class AmpRemoved(DeepSpeedRule):
    """The amp block is one that current DeepSpeed refuses."""

    code = "HS206"
    name = "amp-removed"
    severity = "warning"
    reason = (
        "Apex deleted apex.amp in May 2025, so DeepSpeed up to 0.19.7 fails to import it with a current Apex. DeepSpeed deleted "
        "its side in 0.19.8, which refuses any configuration with an amp block, even one with enabled set to false."
    )
    bad = (
        '{"train_batch_size": 8, "amp": {"enabled": true, "opt_level": "O2"}}',
        '{\n  "train_batch_size": 8,\n  "amp": {\n    "enabled": false\n  },\n  "zero_optimization": {"stage": 1}\n}',
    )
    good = ('{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}',)
    references = (
        _REMOVALS,
        "https://github.com/NVIDIA/apex/pull/1896",
        "https://github.com/deepspeedai/DeepSpeed/issues/7662",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Any amp block that HS205 has not spoken of."""
        found = config.entry("amp")
        conflicts = deepspeed.amp and (deepspeed.stage or deepspeed.fp16 or deepspeed.bf16)
        gone = deepspeed.since(0, 19, 8)
        if found is None or conflicts or gone is False:
            return
        state = "" if deepspeed.amp is not False else ", though it is not enabled"
        fix = remove(config, config.root, found, "Remove the idle amp block") if deepspeed.amp is False else None
        before = "" if gone or deepspeed.amp is False else " Before, it needs an Apex from before May 2025."
        yield self.at(
            config,
            ("amp",),
            f"DeepSpeed refuses this block from 0.19.8 on{state}.{before}",
            instead="Remove it; use fp16, bf16 or torch_autocast.",
            severity="error" if gone else "advice" if deepspeed.amp is False else None,
            fix=fix,
        )


class Fp16InputCast(DeepSpeedRule):
    """fp16.auto_cast is on while the fp16 mode is off, so inputs are cast to a format the model does not have."""

    code = "HS207"
    name = "fp16-input-cast"
    severity = "error"
    reason = (
        "auto_cast casts the positional inputs of the model to fp16 whether or not fp16 is enabled. In bf16 or fp32 the first "
        "matrix product then meets two dtypes and raises a RuntimeError. Keyword inputs are never cast."
    )
    bad = (
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": false, "auto_cast": true}, "bf16": {"enabled": true}}',
    )
    good = ('{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "auto_cast": true}}',)
    references = (
        _CONFIG_DOCS + "#fp16-training-options",
        "measured: DeepSpeed 0.19.8 raises in the first forward pass",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """The cast without the mode."""
        if deepspeed.fp16 is False and config.is_on("fp16", "auto_cast"):
            yield self.at(
                config,
                ("fp16", "auto_cast"),
                "fp16.auto_cast casts inputs to fp16 although fp16 is off, and the model's first product raises.",
                instead="Remove auto_cast, or enable fp16.",
            )


class Fp16WithoutZero(DeepSpeedRule):
    """The fp16 mode runs without ZeRO, where DeepSpeed no longer scales the loss."""

    code = "HS208"
    name = "fp16-without-zero"
    severity = "warning"
    reason = (
        "Since 0.18.3 (November 2025) engine.backward scales the loss only for ZeRO's optimizers, while the stage-0 fp16 "
        "optimizer still divides the gradients by the scale. Measured up to 0.19.8: the effective gradient is 1/65536 of the true "
        "one at the default scale, SGD does not move, Adam runs on its epsilon, and nothing guards small gradients. 0.18.2 and "
        "earlier scale correctly, but ignore hysteresis at stage 0."
    )
    bad = (
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "gradient_clipping": 1.0}',
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": 0}}',
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": false}',
    )
    good = (
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": 1}}',
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": true}',
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": "${STAGE}"}}',
    )
    references = (
        "https://github.com/deepspeedai/DeepSpeed/pull/8393",
        "measured: DeepSpeed 0.18.2 (right), 0.18.3 to 0.19.8 (gradient 1/scale)",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """fp16 at stage 0."""
        broken = deepspeed.since(0, 18, 3)
        alone = not deepspeed.amp and not deepspeed.bf16
        if deepspeed.fp16 and deepspeed.stage == 0 and alone and broken is not False:
            when = "" if broken else " from 0.18.3 on (0.18.2 and earlier do scale)"
            yield self.at(
                config,
                ("fp16", "enabled"),
                f"fp16 without ZeRO: DeepSpeed{when} does not scale the loss, yet divides the gradients by the loss scale.",
                instead='Use "zero_optimization": {"stage": 1}, or bf16.',
                severity="error" if broken else None,
            )


class Bf16OverflowUnseen(DeepSpeedRule):
    """Non-finite bf16 gradients are applied instead of skipped."""

    code = "HS209"
    name = "bf16-overflow-unseen"
    severity = "warning"
    reason = (
        "bf16 overflows rarely, but a NaN from the model still arrives. Up to 0.19.7 ZeRO stage 3 ignores check_grad_overflow "
        "in bf16: an inf in one gradient made the weights NaN with skipped_steps at 0. With the check set to false that is so at "
        "every stage and in every release."
    )
    bad = (
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true, "check_grad_overflow": false}}',
        '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true, "check_grad_overflow": true}}',
    )
    good = ('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true, "check_grad_overflow": true}}',)
    references = (
        "https://github.com/deepspeedai/DeepSpeed/pull/8035",
        "measured: DeepSpeed 0.19.6 and 0.19.7, stage 3, weights NaN after one inf",
    )
    settings = Settings(deepspeed=(0, 19, 7))

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """The check off, or ignored."""
        if not deepspeed.bf16:
            return
        path = (deepspeed.bf16_name, "check_grad_overflow")
        checks = config.value(*path)
        if checks is False:
            message = (
                "check_grad_overflow is false: one non-finite gradient makes the weights NaN, and no step is skipped."
            )
            yield self.at(config, path, message, instead="Remove the key; true is the default.", severity="advice")
        elif checks is True and deepspeed.stage == 3 and not deepspeed.since(0, 19, 8):
            message = (
                "Up to 0.19.7, ZeRO stage 3 ignores check_grad_overflow in bf16, and applies non-finite gradients."
            )
            known = deepspeed.since(0, 19, 8) is False
            yield self.at(
                config, path, message, instead="Use DeepSpeed 0.19.8 or later.", severity=None if known else "advice"
            )


RULES: tuple[type[Rule], ...] = (
    TwoModes,
    AutocastWithFp16Mode,
    AutocastWithoutDtype,
    Fp16AutocastWithZero,
    AmpWithZero,
    AmpRemoved,
    Fp16InputCast,
    Fp16WithoutZero,
    Bf16OverflowUnseen,
)
