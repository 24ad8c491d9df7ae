"""The device a run computes on: chosen here and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfstep.errors import SettingError
from halfstep.hardware.torch_build import require_torch

if TYPE_CHECKING:
    import torch

__all__ = ["pick_device"]


def pick_device(name: str = "auto") -> torch.device:
    """The torch device of this name; "auto" is the accelerator, or the CPU where there is none."""
    require_torch("Choosing a device")
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError(f"device={name!r} is an unknown device; write auto, cpu, cuda or cuda:1.") from None
    counts = {"cpu": 1} | ({} if accelerator is None else {accelerator.type: torch.accelerator.device_count()})
    if (device.index or 0) >= counts.get(device.type, 0):
        visible = " and ".join(f"{count} {kind}" for kind, count in counts.items())
        raise SettingError(
            f"device={name!r} is not available: torch {torch.__version__} sees {visible}. Write auto, or one of these."
        )
    return device
