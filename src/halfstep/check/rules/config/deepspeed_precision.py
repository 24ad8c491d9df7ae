"""Rules for DeepSpeed's precision modes: combinations that fail at startup, skip loss scaling or were removed."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule, uses_another_engine
from halfstep.check.config.edits import remove
from halfstep.check.files.source import Settings
from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.precision.deepspeed_optimizers import ONE_BIT
from halfstep.precision.node import Scalar

__all__ = ["RULES"]

_CONFIG_DOCS = "https://www.deepspeed.ai/docs/config-json/"
_REMOVALS = "https://github.com/deepspeedai/DeepSpeed/issues/8489"


class TwoModes(DeepSpeedRule):
    """fp16 and bf16 are both enabled."""

    code = "HS201"
    name = "two-precision-modes"
    severity = "error"
    reason = (
        "DeepSpeed casts the model to one 16-bit format and raises an AssertionError for two: 'bfloat16 and fp16 "
        "modes cannot be simultaneously enabled'. fp16 has 11 significant bits and needs a loss scale; bf16 has 8 and "
        "the range of fp32. The two train differently, so there is no automatic fix."
    )
    bad = (
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}',
        '{\n  "zero_optimization": {"stage": 2},\n  "fp16": {"enabled": true},\n  "bfloat16": {"enabled": true}\n}',
        "import deepspeed\n\nds_config = {\n    'train_batch_size': 8,\n    'fp16': {'enabled': True},\n"
        "    'bf16': {'enabled': True},\n}\nengine = deepspeed.initialize(model=model, config=ds_config)\n",
    )
    good = (
        '{"train_batch_size": 8, "fp16": {"enabled": false}, "bf16": {"enabled": true}}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": false}, "bf16": {"enabled": true}, "gradient_clipping": 1.0}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}',
    )
    references = (
        _CONFIG_DOCS + "#fp16-training-options",
        "measured: DeepSpeed 0.19.8, DeepSpeedConfig raises AssertionError",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report both blocks enabled."""
        if deepspeed.fp16 and deepspeed.bf16:
            name = deepspeed.bf16_name
            yield self.at(
                config,
                (name, "enabled"),
                f"`fp16.enabled` and `{name}.enabled` are both true; DeepSpeed raises an AssertionError.",
                instead="Keep one.",
            )


