"""A configuration as a tree that remembers where everything stands.

Four readers make it (JSON, YAML, and dictionaries and calls in Python), and rules see no difference. A place is a pair
of character offsets into the text, from which lines, columns and edits follow:

    Block    keys in the order written, a key given twice kept twice; `open` where keys that cannot be read may follow
    Items    a list
    Scalar   a value, or `UNKNOWN`: a variable, a placeholder such as ${STAGE}, anything that only a run decides

Rules ask for values and get `UNKNOWN` wherever the text does not decide, so that silence is the default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["UNKNOWN", "Block", "Entry", "Items", "Node", "Scalar", "Span", "Unknown", "is_placeholder", "walk"]


class Unknown:
    """The value of whatever the text does not decide."""

    def __repr__(self) -> str:
        return "UNKNOWN"

    def __bool__(self) -> bool:
        return False


UNKNOWN = Unknown()

# ${x} $X {{x}} {x} <x> %(x)s @x@: what templates leave for another program to fill in. "auto" is Hugging Face's.
_PLACEHOLDER = re.compile(r"\$\{|\{\{|\{%|\$\(|^\$\w+$|^\{[\w.\- ]+\}$|^<[^<>]*>$|%\(\w+\)|^%\w+%$|^@\w+@$|^__\w+__$")


def is_placeholder(text: str) -> bool:
    """Whether a string stands for a value that is filled in later."""
    return bool(_PLACEHOLDER.search(text))


@dataclass(frozen=True)
class Span:
    """The characters from `start` up to `end` of the text."""

    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Scalar:
    """One value and its place; `text` is how it was written."""

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
    """A key with its value; `span` covers both, without the comma after them."""

    key: str
    key_span: Span
    value: Node

    @property
    def span(self) -> Span:
        """From the start of the key to the end of the value."""
        return Span(self.key_span.start, max(self.value.span.end, self.key_span.end))


@dataclass(frozen=True, eq=False)
class Block:
    """A mapping: entries in the order written, and whether there may be more that cannot be read."""

    span: Span
    entries: tuple[Entry, ...]
    open: bool = False
    call: bool = False  # keyword arguments of a call, not a dictionary

    def entry(self, key: str) -> Entry | None:
        """The entry that counts for a key: the last, as every parser that accepts two of them takes it."""
        return next((entry for entry in reversed(self.entries) if entry.key == key), None)

    def __contains__(self, key: object) -> bool:
        return any(entry.key == key for entry in self.entries)

    def keys(self) -> tuple[str, ...]:
        """Every key once, in order."""
        return tuple(dict.fromkeys(entry.key for entry in self.entries))


Node = Scalar | Items | Block


def walk(root: Node) -> Iterator[Node]:
    """Every node once, outer ones first; shared nodes (YAML aliases) are not visited again."""
    seen: set[int] = set()
    todo: list[Node] = [root]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, Block):
            todo.extend(entry.value for entry in reversed(node.entries))
        elif isinstance(node, Items):
            todo.extend(reversed(node.items))
