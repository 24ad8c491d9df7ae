"""What a DeepSpeed configuration makes DeepSpeed do, read as DeepSpeed reads it, for the table of its faults.

`halfstep.precision.deepspeed` rejects what Halfstep cannot train; this reader accepts any configuration that DeepSpeed
itself would start with, and applies the defaults of the release it is asked about, because it also describes engines
that other programs have built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.errors import SettingError
from halfstep.precision.formats import canonical_name

__all__ = ["Setup", "Version", "parse_version", "read_setup"]

Version = tuple[int, ...]
_CLIPS_BY_DEFAULT = (0, 19, 3)
_LARGEST = 2.0**127


@dataclass(frozen=True)
class Setup:
    """The decisions of one configuration that a fault depends on."""

    stage: int = 0
    mode: str = "fp32"  # "fp32", "fp16", "bf16": the format of the weights
    autocast: str | None = None  # "fp16", "bf16", "default" (no dtype); None: off
    clip: float = 0.0
    accumulate: int = 1
    grad_accum: str | None = None  # None: not set
    communication: str | None = None
    loss_scale: float = 0.0  # 0: dynamic
    power: float = 16
    minimum: float = 1
    hysteresis: float = 2
    sets_hysteresis: bool = False
    checks_bf16: bool = True
    offloads: bool = False
    fused: bool = False  # DeepSpeed's FusedAdam or a 1-bit Adam, which at stage 0 get the fused wrapper
    experts: bool = False  # the model has mixture-of-experts layers
    num_groups: int = 1  # parameter groups of the optimizer
    version: Version = ()  # of DeepSpeed

    @property
    def is_16_bit(self) -> bool:
        """Whether weights are stored in 16 bits."""
        return self.mode != "fp32"

    @property
    def is_dynamic_fp16(self) -> bool:
        """Whether DeepSpeed's fp16 mode updates its loss scale."""
        return self.mode == "fp16" and self.loss_scale == 0

    @property
    def scales_autocast(self) -> bool:
        """Whether DeepSpeed uses torch's GradScaler."""
        return self.autocast == "fp16"

    @property
    def is_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed replaces its ZeRO-1 optimizer with BF16_Optimizer."""
        return self.mode == "bf16" and self.grad_accum == "fp32" and self.stage == 1 and not self.offloads


def parse_version(text: str | Version) -> Version:
    """The numbers of a version, such as (0, 19, 8) for "0.19.8+cpu"."""
    if not isinstance(text, str):
        return tuple(text)
    numbers = []
    for part in text.split("+")[0].split(".")[:3]:
        digits = "".join(char for char in part if char.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    if not numbers:
        raise SettingError(f"DeepSpeed version {text!r} is not a version; write it as 0.19.8.")
    return tuple(numbers)


def read_setup(
    config: Mapping[str, Any], version: Version, *, fused: bool = False, experts: bool = False, num_groups: int = 1
) -> Setup:
    """The decisions of a configuration under one release; what is not in it comes from the program around it."""
    zero = config.get("zero_optimization")
    fp16, autocast = _block(config, "fp16"), _block(config, "torch_autocast")
    bf16 = _block(config, "bf16") or _block(config, "bfloat16")
    default_clip = 1.0 if version >= _CLIPS_BY_DEFAULT else 0.0
    types = _block(config, "data_types")
    return Setup(
        stage=int(_number(zero.get("stage"), 0)) if isinstance(zero, Mapping) else int(zero is True),
        mode="fp16" if _on(fp16) else "bf16" if _on(bf16) else "fp32",
        autocast=(_format(autocast.get("dtype")) or "default") if _on(autocast) else None,
        clip=_number(config.get("gradient_clipping"), default_clip),
        accumulate=int(_number(config.get("gradient_accumulation_steps"), 1)),
        grad_accum=_format(types.get("grad_accum_dtype")),
        communication=_format(config.get("communication_data_type")),
        loss_scale=_number(fp16.get("loss_scale"), 0),
        power=_number(fp16.get("initial_scale_power"), 16),
        minimum=_number(fp16.get("min_loss_scale"), 1),
        hysteresis=_number(fp16.get("hysteresis"), 2),
        sets_hysteresis=bool({"hysteresis", "consecutive_hysteresis"} & set(fp16)),
        checks_bf16=bf16.get("check_grad_overflow") is not False,
        offloads=isinstance(zero, Mapping) and _offloads(zero),
        fused=fused,
        experts=experts,
        num_groups=num_groups,
        version=version,
    )


def _block(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _on(block: Mapping[str, Any]) -> bool:
    value = block.get("enabled")
    return value is True or (isinstance(value, str) and value.casefold() == "true")  # "auto" is dropped: off


def _number(value: object, default: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _LARGEST:  # nan compares false
        return default
    return float(value)


def _format(value: object) -> str | None:
    return None if value is None else canonical_name(value)


def _offloads(zero: Mapping[str, Any]) -> bool:
    return _block(zero, "offload_optimizer").get("device") in {"cpu", "nvme"} or zero.get("cpu_offload") is True
