"""What a DeepSpeed configuration decides: the mode, the ZeRO stage, the loss scale, as rules need it.

Every question has three answers: yes, no, and None where the text leaves it to a variable, to "auto" or to another
program. A rule reports only on yes and no. Switches are interpreted as DeepSpeed's own readers do, so that
`"enabled": "true"`, `"stage": "2"` and a boolean `zero_optimization` mean the same here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from halfstep.check.config.config import Config
from halfstep.check.config.objects import ObjectConfig
from halfstep.check.finding import Finding
from halfstep.check.rule import ConfigRule
from halfstep.precision.deepspeed_keys import DTYPES
from halfstep.precision.formats import canonical_name
from halfstep.precision.node import UNKNOWN, Block, Items, Scalar, Span, walk

__all__ = ["DeepSpeed", "DeepSpeedRule", "uses_another_engine", "version_text"]

_OTHER_ENGINES = frozenset({"NO", "MULTI_GPU", "FSDP", "MULTI_CPU", "MEGATRON_LM"})  # `distributed_type` of Accelerate


def uses_another_engine(config: Config) -> bool:
    """Whether a file of Accelerate names an engine with which it ignores `deepspeed_config` (HS266)."""
    engine = config.value("distributed_type") if config.kind == "accelerate" else None
    return isinstance(engine, str) and engine.upper() in _OTHER_ENGINES


def version_text(version: tuple[int, ...]) -> str:
    """A version as people write it."""
    return ".".join(map(str, version))


@dataclass(frozen=True, eq=False)
class DeepSpeed:
    """The decided part of one configuration."""

    config: Config

    @cached_property
    def stage(self) -> int | None:
        """The ZeRO stage; None if the text does not decide it."""
        entry = self.config.entry("zero_optimization")
        if entry is None:
            return None if self.config.root.open else 0
        if isinstance(entry.value, Scalar):
            value = entry.value.value
            return None if value is UNKNOWN or isinstance(value, str) else int(bool(value))
        if isinstance(entry.value, Items):
            return None
        value = self.config.value("zero_optimization", "stage")
        if value is None:
            return 0
        if isinstance(value, str) and value.strip().isdigit():
            return int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @cached_property
    def bf16_name(self) -> str:
        """The key of the bf16 block: "bf16", or its old name "bfloat16"."""
        return "bf16" if self.config.entry("bf16") or not self.config.entry("bfloat16") else "bfloat16"

    def enabled(self, name: str) -> bool | None:
        """Whether a mode's block is on."""
        entry = self.config.entry(name)
        if entry is None:
            return None if self.config.root.open else False
        if not isinstance(entry.value, Block):
            return False if isinstance(entry.value, Scalar) and entry.value.value is None else None
        value = self.config.value(name, "enabled")
        if value is None:
            return False
        if isinstance(value, str):
            return {"true": True, "false": False}.get(value.casefold())
        return value if isinstance(value, bool) else None

    @cached_property
    def fp16(self) -> bool | None:
        """Whether the fp16 mode is on."""
        return self.enabled("fp16")

    @cached_property
    def is_fp16_auto(self) -> bool:
        """Whether Hugging Face's arguments decide the fp16 mode."""
        entry = self.config.entry("fp16", "enabled")
        return entry is not None and isinstance(entry.value, Scalar) and entry.value.value == "auto"

    @cached_property
    def bf16(self) -> bool | None:
        """Whether the bf16 mode is on."""
        return self.enabled(self.bf16_name)

    @cached_property
    def autocast(self) -> bool | None:
        """Whether torch_autocast is on."""
        return self.enabled("torch_autocast")

    @cached_property
    def amp(self) -> bool | None:
        """Whether Apex AMP is on."""
        return self.enabled("amp")

    @cached_property
    def is_neox(self) -> bool:
        """Whether the file is GPT-NeoX's, which merges several files and runs its own fork of DeepSpeed."""
        keys = {entry.key.replace("-", "_") for entry in self.config.root.entries}
        return bool(keys & {"pipe_parallel_size", "model_parallel_size"}) and "num_layers" in keys

    @cached_property
    def weights(self) -> str | None:
        """The format of the model's weights under this configuration."""
        if self.fp16:
            return "fp16"
        if self.bf16:
            return "bf16"
        return "fp32" if self.fp16 is False and self.bf16 is False else None

    @cached_property
    def is_dynamic(self) -> bool | None:
        """Whether the fp16 loss scale is dynamic."""
        value = self.config.value("fp16", "loss_scale")
        if value is None:
            return True
        return value == 0 if isinstance(value, int | float) and not isinstance(value, bool) else None

    def dtype(self, *path: str) -> str | None:
        """The format named at a path, in Halfstep's spelling; None if there is none or it is unknown."""
        value = self.config.value(*path)
        return canonical_name(value) if isinstance(value, str) and canonical_name(value) in DTYPES else None

    @cached_property
    def optimizer(self) -> str | None:
        """The optimizer's type, in lower case."""
        value = self.config.value("optimizer", "type")
        return value.casefold() if isinstance(value, str) else None

    @cached_property
    def has_auto(self) -> bool:
        """Whether Hugging Face fills in values: at least one is "auto"."""
        return any(isinstance(node, Scalar) and node.value == "auto" for node in walk(self.config.root))

    @cached_property
    def offloads_optimizer(self) -> bool | None:
        """Whether the optimizer's states are offloaded."""
        block = self.config.block("zero_optimization")
        if block is None:
            return False
        old = self.config.value("zero_optimization", "cpu_offload")
        if old is True or old is UNKNOWN:
            return True if old is True else None
        if self.config.entry("zero_optimization", "offload_optimizer") is None:
            return None if block.open else False
        value = self.config.value("zero_optimization", "offload_optimizer", "device")
        if value is UNKNOWN:
            return None
        return value in {"cpu", "nvme"}

    def since(self, *version: int) -> bool | None:
        """Whether the DeepSpeed version is this release or later; None if the version is not known."""
        known = self.config.settings.deepspeed
        return None if known is None else known >= version


class DeepSpeedRule(ConfigRule):
    """A rule over DeepSpeed configurations."""

    objects: ClassVar[bool] = False  # also applies to an optimizer object that a script passes to DeepSpeed

    def check(self, config: Config) -> Iterator[Finding]:
        """The findings in `config`, if it is DeepSpeed's."""
        if config.kind == "deepspeed" and not config.assembled:
            yield from self.inspect(DeepSpeed(config), config)
        elif config.kind == "deepspeed":
            yield from (replace(finding, fix=None) for finding in self.inspect(DeepSpeed(config), config))
        elif self.objects and isinstance(config, ObjectConfig):
            # The configuration may be another file than the object's, so no edit of it is offered.
            yield from (replace(finding, fix=None) for finding in self.inspect(DeepSpeed(config), config))

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """The findings in one DeepSpeed configuration."""
        raise NotImplementedError

    @classmethod
    def at(cls, config: Config, path: tuple[str, ...], message: str, **more: Any) -> Finding:
        """A finding at the entry of a path, or at the deepest block on it that exists."""
        while path:
            entry = config.entry(*path)
            if entry is not None:
                part = entry if isinstance(entry.value, Scalar) else entry.key_span
                return cls.finding(config.where(part), message, **more)
            path = path[:-1]
        start = config.root.span.start
        return cls.finding(config.where(Span(start, start + 1)), message, **more)
