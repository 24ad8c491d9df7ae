"""One plot of the report page: plain data for Plotly, a caption, and the same values as a table.

A colour "@c1" is the name of a CSS variable: report.js puts the page's colour there, so that light, dark and print each
have theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfstep.report.html_table import Table

__all__ = ["Plot", "Values", "row_colour"]

NUM_ROW_COLOURS = 9  # --c0 to --c8 in style.css
Values = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    """One plot: its data and layout for Plotly, its title and caption, and its values as a table."""

    id: str
    title: str
    caption: str
    data: list[Values]
    layout: Values
    table: Table

    @property
    def height(self) -> int:
        """Of the drawing, in pixels."""
        return int(self.layout.get("height", 300))

    def drawing(self) -> Values:
        """What Plotly draws; text is escaped because Plotly interprets <b> and <a> in a label as markup."""
        text_keys = {"name", "x", "y"}
        data = [
            {key: _escaped(value) if key in text_keys else value for key, value in trace.items()} for trace in self.data
        ]
        return {"data": data, "layout": self.layout}


def row_colour(values: Values, label: str) -> str:
    """The CSS variable of a row, the same in every plot and in the table of results."""
    labels = [row["label"] for row in values["rows"]]
    return f"c{labels.index(label) % NUM_ROW_COLOURS}"


def _escaped(value: Any) -> Any:
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("&", "&amp;").replace("<", "&lt;") if isinstance(value, str) else value
