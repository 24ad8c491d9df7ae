"""HS4xx: known numerical defects of the installed or pinned libraries that a script or configuration can meet.

One rule per group of libraries. The defects themselves are in `halfstep.hardware.advisory_table`; these rules compare
their version ranges and GPUs with the versions that are known (`halfstep.check.pins`), and report one only if the text
uses the affected feature (`halfstep.check.features`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from halfstep.check.finding import Finding, Place
from halfstep.check.pins import Pin, pins_for
from halfstep.check.rule import ConfigRule, Rule, ScriptRule
from halfstep.check.script.objects.features import features_of_script
from halfstep.check.script.script import Script
from halfstep.check.settings import Settings
from halfstep.hardware.advisories import Environment, advisories_for
from halfstep.hardware.advisory import Advisory
from halfstep.hardware.advisory_table import ADVISORIES
from halfstep.hardware.devices import ARCHITECTURES, find_devices

if TYPE_CHECKING:
    from halfstep.check.config.config import Config

__all__ = ["RULES"]


class AdvisoryRule(ScriptRule, ConfigRule):
    """A rule that reports the advisories of some packages, in scripts and in configurations."""

    packages: ClassVar[tuple[str, ...]]

    def check(self, facts: Script | Config) -> Iterator[Finding]:
        """The advisories that the versions, the GPU and the text meet."""
        settings, text = facts.settings, facts.source.text
        known = _known(_folder(facts.source.path), settings)
        if not any(self._is_mine(advisory) and advisory.may_be_met_by(text) for advisory in known.advisories):
            return
        places = _places(facts)
        for advisory in advisories_for(known.environment, places):
            if self._is_mine(advisory):
                yield self._report(advisory, places[advisory.features[0]], settings, known.pins)

    def _is_mine(self, advisory: Advisory) -> bool:
        return advisory.package in self.packages and not advisory.rule

    def _report(self, advisory: Advisory, where: Place, settings: Settings, pins: Mapping[str, Pin]) -> Finding:
        gpu = f" on {settings.gpu.name}" if settings.gpu and (advisory.archs or advisory.kinds) else ""
        message = f"{pins[advisory.package]}{gpu} has a known defect ({advisory.id}). {advisory.consequence}"
        instead = f"{advisory.remedy} See {advisory.threads[0]}"
        return self.finding(where, message, instead=instead, severity=advisory.severity)


def _places(facts: Script | Config) -> dict[str, Place]:
    """The features of a script or a configuration, each with the place that shows it."""
    if isinstance(facts, Script):
        tree = facts.tree if facts.tree.body else _parse(facts.source.text)
        return {name: facts.where(node) for name, node in features_of_script(tree).items()}
    if facts.kind == "joint":
        return {}  # the configuration is judged by itself
    from halfstep.check.config.features import features_of_config  # scripts without configurations need none of it

    return {name: facts.where(entry) for name, entry in features_of_config(facts).items()}


@lru_cache(maxsize=1)
def _parse(text: str) -> ast.Module:
    """The tree of a script that mentions nothing else that rules look for; empty if it does not parse."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):  # newer syntax than this Python's
        return ast.Module([], [])


@dataclass(frozen=True)
class _Known:
    """The versions that the files of one folder run with, and the defects of these versions."""

    pins: Mapping[str, Pin]
    environment: Environment
    advisories: tuple[Advisory, ...]


@lru_cache(maxsize=1)  # each rule looks at each file
def _folder(path: str) -> str:
    return str(Path(path).absolute().parent)


@lru_cache(maxsize=64)
def _known(folder: str, settings: Settings) -> _Known:
    pins = pins_for(folder, settings.pins, look_up=settings.look_up)
    versions = {name: pin.version for name, pin in pins.items()}
    arch = ARCHITECTURES.get(settings.gpu.arch) if settings.gpu else None
    environment = Environment(versions, settings.gpu.arch if settings.gpu else "", arch.kind if arch else "")
    return _Known(pins, environment, advisories_for(environment))


def _threads(*packages: str) -> tuple[str, ...]:
    return tuple(a.threads[0] for a in ADVISORIES if a.package in packages)


