"""Lightning's `Trainer(precision=...)` and `Fabric(precision=...)`, as a call or in a LightningCLI or Hydra file."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.edits import replace_value
from halfstep.check.finding import Finding, Severity
from halfstep.check.rule import ConfigRule, Rule

__all__ = ["RULES"]

_DOCS = "https://lightning.ai/docs/pytorch/stable/common/precision_basic.html"
_TRUE = "https://lightning.ai/docs/pytorch/stable/common/precision_intermediate.html"
_UPGRADE = "https://lightning.ai/docs/pytorch/stable/upgrade/migration_guide.html"
_VALID = (
    "16-true", "16-mixed", "bf16-true", "bf16-mixed", "32-true", "64-true", "64", "32", "16", "bf16",
    "transformer-engine", "transformer-engine-float16", "nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training", "mixed",
)  # fmt: skip
_MEANT = {
    "fp16": "16-mixed", "float16": "16-mixed", "half": "16-mixed", "16-bit": "16-mixed", "amp": "16-mixed",
    "16_mixed": "16-mixed", "fp16-mixed": "16-mixed", "bfloat16": "bf16-mixed", "bf16_mixed": "bf16-mixed",
    "bf-16": "bf16-mixed", "fp32": "32-true", "float32": "32-true", "float": "32-true", "32-bit": "32-true",
}  # fmt: skip
_OLD = {"16": "16-mixed", "bf16": "bf16-mixed"}


class LightningRule(ConfigRule):
    """A rule over a Trainer's or Fabric's precision."""

    def check(self, config: Config) -> Iterator[Finding]:
        """The findings in `config`, if it is Lightning's and says a precision or an accelerator."""
        if config.kind == "lightning":
            yield from self.inspect(config)

    def inspect(self, config: Config) -> Iterator[Finding]:
        """The findings in one configuration."""
        raise NotImplementedError

    @staticmethod
    def precision(config: Config) -> str | None:
        """The precision as a text; None where there is none that can be read."""
        value = config.value("precision")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return None
        return str(int(value)) if isinstance(value, float) and value == int(value) else str(value)


class UnknownPrecision(LightningRule):
    """precision has a value that Lightning does not know."""

    code = "HS281"
    name = "unknown-precision"
    severity = "error"
    reason = (
        "Lightning raises 'Precision ... is invalid' for anything off its list: 16-mixed, bf16-mixed, 16-true, bf16-true, 32-true, "
        "64-true, transformer-engine, and the old 16, bf16, 32, 64. torch's and Accelerate's names are not among them."
    )
    bad = (
        "import lightning as L\n\ntrainer = L.Trainer(precision='fp16')\n",
        "from pytorch_lightning import Trainer\n\ntrainer = Trainer(accelerator='gpu', precision='bfloat16')\n",
        "trainer:\n  accelerator: gpu\n  devices: 8\n  max_epochs: 9\n  precision: fp16\n",
    )
    good = (
        "import lightning as L\n\ntrainer = L.Trainer(precision='16-mixed')\n",
        "trainer:\n  accelerator: gpu\n  devices: 8\n  max_epochs: 9\n  precision: bf16-mixed\n",
        "from transformers import Trainer\n\ntrainer = Trainer(model, precision='fp16')\n",
    )
    references = (_DOCS, "measured: lightning 2.6.6 raises ValueError")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """A literal off the list."""
        value = self.precision(config)
        found = config.entry("precision")
        if value is None or found is None or value in _VALID or not value:
            return
        meant = _MEANT.get(value.casefold())
        fix = replace_value(config, found.value, meant, f"Write {meant}") if meant else None
        message = f"precision is {value!r}, which Lightning does not know."
        yield self.finding(
            config.where(found), message, instead=f"Write {meant or '16-mixed or bf16-mixed'!r}.", fix=fix
        )


class LightningFp16OnCpu(LightningRule):
    """fp16 mixed precision is asked for on the CPU, and Lightning runs bf16 instead."""

    code = "HS282"
    name = "lightning-fp16-on-cpu"
    severity = "warning"
    reason = (
        "On the CPU Lightning replaces 16-mixed by bf16-mixed with one warning at the start: 8 significant bits instead of 11, no "
        "loss scale, and on CPUs without bf16 arithmetic slower than fp32."
    )
    bad = (
        "import lightning as L\n\ntrainer = L.Trainer(accelerator='cpu', precision='16-mixed')\n",
        "import pytorch_lightning as pl\n\ntrainer = pl.Trainer(accelerator='cpu', precision=16)\n",
    )
    good = ("import lightning as L\n\ntrainer = L.Trainer(accelerator='cpu', precision='32-true')\n",)
    references = (_DOCS, "measured: read in lightning 2.6.6, accelerator_connector.py")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """fp16 with the CPU asked for."""
        found = config.entry("precision")
        if found and self.precision(config) in {"16", "16-mixed"} and config.value("accelerator") == "cpu":
            message = "fp16 on the CPU: Lightning runs bf16-mixed instead."
            yield self.finding(config.where(found), message, instead="Write 'bf16-mixed' or '32-true'.")


