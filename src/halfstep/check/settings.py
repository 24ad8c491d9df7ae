"""The settings a text is checked under: the versions of libraries and the GPU it is meant for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep.check.pins import Pin
    from halfstep.hardware.devices import Device  # 7 ms of a start that may take 300

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """What rules may know beyond the text."""

    deepspeed: tuple[int, ...] | None = None  # the version to judge by; None: report what happens before and after
    gpu: Device | None = None  # the hardware the run is for
    gpu_origin: str = ""  # "--gpu t4", "nvidia-smi"
    transformers: tuple[int, ...] | None = None  # None: unknown, messages cover both 4 and 5
    pins: tuple[Pin, ...] = ()  # versions that the user named
    look_up: bool = False  # whether versions that the project pins or that are installed count as well
