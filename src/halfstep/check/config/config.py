"""A configuration under check: which tool it is for, its values, and where each of them stands.

`read_configs` finds the configurations of a JSON or YAML file, `configs_in_script` those that a Python script writes as
dictionaries or calls. A file that is no configuration of a tool Halfstep knows gives none, and so no findings: nobody
wants a precision checker's opinion on their package.json. Detection is `halfstep.check.config.kind`.
"""

from __future__ import annotations

import ast
import functools
from bisect import bisect_right
from dataclasses import dataclass

from halfstep.check.config import kind as config_kind
from halfstep.check.config import python_reader as config_python
from halfstep.check.config import yaml_reader as config_yaml
from halfstep.check.config.kind import Kind
from halfstep.check.files.source import Settings, Source
from halfstep.errors import SettingError
from halfstep.precision import json_tree as config_json
from halfstep.precision.node import UNKNOWN, Block, Entry, Node, Scalar, Span

__all__ = ["Config", "Kind", "Where", "case_source", "configs_in_script", "read_configs"]

Where = tuple[str, int, int, int | None, int | None, int | None]

_MAX_CHARS = 2**18  # configurations are a few kilobytes; a quarter of a megabyte is data, and slow to parse


@dataclass(frozen=True, eq=False)
class Config:
    """One configuration: a file, a block of one, or a dictionary or call in a script."""

    kind: Kind
    root: Block
    source: Source
    settings: Settings
    origin: str = ""  # what a script calls with it: "TrainingArguments", "deepspeed.initialize"; "" for a file
    strict: bool = True  # every key is this tool's; False where another program's keys stand among them
    script: frozenset[str] = frozenset()  # what else the script uses, for rules that must know
    use: object = None  # of kind "joint": how a script uses DeepSpeed with this configuration, a `joint.Use`

    def entry(self, *path: str) -> Entry | None:
        """The entry at a path of keys, or None where it is absent."""
        block: Node = self.root
        found: Entry | None = None
        for key in path:
            found = block.entry(key) if isinstance(block, Block) else None
            if found is None:
                return None
            block = found.value
        return found

    def block(self, *path: str) -> Block | None:
        """The block at a path, or None where there is none."""
        found = self.entry(*path) if path else None
        node: Node | None = found.value if found else (None if path else self.root)
        return node if isinstance(node, Block) else None

    def value(self, *path: str) -> object:
        """The plain value at a path; None where absent or null; `UNKNOWN` where the text does not decide it.

        Hugging Face's "auto" is undecided too, and so is a block or a list.
        """
        found = self.entry(*path)
        if found is None:
            return UNKNOWN if self.may_hold(*path) else None
        if not isinstance(found.value, Scalar) or found.value.value == "auto":
            return UNKNOWN
        return found.value.value

    def number(self, *path: str) -> float | None:
        """The number at a path; None where there is none or the text does not decide it."""
        value = self.value(*path)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def is_on(self, *path: str) -> bool:
        """Whether the value at a path is certainly true."""
        value = self.value(*path)
        return value is True or (isinstance(value, str) and value.casefold() == "true")

    def may_hold(self, *path: str) -> bool:
        """Whether a key that is not written may be there all the same."""
        block: Node | None = self.root
        for key in path:
            if not isinstance(block, Block):
                return not isinstance(block, Scalar) or block.value is UNKNOWN
            found = block.entry(key)
            if found is None:
                return block.open
            block = found.value
        return False

    def where(self, place: Span | Entry | Node) -> Where:
        """Path, line, column, end line, end column and cell, as `Rule.finding` takes them."""
        span = place if isinstance(place, Span) else place.span
        starts = _line_starts(self.source.text)
        line, column = _place(starts, span.start)
        end_line, end_column = _place(starts, span.end)
        cell, line_in_cell = self.source.place(line)
        return self.source.path, line_in_cell, column, end_line - line + line_in_cell, end_column, cell


def read_configs(source: Source, settings: Settings) -> tuple[Config, ...]:
    """The configurations in a JSON or YAML file; none where it is some other file.

    A file that is plainly meant as a configuration and cannot be read raises `SettingError` with line and column.
    """
    if len(source.text) > _MAX_CHARS or not config_kind.may_be_config(source.text):
        return ()
    try:
        if source.language == "json":
            roots: tuple[Node, ...] = (config_json.parse_json(source.text, source.path),)
        elif source.language == "yaml":
            roots = config_yaml.parse_yaml(source.text, source.path)
        else:
            return ()
    except SettingError:
        if config_kind.is_surely_config(source.text):
            raise
        return ()
    return tuple(
        Config(kind, block, source, settings, strict=strict)
        for root in roots
        for kind, block, strict in config_kind.find_configs(root)
    )


def configs_in_script(tree: ast.Module, source: Source, settings: Settings) -> tuple[Config, ...]:
    """The configurations that a script writes down as dictionaries or calls, and those it runs with.

    The second sort are of kind "joint": a DeepSpeed file or dictionary, beside what the script does with it.
    """
    from halfstep.check.config.joint import joint_configs  # it stands on this module

    found = config_python.find_in_script(tree, source.text, hardware=settings.gpu is not None)
    own = tuple(Config(one.kind, one.root, source, settings, one.origin, one.strict, one.script) for one in found)
    return (*own, *joint_configs(tree, source, settings, own))


def case_source(text: str) -> Source:
    """The source of a rule's bad or good case: JSON if it opens with a bracket, Python if it imports, else YAML."""
    if text.lstrip().startswith(("{", "[", "//")):
        return Source("ds_config.json", text, "json")
    if any(line.startswith(("import ", "from ")) for line in text.splitlines()):
        return Source("train.py", text, "python")
    return Source("config.yaml", text, "yaml")


@functools.lru_cache(maxsize=4)
def _line_starts(text: str) -> tuple[int, ...]:
    return (0, *(i + 1 for i, char in enumerate(text) if char == "\n"))


def _place(starts: tuple[int, ...], offset: int) -> tuple[int, int]:
    line = bisect_right(starts, offset)
    return line, offset - starts[line - 1] + 1
