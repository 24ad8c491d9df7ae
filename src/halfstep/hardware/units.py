"""Sizes, times and counts as text: the one place that formats numbers for people."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["bytes_text", "count_text", "few", "gib_text", "seconds_text"]

_SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def bytes_text(num_bytes: float) -> str:
    """A size in the unit a person would choose: "1.23 GiB", "512 MiB", "17 B"."""
    for unit, size in _SIZES:
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
    return f"{num_bytes:.0f} B"


def gib_text(num_bytes: float) -> str:
    """A size in GiB without its unit, for columns: two digits, four where two would show next to nothing."""
    gib = num_bytes / 2**30
    return f"{gib:.2f}" if gib >= 0.1 or gib == 0 else f"{gib:.4f}"


def seconds_text(seconds: float) -> str:
    """A time in the unit a person would choose: "1.5 s", "12.3 ms", "40 us"."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def count_text(number: int, noun: str, plural: str = "") -> str:
    """A count with its noun: "1 file", "1,024 files"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def few(names: Sequence[str], most: int = 3) -> str:
    """The first names of a list and how many more there are: "a, b, c and 4 more"."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
