"""Rules for the optimizer of a DeepSpeed configuration: conflicts with ZeRO, the precision mode or the release."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule, version_text
from halfstep.check.config.edits import add, remove
from halfstep.check.finding import Finding, Fix
from halfstep.check.rule import Rule
from halfstep.errors import nearest
from halfstep.precision.deepspeed_optimizers import (
    BUILT_IN,
    BY_LAYER,
    MAX_GRAD_NORM_EFFECT,
    ONE_BIT,
    TESTED_WITH_ZERO,
    TORCH,
)
from halfstep.precision.node import Entry, Scalar

__all__ = ["RULES"]

_DOCS = "https://www.deepspeed.ai/docs/config-json/"
_OPTIMIZER_DOCS = _DOCS + "#optimizer-parameters"
_REMOVALS = "https://github.com/deepspeedai/DeepSpeed/issues/8489"


class MaxGradNormInOptimizer(DeepSpeedRule):
    """`max_grad_norm` is set in `optimizer.params`, where DeepSpeed rejects it."""

    code = "HS241"
    name = "max-grad-norm-in-optimizer"
    severity = "error"
    reason = MAX_GRAD_NORM_EFFECT
    bad = (
        '{\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 1},\n  "optimizer": {\n    "type": "AdamW",\n'
        '    "params": {\n      "lr": 1e-4,\n      "max_grad_norm": 1.0\n    }\n  }\n}\n',
        '{"train_batch_size": 8, "optimizer": {"type": "OneBitAdam", "params": {"lr": 2e-4, "max_grad_norm": 1.0}},\n'
        ' "fp16": {"enabled": true}, "gradient_clipping": 1.0}',
    )
    good = (
        '{\n  "gradient_clipping": 1.0,\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 1},\n  "optimizer": {\n'
        '    "type": "AdamW",\n    "params": {\n      "lr": 1e-4\n    }\n  }\n}\n',
    )
    references = (
        "https://github.com/deepspeedai/DeepSpeed/pull/742",
        "measured: DeepSpeed 0.19.6 and 0.19.8 raise ValueError",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report the key in optimizer.params."""
        path = ("optimizer", "params", "max_grad_norm")
        entry = config.entry(*path)
        if entry is None or deepspeed.optimizer is None:
            return
        value = config.number(*path)
        value_text, is_set = f"{value:g}" if value is not None else "...", config.entry("gradient_clipping") is not None
        instead = f'Set `"gradient_clipping": {value_text}` at the top level.'
        yield self.at(
            config,
            path,
            f"DeepSpeed does not support the optimizer parameter `max_grad_norm` ({value_text}) and raises a "
            "ValueError.",
            instead="Remove it; `gradient_clipping` is already set." if is_set else instead,
            fix=self._moved(config, entry),
        )

    @staticmethod
    def _moved(config: Config, entry: Entry) -> Fix | None:
        params = config.block("optimizer", "params")
        removal = remove(config, params, entry, "") if params and isinstance(entry.value, Scalar) else None
        if removal is None or not isinstance(entry.value, Scalar):
            return None
        if config.entry("gradient_clipping") is not None:
            return Fix("Remove max_grad_norm, since gradient_clipping is set", removal.edits)
        addition = add(config, config.root, "gradient_clipping", entry.value.value, "")
        if addition is None or not isinstance(entry.value.value, int | float):
            return None
        return Fix("Replace max_grad_norm with gradient_clipping", (*addition.edits, *removal.edits))


