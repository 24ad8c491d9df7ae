"""The known faults of the installed DeepSpeed that apply to an engine; docs/deepspeed.md lists them all by id."""

from __future__ import annotations

from typing import Any

from halfstep.backends.deepspeed.library import version
from halfstep.precision.deepspeed_faults import Fault, faults

__all__ = ["engine_faults"]


def engine_faults(engine: Any) -> tuple[Fault, ...]:
    """The faults of this release with the configuration and the optimizer of an engine."""
    config = dict(engine._config._param_dict)  # noqa: SLF001 - `engine.config` may be the path of a file
    config["gradient_accumulation_steps"] = engine.gradient_accumulation_steps()  # may follow from the batch sizes
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    known = faults(
        version(),
        config,
        fused=type(inner).__name__ == "FusedAdam",
        experts=bool(getattr(engine, "has_moe_layers", False)),
        num_groups=len(inner.param_groups),
    )
    return tuple(known)
