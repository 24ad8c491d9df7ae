"""RunContext: which process of a run this is, and where it computes.

Rank, world size and device are read from this value and from nowhere else. A backend makes it; the Engine, the trainer,
the planner and jobs receive it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from halfstep.hardware.accelerator import pick_device

__all__ = ["RunContext"]


@dataclass(frozen=True)
class RunContext:
    """One process of a run; the defaults are those of a run with one process on the CPU."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    seed: int = 0
    batch_size: int = 1  # examples per micro-batch in this process
    process_group: Any = None  # the torch.distributed group that spans the run; None for one process

    @classmethod
    def single(cls, device: str | torch.device = "auto", *, seed: int = 0, batch_size: int = 1) -> RunContext:
        """The context of a run with one process."""
        place = device if isinstance(device, torch.device) else pick_device(device)
        return cls(place, seed=seed, batch_size=batch_size)

    def job_arguments(self) -> dict[str, Any]:
        """The arguments that every callable of a Job may name."""
        return {name: getattr(self, name) for name in ("batch_size", "seed", "rank", "world_size", "device")}