class TorchDefect(AdvisoryRule):
    """This version of torch or cuDNN has a known numerical defect that the script can meet."""

    code = "HS401"
    name = "torch-defect"
    severity = "warning"
    reason = (
        "Some releases of torch and cuDNN compute wrong numbers in certain kernels, mostly without an error: NaN gradients in attention "
        "with a mask, parts of a compiled gradient that are never written, weights without a gradient. The message names the "
        "version and where it comes from; docs/advisories.md lists every known defect with its versions and GPUs. Those that depend "
        "on the GPU are reported only with `--gpu`."
    )
    packages = ("torch", "cudnn")
    bad = (
        "import torch\nimport torch.nn.functional as F\n\n\ndef attend(q, k, v, mask):\n"
        "    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)\n",
    )
    good = (
        "import torch\nimport torch.nn.functional as F\n\ntorch.backends.cuda.enable_cudnn_sdp(False)\n\n\n"
        "def attend(q, k, v, mask):\n    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)\n",
        "import torch.nn.functional as F\n\n\ndef attend(q, k, v):\n"
        "    return F.scaled_dot_product_attention(q, k, v, is_causal=True)\n",
    )
    references = _threads("torch", "cudnn")
    settings = Settings(gpu=find_devices("h200")[0], gpu_origin="--gpu h200", pins=(Pin("torch", "2.11.0", "--with"),))


class DeepSpeedDefect(AdvisoryRule):
    """This version of DeepSpeed has a known numerical defect with these settings."""

    code = "HS402"
    name = "deepspeed-defect"
    severity = "warning"
    reason = (
        "Some releases of DeepSpeed reduce or scale gradients incorrectly for certain ZeRO stages and formats, without an error. The "
        "message names the version and where it comes from; docs/advisories.md lists every known defect with its versions."
    )
    packages = ("deepspeed",)
    bad = (
        "config = {\n    'train_batch_size': 8,\n    'bf16': {'enabled': True},\n    'gradient_clipping': 1.0,\n"
        "    'zero_optimization': {'stage': 2},\n}\n",
    )
    good = (
        "config = {\n    'train_batch_size': 8,\n    'bf16': {'enabled': True},\n    'gradient_clipping': 1.0,\n"
        "    'zero_optimization': {'stage': 1},\n}\n",
    )
    references = _threads("deepspeed")
    settings = Settings(deepspeed=(0, 18, 2), pins=(Pin("deepspeed", "0.18.2", "--with"),))


class HuggingFaceDefect(AdvisoryRule):
    """This version of Accelerate, Transformers or Diffusers has a known numerical defect that the script can meet."""

    code = "HS403"
    name = "hugging-face-defect"
    severity = "warning"
    reason = (
        "Some releases of Accelerate, Transformers and Diffusers train with other numbers than the settings say, without an error: gradients "
        "that grow with the accumulation steps, a loss scale that a restart changes. The message names the version and where it "
        "comes from; docs/advisories.md lists every known defect with its versions."
    )
    packages = ("accelerate", "transformers", "diffusers")
    bad = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', bf16=True, gradient_accumulation_steps=8)\n",
        "from accelerate import Accelerator, FullyShardedDataParallelPlugin\n\n"
        "plugin = FullyShardedDataParallelPlugin(fsdp_version=2)\n"
        "accelerator = Accelerator(mixed_precision='fp16', fsdp_plugin=plugin)\n",
    )
    good = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', bf16=True, gradient_accumulation_steps=1)\n",
        "from accelerate import Accelerator, FullyShardedDataParallelPlugin\n\n"
        "plugin = FullyShardedDataParallelPlugin(fsdp_version=2)\n"
        "accelerator = Accelerator(mixed_precision='bf16', fsdp_plugin=plugin)\n",
    )
    references = _threads("accelerate", "transformers", "diffusers")
    settings = Settings(pins=(Pin("transformers", "4.47.1", "--with"), Pin("accelerate", "1.15.0", "--with")))


class KernelLibraryDefect(AdvisoryRule):
    """This version of bitsandbytes, Liger or flash-attn has a known numerical defect that the script can meet."""

    code = "HS404"
    name = "kernel-library-defect"
    severity = "warning"
    reason = (
        "Some releases of libraries with their own kernels compute wrong numbers, mostly without an error: an 8-bit Adam whose losses become "
        "NaN, a fused loss with wrong gradients per token. The message names the version and where it comes from; "
        "docs/advisories.md lists every known defect with its versions."
    )
    packages = ("bitsandbytes", "liger-kernel", "flash-attn-4")
    bad = ("import bitsandbytes as bnb\n\noptimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-4)\n",)
    good = ("import bitsandbytes as bnb\n\noptimizer = bnb.optim.AdamW32bit(model.parameters(), lr=1e-4)\n",)
    references = _threads("bitsandbytes", "liger-kernel", "flash-attn-4")
    settings = Settings(pins=(Pin("bitsandbytes", "0.38.0", "--with"),))


RULES: tuple[type[Rule], ...] = (TorchDefect, DeepSpeedDefect, HuggingFaceDefect, KernelLibraryDefect)
