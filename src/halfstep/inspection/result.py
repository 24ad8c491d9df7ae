"""The result of an inspection, as a table and as plain values, and what a test asks of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.hardware.tables import html_table
from halfstep.inspection.expectations import check_expectations
from halfstep.inspection.facts import Fact

__all__ = ["Inspection"]


@dataclass(frozen=True)
class Inspection:
    """What a training loop stores, and if one of its steps was observed, what it computes in."""

    facts: Mapping[str, Fact]
    num_parameters: int  # trainable ones of all ranks
    num_local: int  # those that this rank stores
    wrappers: tuple[str, ...] = ()  # around the model
    scale: float | None = None  # of the loss

    @property
    def bytes_per_parameter(self) -> dict[str, float]:
        """Bytes by kind, divided by the trainable parameters that this rank stores; kinds without bytes are left out."""
        sizes = {key: fact.num_bytes for key, fact in self.facts.items() if fact.num_bytes}
        return {key: round(size / max(self.num_local, 1), 4) for key, size in sizes.items()}

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """The table."""
        part = "" if self.num_local == self.num_parameters else f", {self.num_local:,} of them on this rank"
        rows = [("parameters", f"{self.num_parameters:,} trainable{part}")]
        if self.wrappers:
            rows.append(("wrapped in", ", ".join(self.wrappers)))
        rows += [(key, fact.text) for key, fact in self.facts.items() if not fact.missing]
        shares = self.bytes_per_parameter
        total = f"{sum(shares.values()):.2f} (" + ", ".join(f"{key} {size:.2f}" for key, size in shares.items()) + ")"
        reasons: dict[str, list[str]] = {}
        for key, fact in self.facts.items():
            if fact.missing:
                reasons.setdefault(fact.missing, []).append(key)
        missing = [("not observed", f"{', '.join(keys)}: {reason}") for reason, keys in reasons.items()]
        return (*rows, ("bytes per parameter", total if shares else "0"), *missing)

    def expect(self, **formats: str) -> None:
        """Raise `ExpectationError` unless everything named has one of the formats given for it.

        A key is a row (`master`, `states`, `compute`, ...), a value a format ("fp32"), several ("fp32|bf16") or "none". What was
        not observed raises as well. Unknown keys and formats raise `SettingError`.
        """
        check_expectations(self.facts, formats)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for files and further checks."""
        return {
            "num_parameters": self.num_parameters,
            "num_local": self.num_local,
            "wrappers": list(self.wrappers),
            "loss_scale": self.scale,
            "facts": {key: fact.as_dict() for key, fact in self.facts.items()},
            "bytes_per_parameter": self.bytes_per_parameter,
        }

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        return "\n".join(f"  {name:{width}}  {value}" for name, value in self.rows)

    def _repr_html_(self) -> str:
        return html_table(("", ""), self.rows)
