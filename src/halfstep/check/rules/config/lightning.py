"""Rules for the precision of Lightning's Trainer and Fabric, in calls and in LightningCLI or Hydra files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from halfstep.check.config.config import Config
from halfstep.check.config.edits import replace_value
from halfstep.check.config.kind import LIGHTNING_ALONE
from halfstep.check.finding import Finding, Severity
from halfstep.check.regex import regex
from halfstep.check.rule import KindRule, Rule
from halfstep.precision.node import UNKNOWN

__all__ = ["RULES"]

_DOCS = "https://lightning.ai/docs/pytorch/stable/common/precision_basic.html"
_TRUE = "https://lightning.ai/docs/pytorch/stable/common/precision_intermediate.html"
_UPGRADE = "https://lightning.ai/docs/pytorch/stable/upgrade/migration_guide.html"
_VALID = (
    "16-true", "16-mixed", "bf16-true", "bf16-mixed", "32-true", "64-true", "64", "32", "16", "bf16",
    "transformer-engine", "transformer-engine-float16", "nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training", "mixed",
)  # fmt: skip
_CORRECTIONS = {
    "fp16": "16-mixed", "float16": "16-mixed", "half": "16-mixed", "16-bit": "16-mixed", "amp": "16-mixed",
    "16_mixed": "16-mixed", "fp16-mixed": "16-mixed", "bfloat16": "bf16-mixed", "bf16_mixed": "bf16-mixed",
    "bf-16": "bf16-mixed", "fp32": "32-true", "float32": "32-true", "float": "32-true", "32-bit": "32-true",
}  # fmt: skip
_ADAPTER = regex(r"^(?:lora_|adapter|quantize)")  # LitGPT's keys
_TRAINS = frozenset({"train", "max_epochs", "min_epochs", "max_steps", "gradient_clip_val", "accumulate_grad_batches"})
_TRAINS_TEXT = regex(rf"^\s*(?:{'|'.join(sorted(_TRAINS - {'train'}))})\s*:", re.MULTILINE)
_ADAPTER_ON = regex(
    r"^\s*(?:use_|enable_)?q?_?(?:lora|peft|adapter)(?:_enabled?)?\s*:\s*true\b", re.MULTILINE | re.IGNORECASE
)
_INFERS = regex(r"\.(?:test|predict|validate)\(")
_OLD_NAMES = {"16": "16-mixed", "bf16": "bf16-mixed"}


class LightningRule(KindRule):
    """A rule for the precision of a Trainer or Fabric."""

    kind = "lightning"

    def check(self, config: Config) -> Iterator[Finding]:
        """The findings in `config`, if it belongs to Lightning."""
        if config.kind == self.kind and not config.assembled:
            yield from self.inspect(config)
        elif config.kind == self.kind:
            yield from (replace(finding, fix=None) for finding in self.inspect(config))

    @staticmethod
    def precision(config: Config) -> str | None:
        """The precision as a string; None if it is missing or not a literal."""
        value = config.value("precision")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return None
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


class UnknownPrecision(LightningRule):
    """`precision` has a value that Lightning does not accept."""

    code = "HS281"
    name = "unknown-precision"
    severity = "error"
    reason = (
        "Lightning raises 'Precision ... is invalid' for any value other than 16-mixed, bf16-mixed, 16-true, "
        "bf16-true, 32-true, 64-true, transformer-engine, and the old 16, bf16, 32, 64. Names from torch and "
        "Accelerate are not accepted."
    )
    bad = (
        "import lightning as L\n\ntrainer = L.Trainer(precision='fp16')\n",
        "from pytorch_lightning import Trainer\n\ntrainer = Trainer(accelerator='gpu', precision='bfloat16')\n",
        "trainer:\n  accelerator: gpu\n  devices: 8\n  max_epochs: 9\n  precision: fp16\n",
    )
    good = (
        'import lightning as L\n\ntrainer = L.Trainer(precision="16-mixed")\n',
        "import lightning as L\n\ntrainer = L.Trainer(precision='16-mixed')\n",
        "trainer:\n  accelerator: gpu\n  devices: 8\n  max_epochs: 9\n  precision: bf16-mixed\n",
        "from transformers import Trainer\n\ntrainer = Trainer(model, precision='fp16')\n",
    )
    references = (_DOCS, "measured: lightning 2.6.6 raises ValueError")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report a literal that is not a valid precision."""
        value = self.precision(config)
        entry = config.entry("precision")
        if value is None or entry is None or value in _VALID or not value or not config.strict:
            return
        name = _CORRECTIONS.get(value.casefold())
        fix = replace_value(config, entry.value, name, f"Replace with {name}") if name else None
        message = f"`precision` is {value!r}; Lightning raises a ValueError for it."
        instead = f"Use {name!r}." if name else "Use '16-mixed' or 'bf16-mixed'."
        yield self.finding(config.where(entry), message, instead=instead, fix=fix)


