"""Files that a notebook writes: what follows `%%writefile train.py` in a cell is a script or a configuration of its own.

Such a cell shares no variable with the others, so it is read as a separate file, whose lines are still counted in the
cell. Cells that append to a file (`-a`) continue it. A text that does not parse is left out: it may be a template.
"""

from __future__ import annotations

from collections.abc import Iterable

from halfstep.check.files.repair import parse_error
from halfstep.check.files.source import Cell, Source, language_of
from halfstep.check.regex import regex

__all__ = ["written_files"]

_HEAD = regex(r"\s*%%(?:writefile|file)[ \t]+([^\n]*)")


def written_files(path: str, cells: Iterable[tuple[int, str]]) -> tuple[Source, ...]:
    """The scripts and configurations that the cells of a notebook write, each cell with its number."""
    files: list[Source] = []
    last: dict[str, int] = {}  # the newest version of each file
    for number, text in cells:
        head = _HEAD.match(text)
        words = head[1].split() if head else []
        names = [word.strip("\"'") for word in words if not word.startswith("-")]
        language = language_of(names[0]) if len(names) == 1 else None
        if head is None or language is None or language == "notebook":
            continue
        # The lines up to the magic stay, blank, so that lines are counted as in the cell.
        body = "\n" * head[0].count("\n") + text[head.end() :].replace("\r", " ") + "\n"
        num_lines = body.count("\n")
        if {"-a", "--append"} & {*words} and names[0] in last:
            index = last[names[0]]
            before = files[index]
            cell = Cell(number, before.text.count("\n") + 1, num_lines)
            files[index] = Source(path, before.text + body, language, (*before.cells, cell))
        else:
            last[names[0]] = len(files)
            files.append(Source(path, body, language, (Cell(number, 1, num_lines),)))
    return tuple(f for f in files if f.language != "python" or parse_error(f.text) is None)
