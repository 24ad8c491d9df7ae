"""Several processes started where one is supported."""

from __future__ import annotations

import os

from halfstep.errors import SettingError

__all__ = ["reject_distributed_launch"]


def reject_distributed_launch(command: str) -> None:
    """Raise if a launcher such as torchrun started several processes: each would do the whole run on its own."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.strip() not in {"", "1"}:
        raise SettingError(
            f"WORLD_SIZE={world_size}: a launcher such as torchrun started several processes, and `{command}` runs in one; each of them "
            "would do the whole run. Start it without the launcher. To train on several GPUs, wrap your model in "
            "torch.nn.parallel.DistributedDataParallel in your own loop and pass it to halfstep.Engine."
        )
