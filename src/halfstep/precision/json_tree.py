"""Reads JSON as configurations are written, into a tree with positions or into plain values.

DeepSpeed reads its file with an hjson parser, so comments (`//`, `#`, `/* */`), trailing commas, commas omitted at the end
of a line and keys without quotes all occur in configurations that run. `parse_json` is the only parser of them:

    parse_json   the tree, for `halfstep check`: every value has its position, and a duplicate key appears twice
    load_json    the plain values of that tree, for `Policy.from_deepspeed`: a duplicate key is an error

A bare word that is no literal, such as `${STAGE}` or `<micro batch>`, is a value that another program fills in: the tree
has `UNKNOWN` there, and the plain value is the text as written.

Every character is read a bounded number of times, so the time is linear in the length of the text, whatever it contains.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

from halfstep.errors import SettingError
from halfstep.precision.node import UNKNOWN, Block, Entry, Items, Node, Scalar, Span, is_placeholder

__all__ = ["MAX_BYTES", "load_json", "parse_json", "read_text"]

MAX_BYTES = 4 * 2**20  # a configuration is kilobytes; a file larger than this is something else
_MAX_DEPTH = 100  # configurations nest four levels; a text that nests 100 is something else
_SKIP = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*|/\*[\s\S]*?\*/)+")
_STRING = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"')
_SINGLE = re.compile(r"'[^'\\\n]*(?:\\.[^'\\\n]*)*'")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?=[\s,\]}#/:]|\Z)")
# Placeholders of templates: ${x} {{x}} <x> %(x)s $X @X@ and words in capitals.
_TEMPLATE = re.compile(
    r"\$?\{\{.*?\}\}|\$\{[^}\n]*\}|<[^>\n]*>|%\(\w+\)[a-z]|\$\w+|@\w+@|[A-Z_]\w*_\w*[A-Z]\b|[A-Z_][A-Z0-9_]+\b"
)
_BARE = re.compile(r"[^\s,:\[\]{}\"'#][^,\]}\n#]*")
_BARE_KEY = re.compile(r"[^\s,:\[\]{}\"'#/][^\s,:\[\]{}]*")
_LITERAL = re.compile(r"(?:true|false|null|NaN|-?Infinity|True|False|None)(?=[ \t\r]*(?:[,\]}\n#]|//|/\*|\Z))")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_LITERALS: dict[str, object] = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": math.nan,
    "Infinity": math.inf,
    "-Infinity": -math.inf,
}


def parse_json(text: str, name: str) -> Node:
    """Parse a JSON text into a tree; raises `SettingError` with line and column if it cannot be parsed."""
    return _Parser(text, name).document()


def load_json(source: str | Path) -> Any:
    """Read the plain values of a JSON file or a JSON text.

    A `Path` is a file. A string is JSON text if it contains a `{` or a line break, and the path of a file otherwise.
    Any failure (no such file, not UTF-8, not JSON, a duplicate key) raises `SettingError`.
    """
    text, name = read_text(source)
    return _plain(parse_json(text, name), text, name)


def read_text(source: str | Path) -> tuple[str, str]:
    """The text that `load_json` parses, and its name in messages."""
    if isinstance(source, str) and ("{" in source or "\n" in source):
        return source, "JSON text"
    return _read(Path(source)), str(source)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise SettingError(f"Cannot read {str(path)!r}: {reason}. Pass a JSON file, or JSON text in braces.") from None
    if len(data) > MAX_BYTES:
        raise SettingError(
            f"{str(path)!r} has more than {MAX_BYTES} bytes; a configuration is far smaller. Is it the right file?"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(f"{str(path)!r} is not UTF-8 text (see byte {error.start}); save it as UTF-8.") from None


def _plain(node: Node, text: str, name: str) -> Any:
    if isinstance(node, Items):
        return [_plain(item, text, name) for item in node.items]
    if isinstance(node, Scalar):
        return _unquote(node.text) if node.value is UNKNOWN else node.value
    entries: dict[str, Entry] = {}
    for entry in node.entries:
        first = entries.setdefault(entry.key, entry)
        if first is not entry:
            line, column = _position(text, entry.key_span.start)
            first_line, first_column = _position(text, first.key_span.start)
            raise SettingError(
                f"{name}, line {line}, column {column}: key {entry.key!r} appears twice in the same block, first at "
                f"line {first_line}, column {first_column}; remove one of them."
            )
    return {key: _plain(entry.value, text, name) for key, entry in entries.items()}


def _position(text: str, offset: int) -> tuple[int, int]:
    """The line and column of an offset, both from 1."""
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def _unquote(text: str) -> str:
    if text.startswith('"'):
        try:
            return str(json.loads(text, strict=False))
        except ValueError:
            return text[1:-1]  # an escape that JSON does not have
    return text[1:-1] if text.startswith("'") else text


class _Parser:
    """One pass over the text with a current offset."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.at = 1 if text.startswith("\ufeff") else 0
        self.bare = False  # whether the last key had no quotes: then its value needs none either

    def document(self) -> Node:
        self.skip()
        root = self.node(0)
        self.skip()
        if self.at < len(self.text):
            self.fail("text follows the end of the configuration", "remove it, or the bracket before it")
        return root

    def skip(self) -> bool:
        """Skip whitespace and comments; returns whether they contain the end of a line."""
        match = _SKIP.match(self.text, self.at)
        self.at = match.end() if match else self.at
        if self.text.startswith("/*", self.at):
            self.fail("the comment that starts here with /* has no end", "add */")
        return bool(match and "\n" in match.group())

    def node(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            self.fail(
                f"brackets are nested more than {_MAX_DEPTH} deep", "flatten it; a configuration needs four levels"
            )
        char = self.text[self.at : self.at + 1]
        if char == "{" and not self.text.startswith("{{", self.at):
            return self.block(depth)
        if char == "[":
            return self.items(depth)
        return self.scalar()

    def block(self, depth: int) -> Block:
        start = self.at
        self.at += 1
        entries: list[Entry] = []
        self.skip()
        while not self.text.startswith("}", self.at):
            entries.append(self.entry(depth))
            self.separator("}", "a key in quotes")
        self.at += 1
        return Block(Span(start, self.at), tuple(entries))

    def items(self, depth: int) -> Items:
        start = self.at
        self.at += 1
        items: list[Node] = []
        self.skip()
        while not self.text.startswith("]", self.at):
            items.append(self.node(depth + 1))
            self.separator("]", "a value")
        self.at += 1
        return Items(Span(start, self.at), tuple(items))

    def entry(self, depth: int) -> Entry:
        start = self.at
        match = self.quoted(start) or _BARE_KEY.match(self.text, start)
        if not match:
            self.fail("a key is missing here", "write a key in quotes, or close the block with }")
        self.at = match.end()
        key = _unquote(match.group())
        self.skip()
        if not self.text.startswith(":", self.at):
            self.fail(f"a colon is missing after the key {key!r}", "write one before its value")
        self.at += 1
        self.skip()
        self.bare = not match.group().startswith(('"', "'"))
        return Entry(key, Span(start, match.end()), self.node(depth + 1))

    def separator(self, closing: str, expected: str) -> None:
        """Skip the separator between two members; in hjson the end of a line counts as a comma."""
        new_line = self.skip()
        if self.text.startswith(",", self.at):
            self.at += 1
            self.skip()
            if self.text.startswith(",", self.at):
                self.fail("two commas in a row", f"remove one, or write {expected} between them")
        elif not self.text.startswith(closing, self.at) and not (new_line and self.at < len(self.text)):
            self.fail(f"a comma or {closing} is missing", "write it here")

    def scalar(self) -> Scalar:
        start = self.at
        if self.text.startswith("'''", start):
            end = self.text.find("'''", start + 3)
            if end < 0:
                self.fail("the string that starts here with ''' has no end", "add '''")
            return self.make_scalar(end + 3, self.text[start + 3 : end])
        if match := self.quoted(start):
            text = _unquote(match.group())
            return self.make_scalar(match.end(), UNKNOWN if is_placeholder(text) else text)
        if match := _NUMBER.match(self.text, start):
            return self.make_scalar(match.end(), self.number(match.group()))
        match = _LITERAL.match(self.text, start) or _TEMPLATE.match(self.text, start) or _BARE.match(self.text, start)
        if not match:
            self.fail("a value is missing here", "write one, or remove the key")
        word = match.group().rstrip()
        if word in _PYTHON:
            self.fail(f"{word} is Python's spelling", f"write {_PYTHON[word]}, as JSON does")
        if word not in _LITERALS and not self.bare and not _TEMPLATE.fullmatch(word):
            self.fail("a text without quotes", "put it in quotes")
        return self.make_scalar(start + len(word), _LITERALS.get(word, UNKNOWN))

    def make_scalar(self, end: int, value: object) -> Scalar:
        start, self.at = self.at, end
        return Scalar(Span(start, end), value, self.text[start:end])

    def quoted(self, start: int) -> re.Match[str] | None:
        """The quoted string at an offset; None if no quote is there."""
        quote = self.text[start : start + 1]
        if quote not in {'"', "'"}:
            return None
        match = (_STRING if quote == '"' else _SINGLE).match(self.text, start)
        if match is None:
            self.fail(f"the string that starts here has no closing {quote} on its line", f"add {quote}")
        return match

    def number(self, text: str) -> object:
        try:
            return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
        except ValueError:  # Python does not convert integers of thousands of digits
            self.fail(f"the number {text[:20]}... of {len(text)} characters cannot be read", "write a smaller one")

    def fail(self, problem: str, advice: str) -> NoReturn:
        line, column = _position(self.text, self.at)
        near = self.text[self.at : self.at + 40].split("\n")[0]
        context = f", near {near!r}" if near else ", at the end of the text"
        raise SettingError(f"{self.name}, line {line}, column {column}: {problem}{context}; {advice}.")
