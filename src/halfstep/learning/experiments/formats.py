"""Number formats: range, spacing, and sums that stop growing."""

from __future__ import annotations

import torch

from halfstep.learning.experiment import Outcome, Reading
from halfstep.precision.formats import BF16, FP16, torch_dtype

__all__ = ["long_sum", "spacing", "value_range"]

_FORMATS = ("fp16", "bf16", "fp32")


def _cast(x: float, name: str) -> float:
    """A number as a tensor of this format stores it."""
    return float(torch.tensor(x, dtype=torch.float64).to(torch_dtype(name)))


def value_range() -> Outcome:
    """A large and a small value, stored in each format."""
    large, small = 70_000.0, 1e-8
    stored = {name: (_cast(large, name), _cast(small, name)) for name in _FORMATS}
    readings = [
        reading
        for name, (high, low) in stored.items()
        for reading in (
            Reading(f"{large:.0f} in {name}", str(high) if high == float("inf") else high, f"{high:.6g}"),
            Reading(f"{small:.0e} in {name}", low, f"{low:.3g}"),
        )
    ]
    largest = float(torch.finfo(torch.float16).max)
    readings.append(Reading("largest fp16 value, by torch", largest, f"{largest:.0f}"))
    holds = stored["fp16"] == (float("inf"), 0.0) and all(
        low > 0 and high < 1e5 for high, low in (stored["bf16"], stored["fp32"])
    )
    return Outcome(
        tuple(readings),
        holds and largest == FP16.max,
        "fp16 has 5 exponent bits: what is too large becomes inf, what is too small becomes 0. bf16 has fp32's 8 exponent bits "
        "and keeps both, less precisely.",
    )


def spacing() -> Outcome:
    """What is left of small additions to 1."""
    values = {name: {step: _cast(1 + step, name) for step in (0.01, 0.002, 0.0002)} for name in _FORMATS}
    readings = [
        Reading(f"{1 + step:g} in {name}", value, f"{value:.7g}")
        for name, by_step in values.items()
        for step, value in by_step.items()
    ]
    ratio = BF16.epsilon / FP16.epsilon
    readings.append(Reading("spacing at 1: bf16 / fp16", ratio, f"{ratio:.0f}"))
    holds = values["bf16"][0.002] == 1 < values["fp16"][0.002] and values["fp16"][0.0002] == 1 < values["fp32"][0.0002]
    return Outcome(
        tuple(readings),
        holds and ratio == 8,
        "As the lesson's table has it, bf16 trades precision for range. An update of 0.2 % of a weight is lost in bf16, one of "
        "0.02 % also in fp16. fp32 keeps both: weights are updated there.",
    )


def long_sum() -> Outcome:
    """Ones added one by one, with the sum stored in each format."""
    num_ones, sums = 4096, {}
    for name in _FORMATS:
        total, one = torch.zeros((), dtype=torch_dtype(name)), torch.ones((), dtype=torch_dtype(name))
        for _ in range(num_ones):
            total += one
        sums[name] = float(total)
    readings = tuple(
        Reading(f"sum of {num_ones} ones in {name}", value, f"{value:.0f}") for name, value in sums.items()
    )
    return Outcome(
        readings,
        sums == {"fp16": 2048.0, "bf16": 256.0, "fp32": float(num_ones)},
        "At 256 the spacing of bf16 is 2, and 257 is rounded back to 256. So long sums (softmax over long sequences, norms, "
        "accumulated gradients, running statistics) are kept in fp32. A kernel that reads 16 bits and adds in fp32 is fine.",
    )