class UntestedOptimizer(DeepSpeedRule):
    """ZeRO is used with an untested optimizer without `zero_allow_untested_optimizer`."""

    code = "HS242"
    name = "untested-optimizer"
    objects = True
    severity = "error"
    reason = (
        "ZeRO compares the exact optimizer class with a list: torch's Adam, AdamW and Adagrad, and DeepSpeed's Adam, "
        "Adagrad, Lion and Muon. Any other optimizer, including SGD and LAMB, raises 'You are using an untested ZeRO "
        "Optimizer' unless `zero_allow_untested_optimizer` is true. That is safe for an optimizer that treats every "
        "element alone, such as SGD, and wrong for one that needs a full layer, such as LAMB (HS240)."
    )
    bad = (
        '{\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 2},\n'
        '  "optimizer": {"type": "SGD", "params": {"lr": 0.1}}\n}\n',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}',
        "import deepspeed\n\nds_config = {\n    'train_batch_size': 8,\n    'zero_optimization': {'stage': 2},\n"
        "    'optimizer': {'type': 'SGD', 'params': {'lr': 0.1}},\n}\n",
        "import deepspeed\nimport torch\n\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\nengine, *_ = deepspeed.initialize(\n"
        "    model=net, optimizer=opt, config={'train_batch_size': 8, 'zero_optimization': {'stage': 2}}\n)\n",
    )
    good = (
        '{\n  "zero_allow_untested_optimizer": true,\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 2},\n'
        '  "optimizer": {"type": "SGD", "params": {"lr": 0.1}}\n}\n',
    )
    references = (_DOCS + "#zero-optimizations-for-fp16-training", "measured: DeepSpeed 0.19.8, assertion")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report a known but untested optimizer at stages 1 to 3."""
        kind = config.value("optimizer", "type")
        name = deepspeed.optimizer
        allowed = config.value("zero_allow_untested_optimizer")
        known = isinstance(kind, str) and (name in BUILT_IN or kind in TORCH)
        if (
            not known
            or name in TESTED_WITH_ZERO
            or name in ONE_BIT
            or not deepspeed.stage
            or allowed not in {None, False}
        ):
            return
        fix = None
        by_layer = kind in BY_LAYER or name in BY_LAYER
        if allowed is None and config.entry("zero_allow_untested_optimizer") is None and not by_layer:
            # Unsafe: the flag means that the user knows what ZeRO does with this optimizer.
            key = "zero_allow_untested_optimizer"
            fix = add(config, config.root, key, True, f"Add {key}", safe=False)
        yield self.at(
            config,
            ("optimizer", "type"),
            f"{kind} is not in ZeRO's list of tested optimizers; DeepSpeed raises an error at stage {deepspeed.stage}.",
            instead=f'Use `"type": "AdamW"`; {kind} needs whole layers, and ZeRO passes it shards.'
            if by_layer
            else 'Add `"zero_allow_untested_optimizer": true`, or use AdamW.',
            fix=fix,
        )


class UnknownOptimizer(DeepSpeedRule):
    """The optimizer type exists neither in DeepSpeed nor in `torch.optim`."""

    code = "HS243"
    name = "unknown-optimizer"
    severity = "error"
    reason = (
        "DeepSpeed recognizes its own optimizers in any case (Adam, AdamW, Adagrad, Lamb, Lion, Muon, MuAdam, "
        'MuAdamW, MuSGD) and looks up every other name in `torch.optim`, which is case-sensitive: "sgd" is a module '
        "there, not a class. Class names such as DeepSpeedCPUAdam and FusedAdam are not valid types; DeepSpeed "
        "selects those classes for Adam and AdamW."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "optimizer": {"type": "DeepSpeedCPUAdam", "params": {"lr": 1e-4}}}',
        '{"train_batch_size": 8, "optimizer": {"type": "sgd", "params": {"lr": 0.1}}, "bf16": {"enabled": true}}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "optimizer": {"type": "adamw", "params": {"lr": 1e-4}}}',
        '{"train_batch_size": 8, "optimizer": {"type": "RMSprop", "params": {"lr": 0.1}}, "bf16": {"enabled": true}}',
    )
    references = (_OPTIMIZER_DOCS, "https://docs.pytorch.org/docs/stable/optim.html")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report a type that neither library has."""
        kind = config.value("optimizer", "type")
        if not isinstance(kind, str) or "." in kind or not config.strict:
            return  # with a dot it is a class that the program around the file imports
        if deepspeed.optimizer in BUILT_IN or kind in TORCH:
            return
        suggestion = {name.casefold(): name for name in TORCH}.get(kind.casefold())
        suggestion = suggestion or ("AdamW" if "adam" in kind.casefold() else nearest(kind, (*TORCH, "Lamb", "Lion")))
        yield self.at(
            config,
            ("optimizer", "type"),
            f"Unknown optimizer type {kind!r}: not in DeepSpeed or `torch.optim` (case-sensitive).",
            instead=f'Use `"type": "{suggestion}"`.' if suggestion else "Pass an object to `deepspeed.initialize`.",
        )


