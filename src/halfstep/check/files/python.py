r"""Python text to a syntax tree, also where the text is newer than this interpreter.

A checker often runs under an older Python than the script it checks. A text that does not parse is rewritten, character
for character, into older syntax and parsed again, so that every position stays valid:

    f"{row["loss"]}"  f"{'\n'.join(rows)}"      3.12, PEP 701   nested strings get the other quote; text in them is blurred
    f"{f'{row['loss']}.pt'}"                    3.12, PEP 701   the same for a quote that an inner f-string contains
    t"{loss}"                                   3.14, PEP 750   read as an f-string
    type Batch = dict[str, Tensor]              3.12, PEP 695   read as an assignment
    def f[T](x: T)    class A[T]                3.12, PEP 695   the type parameters are blanked
    except KeyError, ValueError:                3.14, PEP 758   read as one expression
    lazy import torch                           3.15, PEP 810   read as an import

The rewritten text is used only if the original does not parse, so it never changes the meaning of a text that does.
"""

from __future__ import annotations

import ast
import re
import symtable

from halfstep.check.regex import regex

__all__ = ["parse_python", "place_of", "repeated_keyword", "require_python", "to_older_syntax"]

_TOKEN = regex(
    r"""(?P<comment>\#[^\n]*)
    |(?P<prefix>(?<!\w)[rbuftRBUFT]{1,2})?(?P<quote>\"\"\"|'''|"|')
    |(?P<word>^[ \t]*(?:type|lazy)(?=[ \t]+\w)|\b(?:def|class)[ \t]+\w+[ \t]*(?=\[)|^[ \t]*except\b\*?)""",
    re.VERBOSE | re.MULTILINE,
)
_TYPE = regex(r"[ \t]*type([ \t]+)\w+[ \t]*(?=[=\[])")
_LAZY = regex(r"[ \t]*lazy([ \t]+)(?:import|from)\b")
_NESTED = regex(r"""((?<!\w)[rbuftRBUFT]{0,2}|)(\"\"\"|'''|"|')""")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_MAX_DEPTH = 20  # of f-strings inside f-strings


def parse_python(text: str, name: str = "<text>") -> ast.Module:
    """The syntax tree; `SyntaxError` or `ValueError` of the original text if no reading of it parses."""
    try:
        return ast.parse(text, filename=name)
    except SyntaxError as error:
        rewritten = to_older_syntax(text)
        if rewritten == text:
            raise
        try:
            return ast.parse(rewritten, filename=name)
        except (SyntaxError, ValueError):
            raise error from None


def require_python(text: str, name: str = "<text>") -> None:
    """Raise what `parse_python` raises for a text; for one that parses this takes two thirds of its time."""
    try:
        symtable.symtable(text, name, "exec")  # parses, and makes no tree of Python objects
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        parse_python(text, name)  # symbols have rules of their own: a tree decides


