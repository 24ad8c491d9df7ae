"""A table as data: headings, rows of cells and which columns are prose; macros.html.j2 lays it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Table", "data_table"]


@dataclass(frozen=True)
class Table:
    """The first cell of a row is its heading. Columns in `prose` are left-aligned and wrap."""

    label: str  # the accessible name of the region that scrolls
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    prose: frozenset[int] = frozenset()
    caption: str = ""
    id: str = ""


def data_table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table of numbers under a caption."""
    return Table(caption, tuple(heads), tuple(tuple(map(str, row)) for row in rows), caption=caption)