class AutocastWithFp16Mode(DeepSpeedRule):
    """fp16 mode and fp16 `torch_autocast` are both enabled, each with a separate loss scale."""

    code = "HS202"
    name = "autocast-with-fp16-mode"
    severity = "error"
    reason = (
        "With `torch_autocast`, torch's GradScaler (initial scale 65536) multiplies the loss, but fp16 mode divides "
        "the gradients by its own loss scale. The two differ after the first growth or overflow: with a scale of 2^8 "
        "in the fp16 block, gradient norms were 256 times too large. DeepSpeed accepts the combination without a "
        "warning."
    )
    bad = (
        '{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0, "fp16": {"enabled": true},\n'
        ' "torch_autocast": {"enabled": true, "dtype": "float16"}}',
    )
    good = (
        '{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0, "fp16": {"enabled": true}}',
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true}}',
        '{"zero_optimization": {"stage": 1}, "torch_autocast": {"enabled": true, "dtype": "bfloat16"}}',
    )
    references = (
        _CONFIG_DOCS,
        "measured: DeepSpeed 0.19.8, fp16 with scale 2^8 and torch_autocast: norm 256 times too large",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report fp16 mode with fp16 autocast."""
        if deepspeed.fp16 and deepspeed.autocast and deepspeed.dtype("torch_autocast", "dtype") in {"fp16", None}:
            yield self.at(
                config,
                ("torch_autocast", "enabled"),
                "`fp16` and `torch_autocast` are both enabled: one loss scale multiplies the loss, the other divides "
                "the gradients.",
                instead="Keep one; the `fp16` block works with ZeRO.",
            )


class AutocastWithoutDtype(DeepSpeedRule):
    """`torch_autocast` is enabled without a dtype, which on a GPU means fp16 without loss scaling."""

    code = "HS203"
    name = "autocast-without-dtype"
    severity = "error"
    reason = (
        "Without a dtype DeepSpeed passes None to `torch.autocast`, which uses the device default: fp16 on CUDA. "
        "DeepSpeed creates a GradScaler only if the dtype is float16, so the run is fp16 without a loss scale: "
        "gradients below 6e-8 underflow to 0 without a warning."
    )
    bad = ('{"zero_optimization": {"stage": 2}, "torch_autocast": {"enabled": true}}',)
    good = ('{"zero_optimization": {"stage": 2}, "torch_autocast": {"enabled": true, "dtype": "bfloat16"}}',)
    references = (_CONFIG_DOCS, "measured: DeepSpeed 0.19.8 accepts the block and creates no GradScaler")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report an enabled block without a dtype."""
        if deepspeed.autocast and config.value("torch_autocast", "dtype") is None and not deepspeed.fp16:
            yield self.at(
                config,
                ("torch_autocast", "enabled"),
                "`torch_autocast` is enabled without a dtype; on a GPU it runs fp16, and DeepSpeed creates no "
                "GradScaler.",
                instead='Add `"dtype": "bfloat16"` to the block.',
            )


class Fp16AutocastWithZero(DeepSpeedRule):
    """fp16 `torch_autocast` is combined with ZeRO, where its loss scaling is broken."""

    code = "HS204"
    name = "fp16-autocast-with-zero"
    severity = "error"
    reason = (
        "The ZeRO optimizers support DeepSpeed's loss scaler, not the GradScaler that `torch_autocast` adds. Clipping "
        "(1.0 by default since 0.19.3) acts on the scaled gradient: a true gradient of 0.5 was applied as 1.5e-5. In "
        "0.19.8 the first overflow stops training: all 24 later steps were skipped, with the scale stuck at 65536. In "
        "0.19.6 ranks diverge (scales 16384 and 32768). The GradScaler state is not checkpointed. bf16 has none of "
        "these problems."
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
        """Report fp16 autocast at stages 1 to 3."""
        is_fp16 = deepspeed.dtype("torch_autocast", "dtype") == "fp16"
        if deepspeed.autocast and is_fp16 and deepspeed.stage and not deepspeed.fp16:
            yield self.at(
                config,
                ("torch_autocast", "dtype"),
                f"fp16 `torch_autocast` with ZeRO stage {deepspeed.stage} clips gradients before unscaling them, and "
                "after one overflow skips every step (0.19.8) or lets ranks diverge (0.19.6).",
                instead='Use `"dtype": "bfloat16"`, or the `fp16` block, which ZeRO supports.',
            )


class AmpWithZero(DeepSpeedRule):
    """Apex AMP is combined with ZeRO or with another precision mode."""

    code = "HS205"
    name = "amp-with-zero"
    severity = "error"
    reason = (
        "Apex AMP and ZeRO both manage casts and the loss scale, and DeepSpeed raises an AssertionError for the pair: "
        "'Amp and ZeRO are not currently compatible, please use (legacy) fp16 mode which performs similar to amp "
        "opt_mode=O2'. `amp` with fp16 or bf16 fails as well. Since 0.19.8 any `amp` block raises an error."
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
        """Report amp together with ZeRO, fp16 or bf16; from 0.19.8 on HS206 reports every amp block."""
        if not deepspeed.amp or deepspeed.since(0, 19, 8):
            return
        conflicts = [f"ZeRO stage {deepspeed.stage}"] if deepspeed.stage else []
        conflicts += ["fp16"] if deepspeed.fp16 else []
        conflicts += [deepspeed.bf16_name] if deepspeed.bf16 else []
        if conflicts:
            yield self.at(
                config,
                ("amp", "enabled"),
                f"`amp` is enabled together with {' and '.join(conflicts)}; DeepSpeed raises an error.",
                instead="Remove the `amp` block and use the `fp16` block, which is similar to Apex O2.",
            )


class AmpRemoved(DeepSpeedRule):
    """The configuration has an `amp` block, which DeepSpeed no longer supports."""

    code = "HS206"
    name = "amp-removed"
    severity = "warning"
    reason = (
        "Apex removed `apex.amp` in May 2025, so DeepSpeed up to 0.19.7 fails to import it with a current Apex. "
        "DeepSpeed 0.19.8 removed its Apex support and raises an error for any `amp` block, even with `enabled` set "
        "to false."
    )
    bad = (
        '{"train_batch_size": 8, "amp": {"enabled": true, "opt_level": "O2"}}',
        '{\n  "train_batch_size": 8,\n  "amp": {\n    "enabled": false\n  },\n  "zero_optimization": {"stage": 1}\n}',
    )
    good = (
        '{"train_batch_size": 8, "bf16": {"enabled": true}}',
        '{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}',
    )
    references = (
        _REMOVALS,
        "https://github.com/NVIDIA/apex/pull/1896",
        "https://github.com/deepspeedai/DeepSpeed/issues/7662",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report any amp block that HS205 does not report."""
        entry = config.entry("amp")
        conflicts = deepspeed.amp and (deepspeed.stage or deepspeed.fp16 or deepspeed.bf16)
        removed = deepspeed.since(0, 19, 8)
        if entry is None or (conflicts and not removed) or removed is False:
            return
        disabled = deepspeed.amp is False
        even = ", even when it is disabled" if disabled else ""
        fix = remove(config, config.root, entry, "Remove the disabled amp block") if disabled else None
        earlier = "" if removed or disabled else " Earlier releases need an Apex version from before May 2025."
        yield self.at(
            config,
            ("amp",),
            f"DeepSpeed 0.19.8 and later raise an error for the `amp` block{even}.{earlier}",
            instead="Remove it and use `fp16`, `bf16` or `torch_autocast`.",
            severity="error" if removed else "advice" if disabled else None,
            fix=fix,
        )


class Fp16InputCast(DeepSpeedRule):
    """`fp16.auto_cast` is on while fp16 mode is off, so inputs and weights have different dtypes."""

    code = "HS207"
    name = "fp16-input-cast"
    severity = "error"
    reason = (
        "`auto_cast` casts the model's positional floating-point inputs to fp16 even if fp16 is disabled. In bf16 or fp32 the first "
        "matrix product then raises a RuntimeError for mismatched dtypes. Keyword inputs are never cast."
    )
    bad = (
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": false, "auto_cast": true}, "bf16": {"enabled": true}}',
    )
    good = (
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": false}, "bf16": {"enabled": true}}',
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "auto_cast": true}}',
    )
    references = (
        _CONFIG_DOCS + "#fp16-training-options",
        "measured: DeepSpeed 0.19.8 raises in the first forward pass",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report the input cast without fp16 mode."""
        if deepspeed.fp16 is False and config.is_on("fp16", "auto_cast"):
            yield self.at(
                config,
                ("fp16", "auto_cast"),
                "`fp16.auto_cast` casts floating-point inputs to fp16 although fp16 is off; their first product raises.",
                instead="Remove `auto_cast`, or enable fp16.",
                severity="advice" if deepspeed.has_auto else None,  # Hugging Face passes keywords, which are never cast
            )


class Fp16WithoutZero(DeepSpeedRule):
    """fp16 mode is used without ZeRO, where DeepSpeed no longer scales the loss."""

    code = "HS208"
    name = "fp16-without-zero"
    severity = "warning"
    reason = (
        "Since 0.18.3 (November 2025) `engine.backward` scales the loss for ZeRO optimizers only, but the stage-0 "
        "fp16 optimizer still divides the gradients by the scale. Measured up to 0.19.8: at the default scale the "
        "effective gradient is 1/65536 of the true one, SGD does not train, Adam's epsilon dominates its update, and "
        "small gradients underflow. 0.18.2 and earlier scale correctly but ignore hysteresis at stage 0."
    )
    bad = (
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "gradient_clipping": 1.0}',
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": 0}}',
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": false}',
        '{"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 0}}',
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 0\nmixed_precision: fp16\n",
    )
    good = (
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}',
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": 1}}',
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": true}',
        '{"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 0}}',
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 1\nmixed_precision: fp16\n",
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": "${STAGE}"}}',
    )
    references = (
        "https://github.com/deepspeedai/DeepSpeed/pull/8393",
        "measured: DeepSpeed 0.18.2 (correct), 0.18.3 to 0.19.8 (gradient 1/scale)",
    )

    def check(self, config: Config) -> Iterator[Finding]:
        """The findings in a DeepSpeed configuration, or in an Accelerate file that DeepSpeed's is made from."""
        yield from super().check(config)
        fp16 = config.kind == "accelerate" and config.value("mixed_precision") == "fp16"
        entry = None if uses_another_engine(config) else config.entry("mixed_precision")
        affected = DeepSpeed(config).since(0, 18, 3) is not False
        if fp16 and entry and affected and config.number("deepspeed_config", "zero_stage") == 0:
            message = "With `zero_stage` 0, DeepSpeed 0.18.3 and later divide by the loss scale but do not apply it."
            yield self.finding(config.where(entry), message, instead="Set `zero_stage: 1`, or use bf16.")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report fp16 at stage 0; as advice where the Trainer's --fp16 decides it."""
        broken = deepspeed.since(0, 18, 3)
        only_fp16 = not deepspeed.amp and not deepspeed.bf16 and not deepspeed.is_neox
        node = entry.value if (entry := config.entry("fp16", "enabled")) else None
        is_auto = isinstance(node, Scalar) and node.value == "auto"
        if is_auto and deepspeed.stage == 0 and deepspeed.bf16 is False and broken is not False:
            message = "With --fp16 and no ZeRO, DeepSpeed 0.18.3 and later divide by a loss scale they do not apply."
            instead = 'Set `"zero_optimization": {"stage": 1}`, or use bf16.'
            yield self.at(config, ("fp16", "enabled"), message, instead=instead, severity="advice")
        if deepspeed.fp16 and deepspeed.stage == 0 and only_fp16 and broken is not False:
            versions = "" if broken else " 0.18.3 and later (0.18.2 and earlier are correct)"
            verbs = ("does", "divides") if broken else ("do", "divide")
            one_bit = deepspeed.optimizer in ONE_BIT  # these cannot run with ZeRO
            yield self.at(
                config,
                ("fp16", "enabled"),
                f"Without ZeRO, DeepSpeed{versions} {verbs[0]} not scale the fp16 loss but {verbs[1]} the gradients "
                "by the loss scale.",
                instead='Use `"type": "AdamW"` with ZeRO stage 1, or DeepSpeed 0.18.2.'
                if one_bit
                else 'Set `"zero_optimization": {"stage": 1}`, or use bf16.',
                severity="error" if broken else None,
            )


class Bf16OverflowUnseen(DeepSpeedRule):
    """Non-finite bf16 gradients are applied instead of skipped."""

    code = "HS209"
    name = "bf16-overflow-unseen"
    severity = "warning"
    reason = (
        "bf16 rarely overflows, but the model can still produce NaN gradients. Up to 0.19.7, ZeRO stage 3 ignores "
        "`check_grad_overflow` in bf16: one inf gradient turned the weights into NaN with `skipped_steps` at 0. With "
        "the check set to false, this happens at every stage and in every release."
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
        """Report a check that is disabled or ignored."""
        if not deepspeed.bf16:
            return
        path = (deepspeed.bf16_name, "check_grad_overflow")
        checks = config.value(*path)
        if checks is False:
            message = "`check_grad_overflow` is false; one non-finite gradient makes the weights NaN."
            yield self.at(config, path, message, instead="Remove the key; the default is true.", severity="advice")
        elif checks is True and deepspeed.stage == 3 and not deepspeed.since(0, 19, 8):
            message = (
                "DeepSpeed up to 0.19.7 ignores `check_grad_overflow` at ZeRO stage 3 and applies non-finite gradients."
            )
            is_known = deepspeed.since(0, 19, 8) is False
            yield self.at(
                config, path, message, instead="Use DeepSpeed 0.19.8 or later.", severity=None if is_known else "advice"
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
