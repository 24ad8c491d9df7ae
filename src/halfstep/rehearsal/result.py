"""The result of a rehearsal: rows by module and kind, predicted troubles and risks, and the proposal; as plain values for JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from halfstep.kernels.exponents import BIN_OF_1
from halfstep.precision.formats import BF16, FP8_E4M3FN, FP8_E5M2, FP16, Format
from halfstep.rehearsal.ledger import Ledger, Row
from halfstep.rehearsal.observer import GRADIENT, WEIGHT_GRADIENT
from halfstep.rehearsal.proposal import OVERFLOW, Proposal, Risk, Trouble
from halfstep.rehearsal.rounding import BestScale, largest_magnitude, relative_error

__all__ = ["FORMATS", "Prediction", "Rehearsal"]

FORMATS = (FP16, BF16, FP8_E4M3FN, FP8_E5M2)
SCHEMA = 1


@dataclass(frozen=True)
class Prediction:
    """What a cast to a format does to the elements of a row."""

    format: str
    overflows: bool
    flushed: float  # share of the non-zero elements that become 0
    subnormal: float  # share that keeps fewer bits
    error: float  # relative L2 error; inf for an overflow
    overflow_margin: float  # powers of two from the largest magnitude to the format's limit; negative: beyond
    underflow_margin: float  # powers of two from the format's smallest normal number to the smallest magnitude


@dataclass(frozen=True)
class Rehearsal:
    """What some fp32 steps of a job show about other formats."""

    job: str
    steps: int
    batch: int
    device: str
    policy: str  # the precision that was asked about
    losses: tuple[float, ...]
    ledger: Ledger
    scale: BestScale | None  # the loss scale that the predictions for the policy assume
    troubles: tuple[Trouble, ...]  # of the policy
    risks: tuple[Risk, ...]
    proposal: Proposal
    sixteen_bit: frozenset[tuple[str, str]]  # the (module, kind) that are 16-bit under the policy

    @property
    def rows(self) -> tuple[Row, ...]:
        """By module and kind, in the order of the model."""
        return self.ledger.rows

    def __str__(self) -> str:
        verdict = [str(trouble) for trouble in self.troubles] or ["no overflow or underflow predicted"]
        return "\n".join([f"{self.job} in {self.policy}", *verdict, f"proposed: {self.proposal.policy}"])

    def predict(self, row: Row, fmt: Format) -> Prediction:
        """What a cast to `fmt` does to a row; gradients in fp16 are multiplied by the loss scale first."""
        exponent = 0
        if fmt is FP16 and self.scale is not None and row.kind in (GRADIENT, WEIGHT_GRADIENT):
            exponent = self.scale.exponent
        return predict(row, fmt, exponent)

    def worst(self) -> list[Row]:
        """All rows, the worst first: what is out of range in the policy, then what has the largest errors in fp16.

        What stays in fp32 under the policy comes last.
        """
        named = {(trouble.module, trouble.kind) for trouble in self.troubles}

        def order(row: Row) -> tuple[bool, bool, float]:
            key = (row.module, row.kind)
            return key not in named, key not in self.sixteen_bit, -self.predict(row, FP16).error

        return sorted(self.rows, key=order)

    def as_dict(self) -> dict[str, Any]:
        """Plain values; non-finite numbers are strings."""
        return {
            "schema": SCHEMA,
            "job": self.job,
            "steps": self.steps,
            "batch": self.batch,
            "device": self.device,
            "policy": self.policy,
            "losses": [_number(loss) for loss in self.losses],
            "loss_scale": None if self.scale is None else _scale(self.scale),
            "troubles": [_trouble(t) for t in self.troubles],
            "risks": [{"module": r.module, "kind": r.kind, "margin": r.margin, "observed": False} for r in self.risks],
            "proposal": {
                "policy": self.proposal.policy,
                "keep_fp32": list(self.proposal.keep_fp32),
                "loss_scale": None if self.proposal.scale is None else _scale(self.proposal.scale),
                "reasons": list(self.proposal.reasons),
            },
            "rows": [self._row(row) for row in self.rows],
        }

    def _row(self, row: Row) -> dict[str, Any]:
        stats = row.stats
        return {
            "module": row.module,
            "kind": row.kind,
            "sixteen_bit": (row.module, row.kind) in self.sixteen_bit,
            "numel": stats.numel,
            "largest": largest_magnitude(stats),
            "smallest": stats.smallest,
            "zeros": stats.share_of_zeros,
            "nonfinite": stats.nonfinite,
            "exponents": {str(i - BIN_OF_1): count for i, count in enumerate(stats.bins) if count},
            "formats": {fmt.name: _prediction(self.predict(row, fmt)) for fmt in FORMATS},
            "blocks": {name: {"error": _number(b.error), "flushed": b.flushed} for name, b in row.blocks.items()},
        }


def predict(row: Row, fmt: Format, exponent: int = 0) -> Prediction:
    """What a cast to `fmt` does to the elements of a row that were multiplied by 2^exponent."""
    bins = [0] * len(row.stats.bins)
    for i, count in enumerate(row.stats.bins):
        if count:
            bins[min(max(i + exponent, 0), len(bins) - 1)] += count
    largest = math.ldexp(largest_magnitude(row.stats), exponent)
    smallest = math.ldexp(row.stats.smallest, exponent)
    total = max(row.stats.nonzero, 1)
    flush = BIN_OF_1 - fmt.bias - fmt.fraction_bits  # below half of the smallest subnormal
    normal = BIN_OF_1 + 1 - fmt.bias
    overflows = largest > fmt.max
    return Prediction(
        fmt.name,
        overflows,
        flushed=sum(bins[: max(flush, 0)]) / total,
        subnormal=sum(bins[max(flush, 0) : max(normal, 0)]) / total,
        error=math.inf if overflows else relative_error(row.stats.bins, fmt, exponent),
        overflow_margin=math.log2(fmt.max / largest) if largest else math.inf,
        underflow_margin=math.log2(smallest / fmt.smallest_normal) if smallest else math.inf,
    )


def _prediction(p: Prediction) -> dict[str, Any]:
    return {
        "overflows": p.overflows,
        "flushed": p.flushed,
        "subnormal": p.subnormal,
        "error": _number(p.error),
        "overflow_margin": _number(p.overflow_margin),
        "underflow_margin": _number(p.underflow_margin),
    }


def _trouble(t: Trouble) -> dict[str, Any]:
    return {
        "module": t.module,
        "kind": t.kind,
        "effect": t.effect,
        "function": t.function,
        "largest": _number(t.largest),
        "lost": 1.0 if t.effect == OVERFLOW else _number(t.lost),
        "keep_fp32": t.cure,
    }


def _scale(scale: BestScale) -> dict[str, Any]:
    return {
        "scale": scale.scale,
        "error": scale.error,
        "least_error": scale.least_error,
        "highest": math.ldexp(1.0, scale.highest),
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
