"""Text edits from positions in the syntax tree.

`ast` counts columns in UTF-8 bytes, editors and `Edit` count characters; they differ after a non-ASCII character. `Lines`
converts, and builds the edits that fixes consist of.
"""

from __future__ import annotations

import ast
import bisect
import itertools
import re
from collections.abc import Sequence

from halfstep.check.finding import Edit
from halfstep.check.regex import regex

__all__ = ["Lines"]

_BREAK = regex(r"\r\n|\r|\n")


class Lines:
    """A text by its lines, to convert positions into offsets."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(match.end() for match in _BREAK.finditer(text))]
        self._ascii = text.isascii()
        self._characters: dict[int, Sequence[int]] = {}  # by line, so that a long line is decoded once

    def offset(self, line: int, column: int) -> int:
        """The character offset of a line (from 1) and a column in UTF-8 bytes (from 0)."""
        start = self.starts[line - 1]
        if self._ascii:
            return start + column
        if line not in self._characters:
            end = self.starts[line] if line < len(self.starts) else len(self.text)
            self._characters[line] = _character_starts(self.text[start:end])
        return start + bisect.bisect_left(self._characters[line], column)

    def column(self, line: int, column: int) -> int:
        """The character column, from 1, of a column in UTF-8 bytes."""
        return self.offset(line, column) - self.starts[line - 1] + 1

    def span(self, node: ast.expr | ast.stmt | ast.alias | ast.keyword) -> tuple[int, int]:
        """The offsets where a node starts and ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def source(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def replace(self, node: ast.expr | ast.stmt | ast.alias, text: str) -> Edit:
        """Replace a node with a text."""
        start, end = self.span(node)
        return Edit(start, end, text)

    def alone(self, node: ast.stmt) -> bool:
        """Whether a statement is alone on its lines: only spaces before it, only a comment after it."""
        start, end = self.span(node)
        before = self.text[self.starts[node.lineno - 1] : start]
        tail = self.text[end : self._line_end(node.end_lineno or node.lineno)].strip()
        return not before.strip(" \t") and (not tail or tail.startswith("#"))

    def alone_before(self, node: ast.stmt) -> bool:
        """Whether a statement is the first on its line, so that a line can be inserted before it."""
        return not self.text[self.starts[node.lineno - 1] : self.span(node)[0]].strip(" \t")

    def indent_unit(self, node: ast.stmt) -> str:
        """One more level of indentation for a statement: a tab where its line has tabs, or the first block of the text."""
        indent = self.text[self.starts[node.lineno - 1] : self.span(node)[0]]
        match = re.search(r":[ \t]*(?:#[^\r\n]*)?(?:\r\n|\r|\n)([ \t]+)\S", self.text)
        first = indent or (match.group(1) if match else "")
        return "\t" if first.startswith("\t") else "    "

    def before(self, node: ast.stmt, text: str) -> Edit:
        """A new line before a statement that is alone on its lines, with its indentation."""
        start = self.starts[node.lineno - 1]
        return Edit(start, start, self._indented(node, text) + self._break())

    def after(self, node: ast.stmt, text: str) -> Edit:
        """A new line after a statement that is alone on its lines, with its indentation."""
        end = self._line_end(node.end_lineno or node.lineno)
        return Edit(end, end, self._break() + self._indented(node, text))

    def _indented(self, node: ast.stmt, text: str) -> str:
        indent = self.text[self.starts[node.lineno - 1] : self.offset(node.lineno, node.col_offset)]
        return self._break().join(indent + line for line in text.split("\n"))

    def _line_end(self, line: int) -> int:
        end = self.starts[line] if line < len(self.starts) else len(self.text)
        return self.starts[line - 1] + len(self.text[self.starts[line - 1] : end].rstrip("\r\n"))

    def _break(self) -> str:
        first = _BREAK.search(self.text)
        return first.group(0) if first else "\n"


def _character_starts(row: str) -> Sequence[int]:
    """The UTF-8 byte offset at which each character of a line starts, and the end of the last."""
    if row.isascii():
        return range(len(row) + 1)
    return [0, *itertools.accumulate(len(c.encode(errors="surrogatepass")) for c in row)]
