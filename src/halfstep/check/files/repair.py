"""Lines that are not Python 3, replaced so that the rest of a script can be read.

Scripts exported from notebooks contain IPython's own syntax (`%magic`, `!shell`, `name?`), old ones the `print` statement,
and unfinished merges the markers of version control. Where such a line stands alone, what it was meant to be does not
matter for training: it is replaced, character for character, by a statement that does nothing, so that every position
stays valid. A merge is read as its first side.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from halfstep.check.files.python import parse_python
from halfstep.check.regex import regex

__all__ = ["Repair", "blank", "parse_error", "repair", "without_magics"]

# Words that IPython accepts as magics without the percent sign.
_AUTOMAGIC = r"(?:pip3?|conda|mamba|cd|ls|mkdir|rm|cp|mv|cat|pwd)\s+[^=(.\s]"
_MAGIC = regex(rf"[ \t]*(?:%\w|!|\?|{_AUTOMAGIC}|[\w.]+\s*=\s*(?:!|%\w)|[\w.]+\?\??[ \t]*$)")
_ENVIRONMENT = regex(r"%(?:set_)?env (\w+=[\w./-]+)")
_PRINT = regex(r"[ \t]*print\b[ \t]*(?![ \t=(.,\[]).")
_CONFLICT = regex(r"<{7} |={7}$|>{7} |\|{7} ")
# Lines without which no repair is tried: the parser is the judge, but most files need not be parsed twice.
# It begins with the line break, because the regex engine searches for a literal prefix first: a third of the time.
_CANDIDATE = regex(
    rf"\n(?:[ \t]*+(?=[!?%pcmlr])(?:[!?]|%\w|%%|{_AUTOMAGIC}|print[ \t]+[^ \t=(.,\[])|[\w.]+\s*=\s*[!%]|<<<<<<< )"
)


@dataclass(frozen=True)
class Repair:
    """A text that parses, the first line that was replaced, and what that line is."""

    text: str
    line: int
    kind: str


def repair(text: str) -> Repair | None:
    """The script with lines that are not Python 3 replaced; None if it parses as it is or in no way."""
    if not _CANDIDATE.search(f"\n{text}") or parse_error(text) is None:
        return None
    changed = without_magics(_without_prints(_first_sides(text)))
    if changed == text or parse_error(changed) is not None:
        return None
    pairs = zip(text.split("\n"), changed.split("\n"), strict=True)
    number, line = next((number, old) for number, (old, new) in enumerate(pairs, 1) if old != new)
    kind = "a merge marker" if _CONFLICT.match(line) else "Python 2" if _PRINT.match(line) else "IPython syntax"
    return Repair(changed, number, kind)


def parse_error(text: str) -> Exception | None:
    """Why the text does not parse; None if it does."""
    try:
        parse_python(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return error
    return None


def blank(text: str) -> str:
    """Spaces in place of the text, with its line breaks."""
    return re.sub(r"[^\n]", " ", text)


def without_magics(text: str) -> str:
    """The text with the lines of IPython's own syntax replaced by statements that do nothing."""
    lines = []
    continued = False
    for line in text.split("\n"):
        magic = continued or _MAGIC.match(line) or line.lstrip().startswith("%%")
        if magic:
            lines.append(blank(line) if continued else _nothing(line))
        else:
            lines.append(line)
        continued = bool(magic) and line.rstrip().endswith("\\")
    return "\n".join(lines)


def _nothing(line: str) -> str:
    """A statement of the same length and indentation that does nothing; `"NAME=value"` for a magic that sets a variable of the environment."""
    indent = len(line) - len(line.lstrip())
    rest = len(line) - indent
    if setting := _ENVIRONMENT.fullmatch(line.strip()):
        return line[:indent] + f'"{setting[1]}"'.ljust(rest)
    return line[:indent] + "0" + " " * (rest - 1) if rest else line


def _without_prints(text: str) -> str:
    return "\n".join(_nothing(line) if _PRINT.match(line) else line for line in text.split("\n"))


def _first_sides(text: str) -> str:
    """The text with merge markers and the second side of each conflict blanked."""
    if "\n<<<<<<< " not in "\n" + text:
        return text
    lines = []
    in_conflict = in_other_side = False
    for line in text.split("\n"):
        mark = line[:7] if _CONFLICT.match(line) else ""
        in_conflict = in_conflict or mark == "<<<<<<<"
        in_other_side = in_conflict and (in_other_side or mark in {"=======", "|||||||"})
        lines.append(blank(line) if in_other_side or (mark and in_conflict) else line)
        if mark == ">>>>>>>":
            in_conflict = in_other_side = False
    return "\n".join(lines)
