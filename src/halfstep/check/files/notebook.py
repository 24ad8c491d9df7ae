"""Notebooks: their code cells as one text, and edits of that text as edits of the JSON.

A notebook is JSON in which each cell's source is a list of lines or one string. Rules see the code cells joined into one
Python text. IPython's own syntax (`%magic`, `!shell`, `name?`) is not Python, so in a cell that does not parse such lines
are replaced, character for character, by a statement that does nothing; a cell in another language (`%%bash`), or one
that still does not parse, is blanked and the others are checked without it.

For a fix, the position of every source line in the JSON is known, and only the lines that change are rewritten: outputs,
metadata, spacing and key order stay the same, byte for byte.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from halfstep.check.files.problems import SyntaxFault, TooDeep
from halfstep.check.files.python import place_of
from halfstep.check.files.repair import blank, parse_error, without_magics
from halfstep.check.files.source import Cell, Origin
from halfstep.check.finding import Edit, Finding, Place
from halfstep.check.regex import regex

__all__ = ["Fault", "Notebook", "read_notebook"]

# Cell magics after which the cell is still Python of this notebook, and those after which it is another language or file.
# Any other one is a notebook's own (`%%write_and_run`, `%%wandb`): its cell is Python if it parses.
_PYTHON_MAGICS = frozenset({"time", "timeit", "capture", "prun", "python", "python3", "pypy", "skip", "debug"})
_OTHER_MAGICS = frozenset(
    [
        "bash",
        "sh",
        "shell",
        "script",
        "system",
        "sx",
        "cmd",
        "powershell",
        "html",
        "HTML",
        "svg",
        "SVG",
        "javascript",
        "js",
        "latex",
        "markdown",
        "perl",
        "ruby",
        "R",
        "julia",
        "sql",
        "bigquery",
        "cython",
        "writefile",
        "file",
        "python2",
        "cu",
        "cuda",
        "cpp",
        "ai",
    ]
)
_TOKEN = regex(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}:,]')
# A line inside a JSON string, with the escaped line break that ends it.
_WRITTEN_LINE = regex(r"(?:\\(?!n|u000[aA]).|[^\\])*(?:\\(?:n|u000[aA])|$)", re.DOTALL)
_UNPRINTABLE = regex("[\ud800-\udfff\r]")


@dataclass(frozen=True)
class Fault:
    """A cell that could not be parsed."""

    cell: int
    line: int
    column: int
    message: str


@dataclass(frozen=True)
class CellText:
    """One code cell: its text as written and as rules see it, and the position of its pieces in the JSON."""

    start: int  # of the cell in the joined text, in characters
    text: str
    shown: str
    pieces: tuple[tuple[int, int], ...]  # start and end of each string literal, quotes included
    in_list: bool


@dataclass(frozen=True)
class Notebook:
    """The code of a notebook."""

    text: str
    cells: tuple[Cell, ...]
    faults: tuple[Fault, ...]
    parts: tuple[CellText, ...]

    def edit(self, raw: str, edits: Sequence[Edit]) -> str | None:
        """The notebook's JSON after edits of its joined text; None if one is not within the code of one cell."""
        edits_by_cell: dict[int, list[Edit]] = {}
        for edit in edits:
            placed = self._place(edit)
            if placed is None:
                return None
            edits_by_cell.setdefault(placed[0], []).append(placed[1])
        for index in sorted(edits_by_cell, reverse=True):  # from the end, so that earlier positions stay valid
            raw = _rewrite(raw, self.parts[index], edits_by_cell[index])
        return raw

    def origins(self, raw: str) -> tuple[Cell, ...]:
        """The cells, each with the places of its lines in the JSON."""
        breaks = [match.end() for match in re.finditer("\n", raw)]
        return tuple(
            replace(cell, origins=tuple(_origins(raw, part.pieces, breaks)))
            for cell, part in zip(self.cells, self.parts, strict=True)
        )

    def _place(self, edit: Edit) -> tuple[int, Edit] | None:
        """The index of the cell an edit belongs to, and the edit in characters of that cell."""
        index = max((i for i, part in enumerate(self.parts) if part.start <= edit.start), default=-1)
        if index < 0:
            return None
        part = self.parts[index]
        start, end = edit.start - part.start, edit.end - part.start
        if index and start == end == 0 and edit.text[:1] in {" ", "\t"}:
            # An indented line after the last line of the previous cell belongs to that cell.
            before = self.parts[index - 1].text
            lines = edit.text.removesuffix("\n")
            return index - 1, Edit(len(before), len(before), lines if before.endswith("\n") else "\n" + lines)
        if end > len(part.text) or part.text[start:end] != part.shown[start:end]:
            return None
        return index, Edit(start, end, edit.text)


