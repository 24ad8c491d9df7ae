"""A configuration as a tree in which every value has its position in the text.

Four readers build it (JSON, YAML, and dictionaries and calls in Python), and check rules see no difference. A position is
a pair of character offsets into the text, from which lines, columns and edits follow:

    Block    keys in the order written, a duplicate key twice; `open` if there may be more keys that cannot be read
    Items    a list
    Scalar   a value, or `UNKNOWN`: a variable, a placeholder such as ${STAGE}, anything known only at run time

Rules ask for values and get `UNKNOWN` wherever the text does not decide, so that a rule reports nothing by default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["UNKNOWN", "Block", "Entry", "Items", "Node", "Scalar", "Span", "Unknown", "is_placeholder", "walk"]


class Unknown:
    """The value of anything that the text does not decide."""

    def __repr__(self) -> str:
        return "UNKNOWN"

    def __bool__(self) -> bool:
        return False


UNKNOWN = Unknown()

# Placeholders of templates: ${x} $X {{x}} {x} <x> %(x)s @x@. "auto" is not one of them: it is Hugging Face's.
_PLACEHOLDER = re.compile(r"\$\{|\{\{|\{%|\$\(|^\$\w+$|^\{[\w.\- ]+\}$|^<[^<>]*>$|%\(\w+\)|^%\w+%$|^@\w+@$|^__\w+__$")


def is_placeholder(text: str) -> bool:
    """Whether a string is a placeholder for a value that is filled in later."""
    return bool(_PLACEHOLDER.search(text))


@dataclass(frozen=True)
class Span:
    """The characters of the text from offset `start` up to `end`."""

    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Scalar:
    """One value and its position; `text` is how it is written."""

    span: Span
    value: object
    text: str = ""


@dataclass(frozen=True, eq=False)
class Items:
    """A list of nodes."""

    span: Span
    items: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Entry:
    """A key with its value; `span` covers both, without the comma that follows."""

    key: str
    key_span: Span
    value: Node

    @property
    def span(self) -> Span:
        """From the start of the key to the end of the value."""
        return Span(self.key_span.start, max(self.value.span.end, self.key_span.end))


@dataclass(frozen=True, eq=False)
class Block:
    """A mapping: its entries in the order written, and whether there may be more that cannot be read."""

    span: Span
    entries: tuple[Entry, ...]
    open: bool = False
    call: bool = False  # keyword arguments of a call, not a dictionary

    def entry(self, key: str) -> Entry | None:
        """The effective entry of a key: the last one, as in every parser that accepts duplicates."""
        return next((entry for entry in reversed(self.entries) if entry.key == key), None)

    def __contains__(self, key: object) -> bool:
        return any(entry.key == key for entry in self.entries)

    def keys(self) -> tuple[str, ...]:
        """Every key once, in order."""
        return tuple(dict.fromkeys(entry.key for entry in self.entries))


Node = Scalar | Items | Block


def walk(root: Node) -> Iterator[Node]:
    """Every node once, outer ones first; shared nodes (YAML aliases) are not visited again."""
    visited: set[int] = set()
    todo: list[Node] = [root]
    while todo:
        node = todo.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        yield node
        if isinstance(node, Block):
            todo.extend(entry.value for entry in reversed(node.entries))
        elif isinstance(node, Items):
            todo.extend(reversed(node.items))
