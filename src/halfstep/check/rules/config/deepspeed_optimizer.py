"""The optimizer of a DeepSpeed configuration: what ZeRO, the precision mode or the release does not take."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule, version_text
from halfstep.check.config.edits import add, remove
from halfstep.check.finding import Finding, Fix
from halfstep.check.rule import Rule
from halfstep.errors import nearest
from halfstep.precision.node import Entry, Scalar

__all__ = ["RULES"]

_DOCS = "https://www.deepspeed.ai/docs/config-json/"
_OPTIMIZER_DOCS = _DOCS + "#optimizer-parameters"
_REMOVALS = "https://github.com/deepspeedai/DeepSpeed/issues/8489"
_ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
# DeepSpeed's own names, in any case.
_OWN = ("adam", "adamw", "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd", *_ONE_BIT)
# torch.optim's names, as written: DeepSpeed looks them up with getattr.
_TORCH = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
_TESTED_WITH_ZERO = frozenset({"adam", "adamw", "adagrad", "lion", "muon", "muadam", "muadamw"})


class MaxGradNormInOptimizer(DeepSpeedRule):
    """max_grad_norm stands among the optimizer's parameters, where DeepSpeed refuses it."""

    code = "HS241"
    name = "max-grad-norm-in-optimizer"
    severity = "error"
    reason = (
        "DeepSpeed clips by the top-level gradient_clipping. max_grad_norm in optimizer.params raises \"'max_grad_norm' is not "
        'supported as an optimizer parameter" when DeepSpeed builds the optimizer. Up to 0.19.5 it first warns that it passes '
        "the value on (fp16) or sets it to 0.0 (fp32), neither of which is so; with an optimizer object of your own the key is "
        "ignored. In no case does it clip."
    )
    bad = (
        '{\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 1},\n  "optimizer": {\n    "type": "AdamW",\n'
        '    "params": {\n      "lr": 1e-4,\n      "max_grad_norm": 1.0\n    }\n  }\n}\n',
        '{"train_batch_size": 8, "optimizer": {"type": "OneBitAdam", "params": {"lr": 2e-4, "max_grad_norm": 1.0}},\n'
        ' "fp16": {"enabled": true}, "gradient_clipping": 1.0}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0,\n'
        ' "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}',
    )
    references = (
        _DOCS + "#gradient-clipping",
        "https://github.com/deepspeedai/DeepSpeed/pull/742",
        "measured: DeepSpeed 0.19.6 and 0.19.8 raise ValueError",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """The key in optimizer.params."""
        path = ("optimizer", "params", "max_grad_norm")
        found = config.entry(*path)
        if found is None or deepspeed.optimizer is None:
            return
        value = config.number(*path)
        shown = f" {value:g}" if value is not None else ""
        fix = self._moved(config, found)
        yield self.at(
            config,
            path,
            f"max_grad_norm{shown} is no optimizer parameter to DeepSpeed: it stops the run, and never clips.",
            instead=f'Write "gradient_clipping":{shown or " ..."} at the top level.',
            fix=fix,
        )

    @staticmethod
    def _moved(config: Config, found: Entry) -> Fix | None:
        params = config.block("optimizer", "params")
        taken = remove(config, params, found, "") if params and isinstance(found.value, Scalar) else None
        if taken is None or not isinstance(found.value, Scalar):
            return None
        if config.entry("gradient_clipping") is not None:
            return Fix("Remove max_grad_norm, which gradient_clipping stands for", taken.edits)
        added = add(config, config.root, "gradient_clipping", found.value.value, "")
        if added is None or not isinstance(found.value.value, int | float):
            return None
        return Fix("Move max_grad_norm to gradient_clipping", (*added.edits, *taken.edits))


class UntestedOptimizer(DeepSpeedRule):
    """ZeRO is used with an optimizer it was not tested with, and without the flag that allows it."""

    code = "HS242"
    name = "untested-optimizer"
    severity = "error"
    reason = (
        "ZeRO checks the exact class of the optimizer against a list: torch's Adam, AdamW and Adagrad, DeepSpeed's Adam, Adagrad, "
        "Lion and Muon. Anything else, SGD and LAMB included, stops with 'You are using an untested ZeRO Optimizer' unless "
        '"zero_allow_untested_optimizer" is true. Optimizers that look at a whole layer (LAMB) see only a shard of it.'
    )
    bad = (
        '{\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 2},\n'
        '  "optimizer": {"type": "SGD", "params": {"lr": 0.1}}\n}\n',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}',
        "import deepspeed\n\nds_config = {\n    'train_batch_size': 8,\n    'zero_optimization': {'stage': 2},\n"
        "    'optimizer': {'type': 'SGD', 'params': {'lr': 0.1}},\n}\n",
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": true,\n'
        ' "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}',
    )
    references = (_DOCS + "#zero-optimizations-for-fp16-training", "measured: DeepSpeed 0.19.8, assertion")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """A named optimizer off the list at stage 1 to 3."""
        kind = config.value("optimizer", "type")
        name = deepspeed.optimizer
        allowed = config.value("zero_allow_untested_optimizer")
        known = isinstance(kind, str) and (name in _OWN or kind in _TORCH)
        if (
            not known
            or name in _TESTED_WITH_ZERO
            or name in _ONE_BIT
            or not deepspeed.stage
            or allowed not in {None, False}
        ):
            return
        fix = None
        if allowed is None and config.entry("zero_allow_untested_optimizer") is None:
            title = "Add zero_allow_untested_optimizer"
            fix = add(config, config.root, "zero_allow_untested_optimizer", True, title)
        yield self.at(
            config,
            ("optimizer", "type"),
            f"{kind} is not on ZeRO's list of tested optimizers, and DeepSpeed stops at stage {deepspeed.stage} without the flag.",
            instead='Add "zero_allow_untested_optimizer": true, or use AdamW.',
            fix=fix,
        )