def read_notebook(path: str, raw: str) -> Notebook | Finding:
    """The notebook in `raw`, or the finding about why it cannot be read."""
    try:
        content: Any = json.loads(raw) if raw.strip() else {"cells": []}  # an empty file has no code
    except json.JSONDecodeError as error:
        where = Place(path, error.lineno, error.colno)
        return SyntaxFault.finding(where, f"The notebook is not valid JSON: {error.msg}.")
    except (RecursionError, ValueError) as error:
        message = f"The notebook's JSON cannot be parsed ({type(error).__name__}): it is nested too deeply or contains a huge number."
        return TooDeep.finding(Place(path), message)
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        message = "The file has no list of cells, so it is not a notebook of format 4."
        advice = "Convert older notebooks with `jupyter nbconvert --to notebook`."
        return SyntaxFault.finding(Place(path), message, instead=advice)
    if not _is_python(content):
        return Notebook("", (), (), ())
    places = dict(_source_places(raw))
    cells: list[Cell] = []
    parts: list[CellText] = []
    faults: list[Fault] = []
    start, line = 0, 1
    for index, cell in enumerate(content["cells"]):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source", "")
        pieces = source if isinstance(source, list) else [source]
        if not all(isinstance(piece, str) for piece in pieces):
            continue
        text = "".join(pieces)
        number = len(cells) + 1
        shown, fault = _python_of(text, number)
        if fault is not None:
            faults.append(fault)
        parts.append(CellText(start, text, shown, tuple(places.get(index, ())), isinstance(source, list)))
        joined = shown if shown.endswith("\n") else shown + "\n"
        cells.append(Cell(number, line, joined.count("\n")))
        start, line = start + len(joined), line + joined.count("\n")
    text = "".join(p.shown if p.shown.endswith("\n") else p.shown + "\n" for p in parts)
    return Notebook(text, tuple(cells), tuple(faults), tuple(parts))


def _is_python(notebook: dict[str, Any]) -> bool:
    metadata = notebook.get("metadata")
    if not isinstance(metadata, dict):
        return True
    for key, field in (("language_info", "name"), ("kernelspec", "language")):
        block = metadata.get(key)
        name = block.get(field) if isinstance(block, dict) else None
        if isinstance(name, str):
            return name.lower().startswith(("python", "ipython"))
    return True


def _python_of(text: str, number: int) -> tuple[str, Fault | None]:
    """The cell with everything that is not Python replaced, keeping all positions, and the fault if there is one."""
    shown = _UNPRINTABLE.sub(" ", text)
    if parse_error(shown) is None:
        return shown, None
    head = re.match(r"\s*%%(\w*)", shown)
    magic = head.group(1) if head else "time"
    if magic in _OTHER_MAGICS:
        return blank(shown), None
    replaced = without_magics(shown)
    error = parse_error(replaced)
    if error is None:
        return replaced, None
    if magic not in _PYTHON_MAGICS:
        return blank(shown), None
    detail = error.msg if isinstance(error, SyntaxError) else type(error).__name__
    line, column = place_of(error) if isinstance(error, SyntaxError) else (1, 1)
    message = f"Cell {number} is not valid Python ({detail}); it was not checked."
    return blank(shown), Fault(number, line, column, message)