class LightningFp16OnCpu(LightningRule):
    """fp16 mixed precision is requested on the CPU, where Lightning runs bf16 instead."""

    code = "HS282"
    name = "lightning-fp16-on-cpu"
    severity = "warning"
    reason = (
        "On the CPU Lightning replaces 16-mixed with bf16-mixed and warns once at startup: 8 significant bits instead "
        "of 11, no loss scale, and slower than fp32 on CPUs without bf16 instructions."
    )
    bad = (
        "import lightning as L\n\ntrainer = L.Trainer(accelerator='cpu', precision='16-mixed')\n",
        "import pytorch_lightning as pl\n\ntrainer = pl.Trainer(accelerator='cpu', precision=16)\n",
    )
    good = ("import lightning as L\n\ntrainer = L.Trainer(accelerator='cpu', precision='32-true')\n",)
    references = (_DOCS, "measured: source code of lightning 2.6.6, accelerator_connector.py")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report fp16 with an explicit CPU accelerator."""
        entry = config.entry("precision")
        if entry and self.precision(config) in {"16", "16-mixed"} and config.value("accelerator") == "cpu":
            message = "fp16 is requested on the CPU; Lightning runs bf16-mixed instead."
            yield self.finding(config.where(entry), message, instead="Use 'bf16-mixed' or '32-true'.")


class PureHalf(LightningRule):
    """The weights are trained in 16 bits without an fp32 master copy."""

    code = "HS283"
    name = "sixteen-bit-weights"
    severity = "warning"
    reason = (
        "16-true and bf16-true cast the weights and keep no fp32 copy. An update below half a ULP of a weight has no "
        "effect: below 1/4096 of the weight in fp16 and 1/512 in bf16, so at a learning rate of 1e-4 most weights do "
        "not change. 16-true also has no loss scale, so gradients below 6e-8 become 0. These modes are for inference, "
        "or for models that do not fit otherwise."
    )
    bad = (
        "import lightning as L\n\ntrainer = L.Trainer(precision='16-true')\ntrainer.fit(model)\n",
        "from lightning.fabric import Fabric\n\nfabric = Fabric(precision='16-true')\nfabric.backward(loss)\n",
        "trainer:\n  accelerator: gpu\n  devices: 8\n  max_epochs: 9\n  precision: bf16-true\n",
        "checkpoint_dir: x\nprecision: bf16-true\ntrain:\n  global_batch_size: 16\n  micro_batch_size: 1\n",
        "from lightning import Fabric\n\ndef main(precision='bf16-true'):\n    fabric = Fabric(precision=precision)\n"
        "    fabric.backward(loss)\n",
        "import lightning as L\nfrom lightning.pytorch.plugins import HalfPrecision\n\n"
        "trainer = L.Trainer(plugins=HalfPrecision('bf16-true'))\ntrainer.fit(model)\n",
        "import lightning as L\n\ndef build():\n    return L.Trainer(precision='bf16-true', max_epochs=9)\n",
        "trainer:\n  precision: bf16-true\n  max_steps: 1000\n",
        "trainer:\n  max_epochs: 9\nlightning:\n  accelerator: gpu\n  devices: 8\n  precision: bf16-true\n",
    )
    good = (
        "import lightning as L\n\ntrainer = L.Trainer(precision='16-mixed')\ntrainer.fit(model)\n",
        "import lightning as L\n\ntrainer = L.Trainer(precision='bf16-true', strategy='deepspeed_stage_2')\ntrainer.fit(model)\n",
        "import lightning as L\n\ntrainer = L.Trainer(precision='16-true')\ntrainer.predict(model)\n",
        "import lightning as L\n\ntrainer = L.Trainer(precision='16-true', max_epochs=1)\ntrainer.test(model)\n",
        "import lightning as L\n\ntrainer = L.Trainer(precision='16-true', max_epochs=0)\ntrainer.fit(model)\n",
        "use_lora: true\ntrainer:\n  max_epochs: 9\nlightning:\n  accelerator: gpu\n  devices: 8\n  precision: bf16-true\n",
        "checkpoint_dir: x\nprecision: bf16-true\nlora_r: 8\ntrain:\n  global_batch_size: 16\n  micro_batch_size: 1\n",
    )
    references = (_TRUE, "https://arxiv.org/abs/1710.03740")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report both modes where the script or the file trains; advice where that is not certain."""
        value = self.precision(config)
        entry = config.entry("precision")
        limits = [config.value(key) for key in ("max_epochs", "max_steps")]
        if entry is None or value not in {"16-true", "bf16-true"} or 0 in limits:
            return  # `fit` with such a limit takes no step
        # In a file the Trainer's arguments may be in several blocks.
        trains = bool(set(config.root.keys()) & _TRAINS) or bool(
            not config.script and _TRAINS_TEXT.search(config.source.text)
        )
        fits = bool(config.script & {".fit()", ".backward()"})
        if config.root.call and not fits and (not trains or _INFERS.search(config.source.text)):
            return
        strategy = config.entry("strategy")
        text = config.source.text[strategy.value.span.start : strategy.value.span.end].casefold() if strategy else ""
        adapter = any(_ADAPTER.search(e.key) and config.value(e.key) is not None for e in config.root.entries)
        if "deepspeed" in text or adapter or (not config.script and _ADAPTER_ON.search(config.source.text)):
            return  # DeepSpeed keeps fp32 master weights, and an adapter's own weights start near 0
        unknown = config.value("strategy") is UNKNOWN and not re.search("auto|ddp|fsdp|single", text)
        mild = (
            unknown
            or not (trains or config.root.call)
            or (config.root.call and "lora" in config.source.text.casefold())
        )
        severity: Severity | None = "advice" if mild else None
        message = f"precision {value!r} trains 16-bit weights without an fp32 master copy; small updates are lost."
        instead = f"Use {value.split('-')[0] + '-mixed'!r}."
        yield self.finding(config.where(entry), message, instead=instead, severity=severity)