def repeated_keyword(text: str, name: str = "<text>") -> SyntaxError | None:
    """The error for a keyword argument that a call passes twice: the parser accepts it, and the compiler does not."""
    try:
        compile(text, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        return error if error.msg.startswith("keyword argument repeated") else None
    except ValueError:
        return None
    return None


def place_of(error: SyntaxError) -> tuple[int, int]:
    """The line and column of a syntax error; Python counts the column from the first of several lines that backslashes join."""
    line, column = max(error.lineno or 1, 1), max(error.offset or 1, 1)
    before = (error.text or "").rstrip("\n")[: column - 1]
    return line, column - (before.rfind("\n") + 1)


def to_older_syntax(text: str) -> str:
    """The text with newer syntax rewritten; every character keeps its line and column."""
    return _Rewriter(text).rewrite()


class _Rewriter:
    """Scans a text once and collects replacements of single characters."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.out = list(text)
        self.has_reuse = False  # in the field being read: an f-string inside it that contains its own quote

    def rewrite(self) -> str:
        position = 0
        while match := _TOKEN.search(self.text, position):
            position = match.end()
            if match["quote"]:
                position = self.string(match.end(), match["prefix"] or "", match["quote"], depth=0)
            elif match["word"]:
                self.word(match)
        return "".join(self.out)

    def put(self, start: int, written: str) -> None:
        self.out[start : start + len(written)] = written

    def word(self, match: re.Match[str]) -> None:
        """Statements that older grammars do not have."""
        start, end = match.span("word")
        keyword = match["word"].split()[0].rstrip("*")
        if keyword in {"type", "lazy"}:
            whole = (_TYPE if keyword == "type" else _LAZY).match(self.text, start)
            if whole:
                self.put(whole.start(1), ";")  # `type` alone is a harmless expression, and the rest an assignment
                if self.text.startswith("[", whole.end()):
                    self.blank(whole.end())
        elif keyword == "except":
            self.exceptions(end)
        else:
            self.blank(end)

    def blank(self, start: int) -> None:
        """Blank a bracketed list of type parameters; its line breaks become continuations."""
        end = self.closing(start)
        for index in range(start, end):
            if self.text[index] != "\n":
                self.out[index] = "\\" if self.text.startswith("\n", index + 1) else " "

    def closing(self, start: int) -> int:
        """The position after the bracket that closes the one at `start`."""
        depth = 0
        for index in range(start, min(len(self.text), start + 2000)):
            depth += _BRACKETS.get(self.text[index], 0)
            if not depth:
                return index + 1
        return start

    def exceptions(self, start: int) -> None:
        depth = 0
        for index in range(start, min(len(self.text), start + 500)):
            char = self.text[index]
            depth += _BRACKETS.get(char, 0)
            if char in "\n#\"'" or (char == ":" and not depth):
                return
            if char == "," and not depth:
                self.out[index] = "|"

    def string(self, start: int, prefix: str, quote: str, depth: int) -> int:
        """Rewrite the f-string whose text starts at `start`; returns the position after the closing quote."""
        text = self.text
        flags = prefix.lower()
        is_template = "t" in flags
        if is_template:
            at = start - len(quote) - len(prefix) + flags.index("t")
            self.out[at] = "f"
        formatted = is_template or "f" in flags
        index = start
        while index < len(text):
            if text.startswith(quote, index):
                return index + len(quote)
            char = text[index]
            if char == "\n" and len(quote) == 1:
                return index  # not closed: the text is not valid in any version
            if char == "\\" and not (formatted and text.startswith(("{", "}"), index + 1)):
                index += 2
            elif formatted and char == "{" and not text.startswith("{{", index):
                if depth == 0:
                    self.has_reuse = False
                end = self.field(index + 1, quote, depth)
                if depth == 0:
                    self.flatten(index, end, quote)
                else:
                    self.has_reuse |= quote[0] in text[index:end] or "\\" in text[index:end]
                index = end
            else:
                index += 2 if formatted and text.startswith(("{{", "}}"), index) else 1
        return index

    def field(self, start: int, quote: str, depth: int) -> int:
        """The position after the brace that closes a replacement field."""
        text = self.text
        nesting = 0
        index = start
        if depth > _MAX_DEPTH:
            return len(text)
        while index < len(text):
            char = text[index]
            nested = _NESTED.match(text, index) if char in "rbuftRBUFT\"'" else None
            if nested:
                index = self.string(nested.end(), nested[1], nested[2], depth + 1)
            elif char == "}" and not nesting:
                return index + 1
            elif char == ":" and not nesting:
                return self.specification(index + 1, quote, depth)
            elif char == "#":
                line_end = text.find("\n", index)
                index = line_end if line_end >= 0 else len(text)
            else:
                nesting += _BRACKETS.get(char, 0)
                index += 1
        return index

    def specification(self, start: int, quote: str, depth: int) -> int:
        """The position after the brace that ends a format specification, which may contain fields."""
        index = start
        while index < len(self.text):
            char = self.text[index]
            if char == "}":
                return index + 1
            if self.text.startswith(quote, index) or (char == "\n" and len(quote) == 1):
                return index
            index = self.field(index + 1, quote, depth + 1) if char == "{" else index + 1
        return index

    def flatten(self, start: int, end: int, quote: str) -> None:
        """Rewrite the field between two braces so that it has no quote, backslash or line break of newer syntax."""
        inside = self.text[start:end]
        if "\n" in inside and len(quote) == 1:
            # Plain text with continued lines: a field of one line cannot be continued.
            for index in range(start, end):
                if self.text[index] != "\n":
                    before_break = self.text.startswith("\n", index + 1)
                    self.out[index] = "\\" if before_break else "_" if self.text[index].isascii() else self.text[index]
            return
        if quote[0] not in inside and "\\" not in inside and not self.has_reuse:
            return
        other = "'" if quote[0] == '"' else '"'
        index = start + 1
        while index < end:
            nested = _NESTED.match(self.text, index) if self.text[index] in "rbuftRBUFT\"'" else None
            if nested is None:
                if self.text[index] == "\\":
                    self.out[index] = " "
                index += 1
                continue
            close = self.string(nested.end(), nested[1], nested[2], 1)
            self.plain(index, close, nested, other)
            index = close

    def plain(self, start: int, end: int, nested: re.Match[str], quote: str) -> None:
        """Turn a nested string into a plain one in the other quote, with the characters that would end it blurred."""
        for index in range(start, end):
            char = self.text[index]
            self.out[index] = "_" if char in "\"'\\{}#\n" else char
        at = start + len(nested[1])
        self.put(start, " " * len(nested[1]))
        self.out[at] = quote
        self.out[end - 1] = quote