def _source_places(raw: str) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """For each cell index: start and end of the string literals of its source. The JSON is known to be valid."""
    stack: list[str | int] = []  # the key or index of the current value, one for each container around it
    want_key = False
    key = ""
    pieces: list[tuple[int, int]] = []
    for match in _TOKEN.finditer(raw):
        mark = match.group()
        if mark in "{[":
            stack.append("" if mark == "{" else 0)
            want_key = mark == "{"
            if stack[:1] == ["cells"] and len(stack) == 3:
                pieces = []
        elif mark in "}]":
            stack.pop()
            want_key = False
            if stack[:1] == ["cells"] and len(stack) == 2 and isinstance(stack[1], int):
                yield stack[1], pieces
                pieces = []
        elif mark == ",":
            if isinstance(stack[-1], int):
                stack[-1] += 1
                want_key = False
            else:
                want_key = True
        elif mark == ":":
            want_key = False
        elif want_key:
            key = json.loads(mark)
            stack[-1] = key
            want_key = False
            if stack[:1] == ["cells"] and len(stack) == 3 and key == "source":
                pieces = []  # a duplicate key: the last one counts, as it does for json
        elif stack[:1] == ["cells"] and stack[2:3] == ["source"] and len(stack) <= 4:
            pieces.append(match.span())


def _origins(raw: str, pieces: tuple[tuple[int, int], ...], breaks: list[int]) -> Iterator[Origin]:
    """The place of each line of a cell, whose source is written in these string literals."""
    at_start = True  # a line that continues in the next literal keeps the place where it starts
    for start, end in pieces:
        for match in _WRITTEN_LINE.finditer(raw, start + 1, end - 1):
            line = match.group()
            if not line:
                continue
            if at_start:
                number = bisect_right(breaks, match.start())
                first = breaks[number - 1] if number else 0
                yield Origin(number + 1, match.start() - first + 1, line)
            at_start = line.endswith("\\n") or line.lower().endswith("\\u000a")


def _rewrite(raw: str, part: CellText, edits: list[Edit]) -> str:
    text, done, out = part.text, 0, []
    for edit in sorted(edits):
        out += [text[done : edit.start], edit.text]
        done = edit.end
    changed = "".join([*out, text[done:]])
    if not part.pieces:
        return raw
    old = [json.loads(raw[start:end]) for start, end in part.pieces]
    new = re.findall(r"[^\n]*\n|[^\n]+", changed) if part.in_list else [changed]
    ascii_only = raw.isascii()
    first = 0
    while first < min(len(old), len(new)) and old[first] == new[first]:
        first += 1
    last = 0
    while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
        last += 1
    added = [json.dumps(line, ensure_ascii=ascii_only) for line in new[first : len(new) - last]]
    removed = part.pieces[first : len(old) - last]
    if removed:
        start, end = removed[0][0], removed[-1][1]
        if not added:  # lines are only removed: remove one separator with them
            if last:
                end = part.pieces[len(old) - last][0]
            elif first:
                start = part.pieces[first - 1][1]
        return raw[:start] + _separator(raw, part.pieces).join(added) + raw[end:]
    separator = _separator(raw, part.pieces)
    if first:
        place = part.pieces[first - 1][1]
        return raw[:place] + "".join(separator + line for line in added) + raw[place:]
    place = part.pieces[0][0]
    return raw[:place] + "".join(line + separator for line in added) + raw[place:]


def _separator(raw: str, pieces: tuple[tuple[int, int], ...]) -> str:
    """The text between two lines of the cell's source."""
    if len(pieces) > 1:
        return raw[pieces[0][1] : pieces[1][0]]
    line_start = raw.rfind("\n", 0, pieces[0][0]) + 1
    before = raw[line_start : pieces[0][0]]
    return ",\n" + before if before.isspace() else ", "
