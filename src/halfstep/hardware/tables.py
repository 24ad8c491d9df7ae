"""Small tables: as text for `str`, and as HTML for notebooks, which show a value by its `_repr_html_`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["html_table", "plain_table"]


def plain_table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces."""
    widths = [max(len(line[i]) for line in (headings, *cells)) for i in range(len(headings))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in (headings, *cells)
    ]
    return "\n".join(line.rstrip() for line in lines)


def html_table(headings: Sequence[str], cells: Sequence[Sequence[str]], *, below: Sequence[str] = ()) -> str:
    """The same table as HTML without styles, with one paragraph for each text of `below`; an empty heading row is left out."""
    head = (
        f"<thead><tr>{''.join(f'<th>{escape(text)}</th>' for text in headings)}</tr></thead>" if any(headings) else ""
    )
    rows = "".join(_row(line) for line in cells)
    notes = "".join(f"<p>{escape(text)}</p>" for text in below)
    return f"<table>{head}<tbody>{rows}</tbody></table>{notes}"


def _row(cells: Sequence[str]) -> str:
    first, rest = cells[0], cells[1:]
    others = "".join(f'<td style="text-align:left">{escape(text)}</td>' for text in rest)
    return f'<tr><th style="text-align:left">{escape(first)}</th>{others}</tr>'