class UnknownOptimizer(DeepSpeedRule):
    """The optimizer's type is neither DeepSpeed's nor torch.optim's."""

    code = "HS243"
    name = "unknown-optimizer"
    severity = "error"
    reason = (
        "DeepSpeed knows its own names in any case (Adam, AdamW, Adagrad, Lamb, Lion, Muon, MuAdam, MuAdamW, MuSGD) and looks up "
        'every other in torch.optim, where case counts: "sgd" there is a module, not a class. The classes\' own names '
        "(DeepSpeedCPUAdam, FusedAdam) are not types: DeepSpeed picks them by itself for Adam and AdamW."
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
        """A type that nobody has."""
        kind = config.value("optimizer", "type")
        if not isinstance(kind, str) or not config.strict or deepspeed.optimizer in _OWN or kind in _TORCH:
            return
        meant = {name.casefold(): name for name in _TORCH}.get(kind.casefold())
        meant = meant or ("AdamW" if "adam" in kind.casefold() else nearest(kind, (*_TORCH, "Lamb", "Lion")))
        yield self.at(
            config,
            ("optimizer", "type"),
            f"{kind!r} is no optimizer of DeepSpeed's nor of torch.optim (where case counts).",
            instead=f'Write "type": "{meant}".' if meant else "Build the optimizer yourself and pass it to initialize.",
        )


class OneBitWithZero(DeepSpeedRule):
    """A 1-bit optimizer is combined with ZeRO."""

    code = "HS244"
    name = "one-bit-with-zero"
    severity = "error"
    reason = (
        "1-bit Adam, 0/1 Adam and 1-bit LAMB compress whole momenta between ranks, and ZeRO gives each rank a shard of them. "
        "DeepSpeed asserts at any stage from 1 on (up to 0.19.6; later releases have removed these optimizers)."
    )
    bad = (
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": 1},\n'
        ' "optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23000}}}',
    )
    good = ('{"train_batch_size": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": 1}}',)
    references = ("https://github.com/deepspeedai/DeepSpeed/issues/5046", _REMOVALS)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Any stage from 1 on."""
        if deepspeed.optimizer in _ONE_BIT and deepspeed.stage:
            kind = config.value("optimizer", "type")
            message = (
                f"{kind} needs whole momenta, and ZeRO stage {deepspeed.stage} shards them: DeepSpeed refuses the pair."
            )
            yield self.at(config, ("optimizer", "type"), message, instead="Use stage 0, or AdamW with ZeRO.")


class OneBitOutsideFp16(DeepSpeedRule):
    """A 1-bit optimizer is used outside fp16, the only format its convergence was verified in."""

    code = "HS245"
    name = "one-bit-outside-fp16"
    severity = "warning"
    reason = (
        "DeepSpeed itself warns that 'the convergence of 1-bit Adam is only verified under FP16', and the same of 0/1 Adam and "
        "1-bit LAMB. In fp32 the first batch is lost as well: the first call of step only builds the buffers."
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
        """The mode is known and is not fp16."""
        if (
            deepspeed.optimizer not in _ONE_BIT
            or deepspeed.stage
            or deepspeed.fp16 is not False
            or deepspeed.since(0, 19, 7)
        ):
            return
        kind = config.value("optimizer", "type")
        mode = deepspeed.weights or "this mode"
        message = f"{kind} was verified to converge under fp16 only, and this configuration trains in {mode}."
        yield self.at(config, ("optimizer", "type"), message, instead="Enable fp16, or use AdamW.")


class OneBitRemoved(DeepSpeedRule):
    """The optimizer is one that DeepSpeed has removed."""

    code = "HS246"
    name = "one-bit-removed"
    severity = "warning"
    reason = (
        "DeepSpeed 0.19.7 (September 2026) deleted OneBitAdam, ZeroOneAdam and OneBitLamb, and 0.19.8 their communication "
        "back ends. A configuration that names one now ends in 'AssertionError: OneBitAdam is not a supported DeepSpeed "
        "Optimizer'. Up to 0.19.6 it runs, at stage 0."
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
        """Named, and not refused for another reason already."""
        gone = deepspeed.since(0, 19, 7)
        if deepspeed.optimizer not in _ONE_BIT or deepspeed.stage or gone is False:
            return
        kind = config.value("optimizer", "type")
        known = config.settings.deepspeed
        message = (
            f"DeepSpeed {version_text(known)} no longer has {kind}."
            if gone and known
            else f"DeepSpeed removed {kind} in 0.19.7; it exists up to 0.19.6."
        )
        instead = "Use AdamW, or stay on DeepSpeed 0.19.6."
        yield self.at(config, ("optimizer", "type"), message, instead=instead, severity="error" if gone else None)


class OneBitBackend(DeepSpeedRule):
    """A 1-bit optimizer names a communication back end that DeepSpeed does not have."""

    code = "HS247"
    name = "one-bit-backend"
    severity = "error"
    reason = (
        "comm_backend_name takes nccl, mpi, hccl and compressed. With any other, gloo for one, no back end is made and the first "
        "use fails with an AttributeError on None."
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
        """A name off the list."""
        path = ("optimizer", "params", "comm_backend_name")
        value = config.value(*path)
        if (
            deepspeed.optimizer in _ONE_BIT
            and isinstance(value, str)
            and value not in {"nccl", "mpi", "hccl", "compressed"}
        ):
            message = (
                f"comm_backend_name {value!r} is none of nccl, mpi, hccl and compressed, and fails at the first step."
            )
            yield self.at(config, path, message, instead='Write "comm_backend_name": "nccl".')


class LambWithStaticScale(DeepSpeedRule):
    """LAMB is used with a static loss scale, which DeepSpeed refuses in every mode."""

    code = "HS248"
    name = "lamb-with-static-scale"
    severity = "error"
    reason = (
        "DeepSpeed asserts a dynamic loss scale for Lamb and OneBitLamb by looking at fp16.loss_scale alone, even in bf16 and fp32 "
        "where no scale is used."
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
        """A scale that is not 0."""
        if deepspeed.optimizer in {"lamb", "onebitlamb"} and deepspeed.is_dynamic is False:
            message = f"{config.value('optimizer', 'type')} is refused with a static fp16.loss_scale, in any mode."
            yield self.at(config, ("fp16", "loss_scale"), message, instead='Write "loss_scale": 0, or remove it.')


class AdamIsAdamW(DeepSpeedRule):
    """The type Adam gives AdamW."""

    code = "HS249"
    name = "adam-is-adamw"
    severity = "advice"
    reason = (
        'DeepSpeed\'s Adam decouples the weight decay unless adam_w_mode is false, so "Adam" with a weight decay trains as AdamW '
        "does, and not as torch.optim.Adam would."
    )
    bad = (
        '{"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "weight_decay": 0.01}}}',
    )
    good = (
        '{"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}}}',
    )
    references = (_OPTIMIZER_DOCS,)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Adam with a decay."""
        params = ("optimizer", "params")
        decay = config.number(*params, "weight_decay")
        unset = config.value(*params, "adam_w_mode") is None and config.value(*params, "torch_adam") is None
        found = config.entry("optimizer", "type")
        if deepspeed.optimizer == "adam" and decay and unset and found:
            message = f'"Adam" with weight_decay {decay:g} is AdamW in DeepSpeed: the decay is decoupled.'
            yield self.at(config, ("optimizer", "type"), message, instead='Write "AdamW", or "adam_w_mode": false.')


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
