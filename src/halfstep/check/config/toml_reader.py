"""TOML parsed into a tree with positions.

tomllib decides whether the text is valid and what each value is, but keeps no positions. So a second pass over the valid
text finds where keys and values are written: it follows table headers, dotted keys, inline tables and arrays, and hands
every plain value back to tomllib. A table that is written in pieces is one block with the entries of all of them.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field

from halfstep.check.regex import regex
from halfstep.errors import SettingError
from halfstep.precision.node import UNKNOWN, Block, Entry, Items, Node, Scalar, Span, is_placeholder

__all__ = ["parse_toml"]

_MAX_DEPTH = 100
_SKIP = regex(r"(?:[ \t\r\n]+|#[^\n]*)+")
_BLANK = regex(r"[ \t]*")
_STRING = regex(
    r'"""(?:[^"\\]|\\[\s\S]|"{1,2}(?!"))*"{3,5}|'
    r"'''(?:[^']|'{1,2}(?!'))*'{3,5}|"
    r'"(?:[^"\\\n]|\\.)*"|'
    r"'[^'\n]*'"
)
_BARE = regex(r"[^\s,\]\[{}#=]+(?: [0-9][^\s,\]}#]*)?")  # a date and a time may be separated by a blank
_BARE_KEY = regex(r"[A-Za-z0-9_-]+")
_PLACE = regex(r"\(at line (\d+), column (\d+)\)")


@dataclass
class _Table:
    """A table under construction: header or inline, or one made by a dotted key."""

    start: int
    end: int
    values: dict[str, _Value] = field(default_factory=dict)


@dataclass
class _Value:
    """What a key stands for, and where the key was first written."""

    key_span: Span
    node: Node | _Table | list[_Table]


def parse_toml(text: str, name: str) -> Block:
    """The tree of a TOML text; `SettingError` with line and column if it cannot be parsed."""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = _PLACE.search(str(error))
        at = f", line {place.group(1)}, column {place.group(2)}" if place else ""
        problem = _PLACE.sub("", str(error)).removesuffix("(at end of document)").strip()
        raise SettingError(f"{name}{at}: {problem}; correct the TOML there.") from None
    except (RecursionError, ValueError) as error:  # ValueError: a number with thousands of digits
        raise SettingError(f"{name}: invalid TOML: {type(error).__name__}.") from None
    try:
        return _Reader(text).document()
    except RecursionError:
        raise SettingError(f"{name}: nested more than {_MAX_DEPTH} levels deep; a configuration needs four.") from None


class _Reader:
    """Walks over a valid TOML text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0

    def document(self) -> Block:
        root = _Table(0, len(self.text))
        table = root
        while True:
            self.skip()
            if self.position >= len(self.text):
                return _block(root)
            if self.text[self.position] == "[":
                table = self.header(root)
            else:
                self.assignment(table)

    def skip(self) -> None:
        match = _SKIP.match(self.text, self.position)
        if match:
            self.position = match.end()

    def skip_blanks(self) -> None:
        match = _BLANK.match(self.text, self.position)
        if match:
            self.position = match.end()

    def header(self, root: _Table) -> _Table:
        """The table that a header such as [a.b] or [[a.b]] opens."""
        start = self.position
        is_array = self.text.startswith("[[", start)
        self.position += 2 if is_array else 1
        keys = self.keys()
        self.position += 2 if is_array else 1
        parent = root
        for key, span in keys[:-1]:
            parent = _inner(parent, key, span)
        key, span = keys[-1]
        if not is_array:
            table = _inner(parent, key, span)
            table.end = max(table.end, self.position)
            return table
        table = _Table(start, self.position)
        value = parent.values.setdefault(key, _Value(span, []))
        if isinstance(value.node, list):
            value.node.append(table)
        return table

    def keys(self) -> list[tuple[str, Span]]:
        """The parts of a key, from the current position to just after it."""
        keys = []
        while True:
            self.skip_blanks()
            start = self.position
            quoted = _STRING.match(self.text, start)
            match = quoted or _BARE_KEY.match(self.text, start)
            end = match.end() if match else start + 1
            written = self.text[start:end]
            keys.append((str(_plain(written)) if quoted else written, Span(start, end)))
            self.position = end
            self.skip_blanks()
            if not self.text.startswith(".", self.position):
                return keys
            self.position += 1

    def assignment(self, table: _Table) -> None:
        keys = self.keys()
        self.position += 1  # the equals sign
        self.skip_blanks()
        value = self.value()
        for key, span in keys[:-1]:
            table = _inner(table, key, span)
            table.end = max(table.end, value.span.end)
        key, span = keys[-1]
        table.values[key] = _Value(span, value)
        table.end = max(table.end, value.span.end)

    def value(self) -> Node:
        start = self.position
        first = self.text[start : start + 1]
        if first in {"[", "{"}:
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise RecursionError
            node = self.array() if first == "[" else self.inline_table()
            self.depth -= 1
            return node
        match = _STRING.match(self.text, start) or _BARE.match(self.text, start)
        self.position = match.end() if match else start + 1
        span = Span(start, self.position)
        written = self.text[start : self.position]
        value = _plain(written)
        if isinstance(value, str) and is_placeholder(value):
            value = UNKNOWN
        return Scalar(span, value, written)

    def array(self) -> Items:
        start = self.position
        self.position += 1
        items: list[Node] = []
        while True:
            self.skip()
            if self.text.startswith(",", self.position):
                self.position += 1
            elif self.text.startswith("]", self.position) or self.position >= len(self.text):
                self.position += 1
                return Items(Span(start, self.position), tuple(items))
            else:
                items.append(self.value())

    def inline_table(self) -> Block:
        table = _Table(self.position, self.position)
        self.position += 1
        while True:
            self.skip()
            if self.text.startswith(",", self.position):
                self.position += 1
            elif self.text.startswith("}", self.position) or self.position >= len(self.text):
                self.position += 1
                table.end = self.position
                return _block(table)
            else:
                self.assignment(table)


def _inner(table: _Table, key: str, span: Span) -> _Table:
    """The table below a key, made if it is new; the last one of an array of tables."""
    value = table.values.setdefault(key, _Value(span, _Table(span.start, span.end)))
    node = value.node[-1] if isinstance(value.node, list) and value.node else value.node
    return node if isinstance(node, _Table) else _Table(span.start, span.end)


def _block(table: _Table) -> Block:
    entries = tuple(Entry(key, value.key_span, _node(value.node)) for key, value in table.values.items())
    return Block(Span(table.start, table.end), entries)


def _node(node: Node | _Table | list[_Table]) -> Node:
    if isinstance(node, list):
        items = tuple(_block(table) for table in node)
        return Items(Span(items[0].span.start, items[-1].span.end), items)
    return _block(node) if isinstance(node, _Table) else node


def _plain(written: str) -> object:
    """The value of a literal; the text is valid TOML, so a failure would be a literal this reader cut wrongly."""
    try:
        return tomllib.loads(f"value = {written}")["value"]
    except ValueError:
        return UNKNOWN
