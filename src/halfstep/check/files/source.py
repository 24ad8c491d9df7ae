"""The text under check, and the way from its lines to places in the file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from halfstep.check.finding import Place
from halfstep.check.regex import regex
from halfstep.check.settings import Settings

__all__ = ["Cell", "CellLine", "FilePlace", "Language", "Origin", "Settings", "Source"]

Language = Literal["python", "notebook", "json", "yaml", "toml"]


# One character of a JSON string as it is written; a pair of surrogates is one character.
_UNIT = regex(r"\\u[dD][89abAB]\w{2}\\u[dD][c-fC-F]\w{2}|\\u\w{4}|\\.|[^\\]", re.DOTALL)


@dataclass(frozen=True)
class Origin:
    """Where a line of a cell is in the notebook's JSON, both from 1, and how it is written there."""

    line: int
    column: int
    written: str


@dataclass(frozen=True)
class Cell:
    """A code cell of a notebook: its number from 1, and the position of its lines in the joined text."""

    number: int
    first_line: int  # of the joined text, from 1
    num_lines: int
    origins: tuple[Origin, ...] = ()  # of its lines; only for a notebook that has findings


@dataclass(frozen=True)
class FilePlace:
    """A line and a column of the file itself, both from 1."""

    line: int
    column: int


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

    def line_of(self, cell: int | None, line: int) -> str | None:
        """The text of a line, counted as in a finding; None if there is none."""
        first = next((c.first_line for c in self.cells if c.number == cell), 1)
        lines = _lines(self.text)
        index = line + first - 2
        return lines[index] if 0 <= index < len(lines) else None

    def in_file(self, cell: int | None, line: int, column: int) -> FilePlace:
        """A place counted as in a finding, counted in the file: for a notebook, in its JSON."""
        code_cell = next((c for c in self.cells if c.number == cell), None)
        if code_cell is None or not code_cell.origins:
            return FilePlace(line, column) if cell is None else FilePlace(1, 1)
        origin = code_cell.origins[min(line, len(code_cell.origins)) - 1]
        written = [unit.group() for unit in _UNIT.finditer(origin.written)]
        return FilePlace(origin.line, origin.column + len("".join(written[: column - 1])))

    def place(self, line: int, column: int, end_line: int | None = None, end_column: int | None = None) -> Place:
        """The place of a finding, from lines of the text (from 1) and columns in characters (from 1)."""
        start = self.cell_line(line)
        if end_line is not None:
            end_line = self.cell_line(end_line).line
        return Place(self.path, start.line, column, end_line, end_column, start.cell)


@lru_cache(maxsize=4)
def _lines(text: str) -> list[str]:
    return text.split("\n")