class OneBitWithZero(DeepSpeedRule):
    """A 1-bit optimizer is combined with ZeRO."""

    code = "HS244"
    name = "one-bit-with-zero"
    objects = True
    severity = "error"
    reason = (
        "1-bit Adam, 0/1 Adam and 1-bit LAMB compress full momentum tensors between ranks, while ZeRO gives each rank "
        "a shard of them. DeepSpeed fails an assertion at stage 1 and above (up to 0.19.6; later releases have "
        "removed these optimizers). Stage 0 runs them, with fp16 only up to 0.18.2: later releases do not scale the "
        "fp16 loss there (HS208)."
    )
    bad = (
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": 1},\n'
        ' "optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23000}}}',
    )
    good = (
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": 1},\n'
        ' "optimizer": {"type": "Adam", "params": {"lr": 4e-4}}}',
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": 1}}',
    )
    references = ("https://github.com/deepspeedai/DeepSpeed/issues/5046", _REMOVALS)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report stage 1 and above."""
        if deepspeed.optimizer in ONE_BIT and deepspeed.stage:
            kind = config.value("optimizer", "type")
            message = f"{kind} is not compatible with ZeRO stage {deepspeed.stage}; DeepSpeed raises an AssertionError."
            yield self.at(config, ("optimizer", "type"), message, instead='Use `"type": "AdamW"`, which ZeRO supports.')


class OneBitOutsideFp16(DeepSpeedRule):
    """A 1-bit optimizer is used without fp16, although its convergence was verified in fp16 only."""

    code = "HS245"
    name = "one-bit-outside-fp16"
    objects = True
    severity = "warning"
    reason = (
        "DeepSpeed itself warns that 'the convergence of 1-bit Adam is only verified under FP16', and likewise for "
        "0/1 Adam and 1-bit LAMB. In fp32 the first batch is also lost, because the first call to `step` only "
        "allocates the buffers. The last release that scales the fp16 loss for them is 0.18.2 (HS208)."
    )
    bad = (
        '{"train_batch_size": 8, "bf16": {"enabled": true}, "optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4}}}',
        '{"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": false},\n'
        ' "optimizer": {"type": "ZeroOneAdam", "params": {"lr": 4e-4}}}',
    )
    good = (
        '{"train_batch_size": 8, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 4e-4}}}',
    )
    references = ("https://www.deepspeed.ai/tutorials/onebit-adam/", _REMOVALS)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report a mode that is known and is not fp16."""
        if (
            deepspeed.optimizer not in ONE_BIT
            or deepspeed.stage
            or deepspeed.fp16 is not False
            or deepspeed.since(0, 19, 7)
        ):
            return
        kind = config.value("optimizer", "type")
        mode = f"trains in {deepspeed.weights}" if deepspeed.weights else "does not enable fp16"
        message = f"{kind} was verified to converge in fp16 only, but this configuration {mode}."
        instead = 'Use `"type": "AdamW"`, or fp16 with DeepSpeed 0.18.2 or earlier.'
        yield self.at(config, ("optimizer", "type"), message, instead=instead)


