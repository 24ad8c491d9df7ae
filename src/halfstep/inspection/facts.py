"""Facts: the formats of one kind of tensor or computation, or why they are not known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from halfstep.hardware.units import few

__all__ = ["NONE", "Fact", "fact_of", "unknown_fact"]

NONE = "none"  # the format of what does not exist


@dataclass(frozen=True)
class Fact:
    """The formats of one kind of tensor or computation."""

    key: str  # that `expect` takes
    counts: Mapping[str, int] = field(default_factory=dict)  # by format: elements of tensors, or calls
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by format: of parameters or modules
    note: str = ""  # the rest of the row
    missing: str = ""  # why the formats are not known, and how to observe them; empty if they are
    num_bytes: int = 0  # on this rank

    @property
    def text(self) -> str:
        """The row of the table; next to several formats, their counts and names of the rarest one."""
        ranked = sorted(self.counts.items(), key=lambda item: -item[1])
        if len(ranked) == 1:
            shown = ranked[0][0]
        else:
            shown = ", ".join(f"{name} ({count:,})" for name, count in ranked)
            rare = ranked[-1][0]
            shown += f"; {rare}: {few(self.names[rare])}" if self.names.get(rare) else ""
        return f"{shown}; {self.note}" if self.note else shown

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        if self.missing:
            return {"observed": False, "why": self.missing}
        return {"observed": True, "formats": dict(self.counts), "note": self.note, "bytes": self.num_bytes}


def _count(entries: Iterable[tuple[str, str, int]]) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Counts and names by format, of (name, format, count)."""
    counts: Counter[str] = Counter()
    names: dict[str, list[str]] = {}
    for name, form, count in entries:
        counts[form] += count
        names.setdefault(form, []).append(name)
    return dict(counts), {form: tuple(dict.fromkeys(own)) for form, own in names.items()}


def fact_of(key: str, entries: Iterable[tuple[str, str, int]], *, note: str = "", num_bytes: int = 0) -> Fact:
    """A fact of (name, format, count); of nothing, its format is "none"."""
    counts, names = _count(entries)
    return Fact(key, counts or {NONE: 0}, names, note, num_bytes=num_bytes)


def unknown_fact(key: str, missing: str) -> Fact:
    """A fact that was not observed, with the way to observe it."""
    return Fact(key, missing=missing)
