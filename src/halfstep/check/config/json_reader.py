"""JSON as configurations are written, read into a tree with places.

DeepSpeed reads its file with an hjson parser, so comments (`//`, `#`, `/* */`), commas before a closing bracket, commas
left out at the end of a line and names without quotes are all configurations that run. A bare word that is no
literal, `${STAGE}` or `<micro batch>`, is a value that another program fills in: it is read as unknown, not as a mistake.
`halfstep.precision.jsonc` reads the same files into plain values; here every value keeps its place, and a key given twice is kept twice.
"""

from __future__ import annotations

import json
import math
import re
from typing import NoReturn

from halfstep.check.config.node import UNKNOWN, Block, Entry, Items, Node, Scalar, Span, is_placeholder
from halfstep.errors import SettingError

__all__ = ["parse_json"]

_MAX_DEPTH = 100  # configurations nest four levels; 100 is some other file
_SKIP = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*|/\*[\s\S]*?\*/)+")
_STRING = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"')
_SINGLE = re.compile(r"'[^'\\\n]*(?:\\.[^'\\\n]*)*'")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?=[\s,\]}#/:]|\Z)")
# What templates leave for another program: ${x} {{x}} <x> %(x)s $X @X@ and words in capitals.
_TEMPLATE = re.compile(r"\$?\{\{.*?\}\}|\$\{[^}\n]*\}|<[^>\n]*>|%\(\w+\)[a-z]|\$\w+|@\w+@|[A-Z_][A-Z0-9_]+\b")
_BARE = re.compile(r"[^\s,:\[\]{}\"'#][^,\]}\n#]*")
_BARE_KEY = re.compile(r"[^\s,:\[\]{}\"'#/][^\s,:\[\]{}]*")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_WORDS: dict[str, object] = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": math.nan,
    "Infinity": math.inf,
    "-Infinity": -math.inf,
}


def parse_json(text: str, name: str) -> Node:
    """The tree of a JSON text; a `SettingError` with line and column where it cannot be read."""
    return _Reader(text, name).document()


class _Reader:
    """One pass over the text, with the position in it."""

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
            self.fail("something follows the end of the configuration", "remove it, or the bracket before it")
        return root

    def skip(self) -> bool:
        """Pass blanks and comments; whether a line ended among them."""
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
        match = _STRING.match(self.text, start) or _SINGLE.match(self.text, start) or _BARE_KEY.match(self.text, start)
        if not match:
            self.fail("a key is missing here", "write a key in quotes, or close the block with }")
        self.at = match.end()
        key = self.unquote(match.group())
        self.skip()
        if not self.text.startswith(":", self.at):
            self.fail(f"a colon is missing after the key {key!r}", "write one before its value")
        self.at += 1
        self.skip()
        self.bare = not match.group().startswith(('"', "'"))
        return Entry(key, Span(start, match.end()), self.node(depth + 1))

    def separator(self, closing: str, wanted: str) -> None:
        """Pass what stands between two members; hjson takes the end of a line for a comma."""
        new_line = self.skip()
        if self.text.startswith(",", self.at):
            self.at += 1
            self.skip()
            if self.text.startswith(",", self.at):
                self.fail("two commas follow each other", f"remove one, or write {wanted} between them")
        elif not self.text.startswith(closing, self.at) and not (new_line and self.at < len(self.text)):
            self.fail(f"a comma or {closing} is missing", "write it here")

    def scalar(self) -> Scalar:
        start = self.at
        if self.text.startswith("'''", start):
            end = self.text.find("'''", start + 3)
            if end < 0:
                self.fail("the text that starts here with ''' has no end", "add '''")
            return self.found(start, end + 3, self.text[start + 3 : end])
        match = _STRING.match(self.text, start) or _SINGLE.match(self.text, start)
        if match:
            text = self.unquote(match.group())
            return self.found(start, match.end(), UNKNOWN if is_placeholder(text) else text)
        match = _NUMBER.match(self.text, start)
        if match:
            return self.found(start, match.end(), self.number(match.group()))
        match = _TEMPLATE.match(self.text, start) or _BARE.match(self.text, start)
        if not match:
            self.fail("a value is missing here", "write one, or remove the key")
        word = match.group().rstrip()
        if word in _PYTHON:
            self.fail(f"{word} is Python's spelling", f"write {_PYTHON[word]}, as JSON does")
        if word not in _WORDS and not self.bare and not _TEMPLATE.fullmatch(word):
            self.fail("a text without quotes", "put it in quotes")
        return self.found(start, start + len(word), _WORDS.get(word, UNKNOWN))

    def found(self, start: int, end: int, value: object) -> Scalar:
        self.at = end
        return Scalar(Span(start, end), value, self.text[start:end])

    def number(self, text: str) -> object:
        try:
            return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
        except ValueError:  # Python refuses to read integers of thousands of digits
            self.fail(f"the number {text[:20]}... of {len(text)} characters cannot be read", "write a smaller one")

    def unquote(self, text: str) -> str:
        if text.startswith('"'):
            try:
                return str(json.loads(text, strict=False))
            except ValueError:
                return text[1:-1]  # an escape JSON does not have
        return text[1:-1] if text.startswith("'") else text

    def fail(self, what: str, advice: str) -> NoReturn:
        line = self.text.count("\n", 0, self.at) + 1
        column = self.at - self.text.rfind("\n", 0, self.at)
        near = self.text[self.at : self.at + 40].split("\n")[0]
        seen = f", near {near!r}" if near else ", at the end of the text"
        raise SettingError(f"{self.name}, line {line}, column {column}: {what}{seen}; {advice}.")
