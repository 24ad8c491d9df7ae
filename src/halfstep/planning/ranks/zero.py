"""The bytes that one rank stores under ZeRO, as Halfstep's DeepSpeed backend runs it; tests compare them with real ranks.

DeepSpeed steps fp32 copies of all weights, also of fp32 ones, and its flat partitions are equal parts of all elements. The
backend sums gradients in fp32:

              weights      masters    states       gradients
    stage 1   all          4 / N      fp32 / N     4, on every rank until the window closes; with bf16 weights 2 more
    stage 2   all          4 / N      fp32 / N     4 / N
    stage 3   1 / N        4 / N      fp32 / N     4 / N

in bytes per trained parameter on N ranks, without padding. The 2 bytes are the bf16 gradients that BF16_Optimizer does not
free when it adds them to its fp32 sums. Not counted: with fp32 weights at stage 2, a rank keeps the whole gradient of a
parameter of which it steps a fragment only, so that of at most two parameters in each group.
"""

from __future__ import annotations

import math

from halfstep.planning.ranks.shards import Counted, whole_bytes

__all__ = ["zero_bytes"]

_FP32 = 4  # bytes


def zero_bytes(parts: Counted, stage: int, num_ranks: int, *, weights: str) -> dict[str, int]:
    """Bytes by category on one rank of a ZeRO stage; `weights` is the format of the weights."""
    count = sum(number * math.prod(part.shape) for part, number in parts if part.category == "gradients")
    share = -(-count // num_ranks)
    whole = whole_bytes(parts)
    local = {name: -(-size // num_ranks) if name in {"states", "average"} else size for name, size in whole.items()}
    if stage == 3:
        local["weights"] = -(-whole.get("weights", 0) // num_ranks)
    local["master"] = _FP32 * share
    local["gradients"] = _FP32 * share if stage > 1 else (_FP32 + (2 if weights == "bf16" else 0)) * count
    return local
