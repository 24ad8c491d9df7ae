"""A configuration under check: which tool it is for, its values, and the position of each in the text.

`read_configs` returns the configurations of a JSON, YAML or TOML file; `halfstep.check.config.joint` those of a Python script.
A file that configures no tool Halfstep knows gives none, and so no findings: a precision checker has nothing to report
about a package.json. `halfstep.check.config.kind` detects the tool.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import PurePath

from halfstep.check.config import kind
from halfstep.check.config.kind import Kind
from halfstep.check.files.source import Source
from halfstep.check.finding import Place
from halfstep.check.regex import regex
from halfstep.check.settings import Settings
from halfstep.errors import SettingError
from halfstep.precision import json_tree
from halfstep.precision.node import UNKNOWN, Block, Entry, Node, Scalar, Span

__all__ = ["Config", "Kind", "case_source", "parse_any", "place_of", "read_configs"]

_TABLE = regex(r"\s*\[\[?[\w.-]+\]\]?\s*\n")  # the header of a TOML table
_PACKAGE = regex(r"^# @package ([\w.]+)", re.MULTILINE)  # where Hydra puts the file; by default at its folder's name
_MAX_CHARS = 2**18  # configurations are a few kilobytes; a quarter of a megabyte is data, and slow to parse


@dataclass(frozen=True, eq=False)
class Config:
    """One configuration: a file, a block of one, or a dictionary or call in a script."""

    kind: Kind
    root: Block
    source: Source
    settings: Settings
    origin: str = ""  # what a script calls with it: "TrainingArguments", "deepspeed.initialize"; "" for a file
    strict: bool = True  # every key belongs to this tool; False where another program's keys are mixed in
    script: frozenset[str] = frozenset()  # what else the script uses, for rules that need to know
    assembled: bool = False  # other statements of the script changed it, so an edit may not fit
    document: Node | None = None  # the whole file, of which `root` may be a section

    def entry(self, *path: str) -> Entry | None:
        """The entry at a path of keys, or None if it is absent."""
        block: Node = self.root
        entry: Entry | None = None
        for key in path:
            entry = block.entry(key) if isinstance(block, Block) else None
            if entry is None:
                return None
            block = entry.value
        return entry

    def block(self, *path: str) -> Block | None:
        """The block at a path, or None if there is none."""
        entry = self.entry(*path) if path else None
        node: Node | None = entry.value if entry else (None if path else self.root)
        return node if isinstance(node, Block) else None

    def value(self, *path: str) -> object:
        """The plain value at a path; None if absent or null; `UNKNOWN` if the text does not decide it.

        Hugging Face's "auto" is undecided too, and so is a block or a list.
        """
        entry = self.entry(*path)
        if entry is None:
            return UNKNOWN if self.may_hold(*path) else None
        if not isinstance(entry.value, Scalar) or entry.value.value == "auto":
            return UNKNOWN
        return entry.value.value

    def number(self, *path: str) -> float | None:
        """The number at a path; None if there is none or the text does not decide it."""
        value = self.value(*path)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def is_on(self, *path: str) -> bool:
        """Whether the value at a path is certainly true."""
        value = self.value(*path)
        return value is True or (isinstance(value, str) and value.casefold() == "true")

    def may_hold(self, *path: str) -> bool:
        """Whether a key that is not written may be present at run time."""
        block: Node | None = self.root
        for key in path:
            if not isinstance(block, Block):
                return not isinstance(block, Scalar) or block.value is UNKNOWN
            entry = block.entry(key)
            if entry is None:
                return block.open
            block = entry.value
        return False

    def where(self, part: Span | Entry | Node) -> Place:
        """The place of a part of the configuration, for `Rule.finding`."""
        return place_of(part if isinstance(part, Span) else part.span, self.source)


def place_of(span: Span, source: Source) -> Place:
    """The place of a span of characters."""
    starts = _line_starts(source.text)
    line, end_line = bisect_right(starts, span.start), bisect_right(starts, span.end)
    column, end_column = span.start - starts[line - 1] + 1, span.end - starts[end_line - 1] + 1
    return source.place(line, column, end_line, end_column)


def read_configs(source: Source, settings: Settings) -> tuple[Config, ...]:
    """The configurations in a JSON, YAML or TOML file; none if it is some other file.

    A file that is clearly meant as a configuration and cannot be parsed raises `SettingError` with line and column.
    """
    if len(source.text) > _MAX_CHARS or not kind.may_be_config(source.text):
        return ()
    try:
        roots = parse_any(source)
    except SettingError:
        if kind.is_surely_config(source.text):
            raise
        roots = _parse_template(source)
    package = _PACKAGE.search(source.text)
    name = package.group(1).rpartition(".")[2] if package else PurePath(source.path).parent.name
    return tuple(
        Config(match.kind, match.block, source, settings, strict=match.strict, document=root)
        for root in roots
        for match in kind.find_configs(root, name)
    )


def parse_any(source: Source) -> tuple[Node, ...]:
    """The trees of a file, one per document; `SettingError` with line and column if it cannot be parsed."""
    if source.language == "json":
        return (json_tree.parse_json(source.text, source.path),)
    if source.language == "yaml":
        from halfstep.check.config import yaml_reader

        return yaml_reader.parse_yaml(source.text, source.path)
    from halfstep.check.config import toml_reader  # tomllib takes 8 ms to import

    return (toml_reader.parse_toml(source.text, source.path),)


def _parse_template(source: Source) -> tuple[Node, ...]:
    """The trees of a template whose slots are unknown values; none if it is no template, or more than that."""
    text = kind.fill_template(source.text)
    try:
        return parse_any(Source(source.path, text, source.language)) if text != source.text else ()
    except SettingError:
        return ()


def case_source(text: str) -> Source:
    """The source of a rule's bad or good case: TOML, JSON, Python if it imports, else YAML, by how it opens."""
    if _TABLE.match(text):
        return Source("train.toml", text, "toml")
    if text.lstrip().startswith(("{", "[", "//")):
        return Source("ds_config.json", text, "json")
    if any(line.startswith(("import ", "from ")) for line in text.splitlines()):
        return Source("train.py", text, "python")
    return Source("config.yaml", text, "yaml")


@functools.lru_cache(maxsize=4)
def _line_starts(text: str) -> tuple[int, ...]:
    return (0, *(i + 1 for i, char in enumerate(text) if char == "\n"))