class RemovedTrainerArgument(LightningRule):
    """The Trainer is called with an Apex or native AMP argument that Lightning 2 removed."""

    code = "HS284"
    name = "removed-trainer-argument"
    severity = "warning"
    reason = (
        "Lightning 2.0 removed `amp_backend` and `amp_level` together with Apex support; passing either raises a "
        "TypeError. Lightning 1.x reads `amp_level` only with the apex backend, and Apex removed its amp module in "
        "May 2025."
    )
    bad = (
        "from pytorch_lightning import Trainer\n\ntrainer = Trainer(precision=16, amp_backend='apex', amp_level='O2')\n",
        "import pytorch_lightning as pl\n\ntrainer = pl.Trainer(precision=16, amp_backend='native')\n",
        "import pytorch_lightning as pl\n\ndef run(options):\n    return pl.Trainer(**options)\n\n"
        "options = {'gpus': 1, 'precision': 32, 'max_epochs': 9, 'gradient_clip_val': 1.0, 'amp_level': 'O2', 'log_every_n_steps': 9}\nrun(options)\n",
    )
    good = ("from pytorch_lightning import Trainer\n\ntrainer = Trainer(precision='16-mixed')\n",)
    references = (_UPGRADE, "measured: lightning 2.6.6 has neither argument")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report the first of the two that is set."""
        for key in ("amp_backend", "amp_level"):
            entry = config.entry(key)
            if entry is not None and config.value(key) is not None:
                message = f"Lightning 2.0 removed `{key}`; passing it raises a TypeError."
                yield self.finding(config.where(entry), message, instead="Remove it; precision='16-mixed' is enough.")
                return


_FIRST_VERSION = (
    "gpus", "tpu_cores", "num_processes", "ipus", "amp_backend", "amp_level", "resume_from_checkpoint", "progress_bar_refresh_rate",
    "weights_summary", "checkpoint_callback", "distributed_backend", "flush_logs_every_n_steps", "terminate_on_nan",
    "auto_scale_batch_size", "auto_lr_find", "replace_sampler_ddp", "track_grad_norm", "multiple_trainloader_mode",
    "reload_dataloaders_every_epoch", "prepare_data_per_node", "process_position", "auto_select_gpus",
)  # fmt: skip


# Methods of version 1 that version 2 rejects or does not have.
_FIRST_API = regex(r"\b(?:add|from)_argparse_args\b|def (?:training|validation|test)_epoch_end\b|\bDDPPlugin\b")
_NEMO = regex(r"exp_manager|megatron_amp|nemo", re.IGNORECASE)  # has its own names


class OldPrecisionName(LightningRule):
    """`precision` has a name that Lightning 2 supports for old code only."""

    code = "HS285"
    name = "old-precision-name"
    severity = "advice"
    reason = (
        "Lightning 2 reads 16 and bf16 as 16-mixed and bf16-mixed and warns at every start that they are discouraged, "
        "because they do not specify whether the weights are 16-bit. Version 1 has only the old names, so a script whose "
        "other arguments are of version 1 needs the new ones when it is upgraded."
    )
    bad = (
        "import lightning as L\n\ntrainer = L.Trainer(precision=16)\n",
        "_target_: lightning.Trainer\naccelerator: gpu\ndevices: 1\nmax_epochs: 10\nprecision: 16\n",
        "import pytorch_lightning as pl\n\ntrainer = pl.Trainer(accelerator='gpu', precision=16)\n",
        "import lightning as L\n\nparser.add_argument('--precision', type=int, default=16)\nargs = parser.parse_args()\n"
        "trainer = L.Trainer(precision=args.precision)\n",
        "import lightning as L\n\namp = True\ntrainer = L.Trainer(precision=16 if amp else 32)\n",
        "import lightning as L\n\nconfig = {'trainer': {'precision': 16}}\ntrainer = L.Trainer(**config['trainer'])\n",
        "import lightning as L\n\nclass Trainer(L.Trainer):\n    def __init__(self):\n        super().__init__(precision=16)\n",
        "from functools import partial\nfrom lightning import Trainer\n\nmake = partial(Trainer, precision=16)\n",
        "from lightning.pytorch.cli import LightningCLI\n\ncli = LightningCLI(Net, trainer_defaults={'precision': 16})\n",
        "trainer:\n  precision: 16\n  max_epochs: 9\n",
        "import pytorch_lightning as pl\n\ntrainer = pl.Trainer(gpus=1, precision=16)\n",  # of version 1
        "import pytorch_lightning as pl\n\npl.Trainer.add_argparse_args(parser)\ntrainer = pl.Trainer(precision=16)\n",
        "from setup import *\n\ntrainer = pl.Trainer(precision=16, max_epochs=9)\ntrainer.fit(model)\n",
    )
    good = (
        'import lightning as L\n\ntrainer = L.Trainer(precision="16-mixed")\n',
        "import pytorch_lightning as pl\n\ntrainer = pl.Trainer(gpus=1, precision=32)\n",
        "import pipelines as pl\n\ntrainer = pl.Trainer(precision=16, max_epochs=9)\n",
        "pl = load_project()\ntrainer = pl.Trainer(precision=16, max_epochs=9)\n",
        "trainer:\n  precision: bf16\n  max_epochs: 9\n",  # perhaps another trainer's
        "trainer:\n  accelerator: gpu\n  devices: 8\n  max_epochs: 10\n  precision: bf16\nexp_manager:\n  name: gpt\n",
    )
    references = (_UPGRADE,)

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report old names; where another argument shows that Lightning is version 1, for its upgrade."""
        value = self.precision(config)
        entry = config.entry("precision")
        # A part of a file may configure another trainer, for which "bf16" is a common name and 16 is not.
        is_own = len(LIGHTNING_ALONE & set(config.root.keys())) > 1
        unclear = not config.strict and value != "16" and not is_own
        nemo = not config.script and _NEMO.search(config.source.text)
        if entry is None or value not in _OLD_NAMES or unclear or nemo:
            return
        new = _OLD_NAMES[value]
        target = config.value("_target_")  # Hydra's name of the class
        is_new = "lightning" in config.script or (isinstance(target, str) and target.startswith("lightning."))
        # pytorch_lightning is both versions; an argument that only version 1 has decides it.
        is_old = any(config.entry(key) is not None for key in _FIRST_VERSION) or _FIRST_API.search(config.source.text)
        message = f"precision {value} is the name of Lightning 1 for {new!r}."
        if is_old and not is_new:
            if value == "bf16" and not config.script and not is_own:
                return  # other trainers have these keys too, and bf16 is their name
            # Version 1 raises an error for the new name.
            yield self.finding(
                config.where(entry), message, instead=f"Use {new!r} when the script moves to Lightning 2."
            )
            return
        fix = replace_value(config, entry.value, new, f"Replace with {new}", safe=is_new)
        yield self.finding(config.where(entry), message, instead=f"Use {new!r}.", fix=fix)


RULES: tuple[type[Rule], ...] = (
    UnknownPrecision,
    LightningFp16OnCpu,
    PureHalf,
    RemovedTrainerArgument,
    OldPrecisionName,
)
