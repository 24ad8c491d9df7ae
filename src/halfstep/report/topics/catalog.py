"""The topics by name."""

from __future__ import annotations

from collections.abc import Callable

from halfstep.errors import unknown
from halfstep.report.topics import numbers, scale, training
from halfstep.report.topics.topic import Topic

__all__ = ["TOPICS", "explain"]

TOPICS: dict[str, Callable[[], Topic]] = {
    "loss-scaling": numbers.loss_scaling,
    "hysteresis": numbers.hysteresis,
    "underflow": training.underflow,
    "clipping": training.clipping,
    "accumulation": training.accumulation,
    "validation": training.validation,
    "fp16-vs-bf16": numbers.fp16_bf16,
    "stays-in-fp32": numbers.stays_fp32,
    "master-weights": training.master_weights,
    "memory": training.memory,
    "native-vs-emulated": numbers.native,
    "zero-and-amp": scale.zero_and_amp,
    "one-bit": scale.one_bit,
    "fp8": scale.fp8,
    "formats": numbers.formats,
}


def explain(name: str) -> Topic:
    """The topic called `name`; case is ignored, and spaces and underscores count as dashes."""
    key = "-".join(name.casefold().replace("_", " ").replace("-", " ").split())
    if key not in TOPICS:
        raise unknown("topic", name, TOPICS)
    return TOPICS[key]()