class PureHalf(LightningRule):
    """The weights themselves are trained in 16 bits, without a master copy."""

    code = "HS283"
    name = "sixteen-bit-weights"
    severity = "warning"
    reason = (
        "16-true and bf16-true cast the weights and keep no fp32 copy. An update below half a unit in a weight's last place "
        "changes nothing: below 1/4096 of the weight in fp16, 1/512 in bf16, so a learning rate of 1e-4 moves few of them. 16-true "
        "also has no loss scale, and gradients below 6e-8 are 0. They are meant for inference, or for a model that must fit."
    )
    bad = (
        "import lightning as L\n\ntrainer = L.Trainer(precision='16-true')\ntrainer.fit(model)\n",
        "from lightning.fabric import Fabric\n\nfabric = Fabric(precision='16-true')\nfabric.backward(loss)\n",
    )
    good = (
        "import lightning as L\n\ntrainer = L.Trainer(precision='16-mixed')\ntrainer.fit(model)\n",
        "import lightning as L\n\ntrainer = L.Trainer(precision='16-true')\ntrainer.predict(model)\n",
    )
    references = (_TRUE, "https://arxiv.org/abs/1710.03740")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """16-true in a script that trains; bf16-true there is worth a word."""
        value = self.precision(config)
        found = config.entry("precision")
        if found is None or value not in {"16-true", "bf16-true"}:
            return
        if config.root.call and not config.script & {".fit()", ".backward()"}:
            return
        sure = value == "16-true" and config.root.call
        severity: Severity | None = None if sure else "advice"
        message = f"precision {value} trains 16-bit weights with no fp32 copy, so small updates vanish."
        instead = f"Write {value.split('-')[0] + '-mixed'!r}."
        yield self.finding(config.where(found), message, instead=instead, severity=severity)


class RemovedTrainerArgument(LightningRule):
    """The Trainer is given an argument of Apex or native AMP that Lightning 2 removed."""

    code = "HS284"
    name = "removed-trainer-argument"
    severity = "warning"
    reason = (
        "Lightning 2.0 removed amp_backend and amp_level with its Apex support; a Trainer called with either raises a TypeError. In "
        "1.x amp_level is read only with the apex backend, whose amp module was deleted in May 2025."
    )
    bad = (
        "from pytorch_lightning import Trainer\n\ntrainer = Trainer(precision=16, amp_backend='apex', amp_level='O2')\n",
        "import pytorch_lightning as pl\n\ntrainer = pl.Trainer(precision=16, amp_backend='native')\n",
    )
    good = ("from pytorch_lightning import Trainer\n\ntrainer = Trainer(precision='16-mixed')\n",)
    references = (_UPGRADE, "measured: lightning 2.6.6 has neither argument")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """The first of the two that is given."""
        for key in ("amp_backend", "amp_level"):
            found = config.entry(key)
            if found is not None and config.value(key) is not None:
                message = f"{key} was removed in Lightning 2.0, where it raises a TypeError."
                yield self.finding(config.where(found), message, instead="Remove it; precision='16-mixed' is all.")
                return


class OldPrecisionName(LightningRule):
    """precision has a name that Lightning 2 keeps for old code only."""

    code = "HS285"
    name = "old-precision-name"
    severity = "advice"
    reason = (
        "Lightning 2 reads 16 and bf16 as 16-mixed and bf16-mixed and says at every start that their use is discouraged, since "
        "they do not say whether the weights are 16 bits wide."
    )
    bad = ("import lightning as L\n\ntrainer = L.Trainer(precision=16)\n",)
    good = ("import lightning as L\n\ntrainer = L.Trainer(precision='16-mixed')\n",)
    references = (_UPGRADE,)

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Old names where Lightning is certainly version 2: the package called lightning."""
        value = self.precision(config)
        found = config.entry("precision")
        if found and value in _OLD and "lightning" in config.script and config.value("accelerator") != "cpu":
            new = _OLD[value]
            fix = replace_value(config, found.value, new, f"Write {new}")
            message = f"precision {value} is Lightning's old name of {new!r}."
            yield self.finding(config.where(found), message, instead=f"Write {new!r}.", fix=fix)


RULES: tuple[type[Rule], ...] = (
    UnknownPrecision,
    LightningFp16OnCpu,
    PureHalf,
    RemovedTrainerArgument,
    OldPrecisionName,
)
