"""Edits of a configuration's text: set a value, rename, remove or add a key, without changing anything else.

Each works on JSON, YAML, a Python dictionary and the arguments of a call. They return None for a layout that cannot be
edited safely (a key inside an anchor, a block on one line of YAML, keys of TOML); the finding then has no fix.
"""

from __future__ import annotations

import json
import re

from halfstep.check.config.config import Config
from halfstep.check.finding import Edit, Fix
from halfstep.precision.node import Block, Entry, Node

__all__ = ["add", "literal", "remove", "rename", "replace_value"]


def literal(config: Config, value: object) -> str:
    """A value as a literal of the configuration's language."""
    if config.source.language in {"python", "notebook"}:
        return json.dumps(value) if isinstance(value, str) else repr(value)
    return json.dumps(value)


def replace_value(config: Config, node: Node, value: object, title: str, *, safe: bool = True) -> Fix:
    """Replace a value."""
    return Fix(title, (Edit(node.span.start, node.span.end, literal(config, value)),), safe)


def rename(config: Config, entry: Entry, key: str, title: str) -> Fix:
    """Rename a key, keeping its quotes."""
    old = config.source.text[entry.key_span.start : entry.key_span.end]
    quote = old[:1] if old[:1] in {'"', "'"} else ""
    return Fix(title, (Edit(entry.key_span.start, entry.key_span.end, f"{quote}{key}{quote}"),))


def remove(config: Config, block: Block, entry: Entry, title: str) -> Fix | None:
    """Remove a key and its value, with the comma and the line they leave empty."""
    if config.source.language == "toml":
        return None
    text = config.source.text
    start, end = entry.span.start, entry.span.end
    if config.source.language == "yaml" and not text.startswith("{", block.span.start):
        return _remove_lines(text, block, start, end, title)
    after = re.compile(r"\s*,").match(text, end)
    if after:
        end = after.end()
    elif len(block.entries) > 1:
        comma = text.rfind(",", 0, start)
        if comma < block.span.start or text[comma + 1 : start].strip():
            return None  # a comment in between: its author has to decide where it goes
        return Fix(title, (Edit(comma, end, ""),))
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end
    if not text[line_start:start].strip() and not text[end:line_end].strip() and line_end < len(text):
        return Fix(title, (Edit(line_start, line_end + 1, ""),))
    blank = re.compile(r"[ \t]*").match(text, end)
    return Fix(title, (Edit(start, blank.end() if blank else end, ""),))


def _remove_lines(text: str, block: Block, start: int, end: int, title: str) -> Fix | None:
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end + 1
    rest = text[end:line_end].strip()
    if text[line_start:start].strip() or (rest and not rest.startswith("#")) or len(block.entries) < 2:
        return None
    return Fix(title, (Edit(line_start, line_end, ""),))


def add(config: Config, block: Block, key: str, value: object, title: str, *, safe: bool = True) -> Fix | None:
    """Insert a key before the first one of a block, in the same layout."""
    text = config.source.text
    # Arguments that `**` unpacks are written in a dictionary elsewhere.
    own = [e for e in block.entries if block.span.start <= e.key_span.start < block.span.end]
    if not own or config.source.language == "toml" or (block.call and text[own[0].key_span.start] in "\"'"):
        return None
    first = own[0].key_span.start
    before = text[block.span.start : first]
    if config.source.language == "yaml" and not text.startswith("{", block.span.start):
        line = text.rfind("\n", 0, first) + 1
        indent = text[line:first]
        if indent.strip():
            return None
        return Fix(title, (Edit(line, line, f"{indent}{key}: {literal(config, value)}\n"),), safe)
    gap = before[before.rfind("\n") :] if "\n" in before else " "
    if gap.strip():
        gap = "\n" + re.match(r"[ \t]*", gap[1:]).group()  # type: ignore[union-attr]  # the pattern also matches the empty string
    if block.call:
        written = f"{key}={literal(config, value)}"
    else:
        quote = "'" if text.startswith("'", first) else '"'
        written = f"{quote}{key}{quote}: {literal(config, value)}"
    return Fix(title, (Edit(first, first, f"{written},{gap}"),), safe)
