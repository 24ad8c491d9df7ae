"""The text under check, and the way from its lines to places in the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfstep.check.finding import Place
from halfstep.check.settings import Settings

__all__ = ["Cell", "CellLine", "Language", "Settings", "Source"]

Language = Literal["python", "notebook", "json", "yaml", "toml"]


@dataclass(frozen=True)
class Cell:
    """A code cell of a notebook: its number from 1, and the position of its lines in the joined text."""

    number: int
    first_line: int  # of the joined text, from 1
    num_lines: int


@dataclass(frozen=True)
class CellLine:
    """A line as the user counts it: inside its cell in a notebook, in the file elsewhere."""

    cell: int | None
    line: int


@dataclass(frozen=True)
class Source:
    """One file's text. A notebook's text is its code cells joined, with the magics blanked."""

    path: str
    text: str
    language: Language
    cells: tuple[Cell, ...] = ()

    def cell_line(self, line: int) -> CellLine:
        """The cell and the line inside it, for a line of the text; no cell outside notebooks."""
        for cell in self.cells:
            if cell.first_line <= line < cell.first_line + cell.num_lines:
                return CellLine(cell.number, line - cell.first_line + 1)
        return CellLine(None, line)

    def place(self, line: int, column: int, end_line: int | None = None, end_column: int | None = None) -> Place:
        """The place of a finding, from lines of the text (from 1) and columns in characters (from 1)."""
        start = self.cell_line(line)
        if end_line is not None:
            end_line = self.cell_line(end_line).line
        return Place(self.path, start.line, column, end_line, end_column, start.cell)
