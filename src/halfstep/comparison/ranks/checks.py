"""What a comparison on several ranks rejects before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.variant import Variant
from halfstep.errors import SettingError

__all__ = ["check_rows"]

_REASONS = {
    "accelerate": "Accelerate sets up devices, processes and data by its own launcher",
    "fabric": "Fabric sets up devices, processes and data by its own launcher",
}


def check_rows(settings: CompareSettings, variants: Sequence[Variant]) -> None:
    """Raise for baselines that cannot run on the ranks of this comparison, with the reason."""
    strategy = settings.strategy
    if strategy == "single":
        return
    for variant in variants:
        if variant.baseline in _REASONS:
            raise SettingError(
                f"--peer {variant.label} does not run on the ranks of a comparison: {_REASONS[variant.baseline]}. Compare with --peer "
                "torch-amp, which trains in DistributedDataParallel, or without --ranks and --backend."
            )
        if variant.baseline is not None and strategy == "fsdp":
            raise SettingError(
                f"--peer {variant.label} does not run with --backend fsdp: torch.amp has no documented loop for fully_shard, and its "
                "GradScaler misses overflows of sharded parameters. Compare it with --backend ddp."
            )