class OneBitRemoved(DeepSpeedRule):
    """The configuration names a 1-bit optimizer, which DeepSpeed has removed."""

    code = "HS246"
    name = "one-bit-removed"
    objects = True
    severity = "warning"
    reason = (
        "DeepSpeed 0.19.7 (September 2026) removed OneBitAdam, ZeroOneAdam and OneBitLamb, and 0.19.8 removed their "
        "communication backends. These types now raise 'AssertionError: OneBitAdam is not a supported DeepSpeed "
        "Optimizer'. Releases up to 0.19.6 run them at stage 0, but fp16 needs 0.18.2 or earlier: from 0.18.3 on the "
        "fp16 loss is not scaled without ZeRO (HS208)."
    )
    bad = (
        '{"train_batch_size": 8, "fp16": {"enabled": true},\n'
        ' "optimizer": {"type": "OneBitLamb", "params": {"lr": 11e-3, "freeze_step": 1000}}}',
    )
    good = (
        '{"train_batch_size": 8, "bf16": {"enabled": true}, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}',
    )
    references = (_REMOVALS, "measured: DeepSpeed 0.19.8 raises AssertionError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report the type, unless HS244 already does."""
        removed = deepspeed.since(0, 19, 7)
        if deepspeed.optimizer not in ONE_BIT or deepspeed.stage or removed is False:
            return
        kind = config.value("optimizer", "type")
        version = config.settings.deepspeed
        message = (
            f"DeepSpeed {version_text(version)} no longer supports {kind}."
            if removed and version
            else f"DeepSpeed 0.19.7 removed {kind}; the last release with it is 0.19.6."
        )
        last = "0.18.2, the last one that scales the fp16 loss without ZeRO" if deepspeed.fp16 else "0.19.6"
        instead = (
            f'Use `"type": "AdamW"`, DeepSpeed {last}, or Halfstep, which still has it: `halfstep.optim.from_deepspeed(config["optimizer"], '
            "params)`."
        )
        yield self.at(config, ("optimizer", "type"), message, instead=instead, severity="error" if removed else None)


class OneBitBackend(DeepSpeedRule):
    """A 1-bit optimizer names an unknown communication backend."""

    code = "HS247"
    name = "one-bit-backend"
    severity = "error"
    reason = (
        "`comm_backend_name` accepts `nccl`, `mpi`, `hccl` and `compressed`. For any other name, such as gloo, "
        "DeepSpeed creates no backend, and the first step raises an AttributeError on None."
    )
    bad = (
        '{"train_batch_size": 8, "fp16": {"enabled": true},\n'
        ' "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "comm_backend_name": "gloo"}}}',
    )
    good = (
        '{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": true}}',
    )
    references = ("https://www.deepspeed.ai/tutorials/onebit-adam/",)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report a name that is not a valid backend."""
        path = ("optimizer", "params", "comm_backend_name")
        value = config.value(*path)
        if (
            deepspeed.optimizer in ONE_BIT
            and isinstance(value, str)
            and value not in {"nccl", "mpi", "hccl", "compressed"}
        ):
            message = (
                f"`comm_backend_name` is {value!r}, not one of nccl, mpi, hccl and compressed; the first step raises "
                "an AttributeError."
            )
            yield self.at(config, path, message, instead='Set `"comm_backend_name": "nccl"`.')


class LambWithStaticScale(DeepSpeedRule):
    """LAMB is used with a static loss scale, which DeepSpeed rejects in every mode."""

    code = "HS248"
    name = "lamb-with-static-scale"
    severity = "error"
    reason = (
        "For Lamb and OneBitLamb, DeepSpeed asserts that the loss scale is dynamic. It checks `fp16.loss_scale` even "
        "in bf16 and fp32, where no loss scale is used."
    )
    bad = (
        '{"train_batch_size": 8, "bf16": {"enabled": true}, "fp16": {"enabled": false, "loss_scale": 128},\n'
        ' "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}',
    )
    good = (
        '{"train_batch_size": 8, "bf16": {"enabled": true}, "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}',
    )
    references = (
        "https://github.com/deepspeedai/DeepSpeed/issues/5708",
        "measured: DeepSpeed 0.19.8, bf16 and scale 128",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report a scale other than 0."""
        if deepspeed.optimizer in {"lamb", "onebitlamb"} and deepspeed.is_dynamic is False:
            kind, scale = config.value("optimizer", "type"), config.value("fp16", "loss_scale")
            message = f"{kind} requires a dynamic loss scale in every mode, but `fp16.loss_scale` is {scale}."
            yield self.at(config, ("fp16", "loss_scale"), message, instead='Set `"loss_scale": 0`, or remove it.')


class AdamIsAdamW(DeepSpeedRule):
    """The optimizer type `Adam` trains as AdamW."""

    code = "HS249"
    name = "adam-is-adamw"
    severity = "advice"
    reason = (
        "DeepSpeed's Adam decouples the weight decay unless `adam_w_mode` is false, so `Adam` with weight decay "
        "trains like `torch.optim.AdamW`, not like `torch.optim.Adam`."
    )
    bad = (
        '{"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "weight_decay": 0.01}}}',
        '{"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam", "params": {"weight_decay": "auto", "torch_adam": true}}}',
    )
    good = ('{"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}}}',)
    references = (_OPTIMIZER_DOCS,)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report Adam with weight decay, also that of the Trainer and with `torch_adam`."""
        kind, written = config.entry("optimizer", "type"), config.entry("optimizer", "params", "weight_decay")
        decay = written.value.value if written and isinstance(written.value, Scalar) else None
        is_open = kind and config.value("optimizer", "params", "adam_w_mode") is None
        number = config.number("optimizer", "params", "weight_decay")
        if deepspeed.optimizer == "adam" and is_open and (number or decay == "auto"):
            which = f"`weight_decay` {number:g}" if number else "the Trainer's `weight_decay`"
            message = f"DeepSpeed runs `Adam` with {which} as AdamW: the decay is decoupled."
            instead = 'Use `"type": "AdamW"`, or set `"adam_w_mode": false`.'
            yield self.at(config, ("optimizer", "type"), message, instead=instead)


RULES: tuple[type[Rule], ...] = (
    MaxGradNormInOptimizer,
    UntestedOptimizer,
    UnknownOptimizer,
    OneBitWithZero,
    OneBitOutsideFp16,
    OneBitRemoved,
    OneBitBackend,
    LambWithStaticScale,
    AdamIsAdamW,
)
