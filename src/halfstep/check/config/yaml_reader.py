"""YAML parsed into a tree with positions, from the parser's events alone.

No objects are constructed: events carry the text of a scalar and its marks, and only booleans, numbers and null are
resolved, by YAML 1.1 as PyYAML does it (`no` is false, `1e-5` is a string). An alias shares the node it names, so a
document of aliases to aliases does not grow. Nothing here recurses, so nesting needs only a limit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from halfstep.errors import SettingError
from halfstep.precision.node import UNKNOWN, Block, Entry, Items, Node, Scalar, Span, is_placeholder

__all__ = ["parse_yaml"]

_MAX_DEPTH = 100
_MAX_NODES = 50_000  # including the entries copied by merges


def parse_yaml(text: str, name: str) -> tuple[Node, ...]:
    """The trees of a YAML text, one per document; `SettingError` with line and column if it cannot be parsed."""
    import yaml  # only for YAML files: the import takes 20 ms

    builder = _Builder(text, name, yaml)
    try:
        # libyaml's parser if PyYAML was built with it: 30 times faster, with the same events.
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            builder.take(event)
    except SettingError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = error.problem or error.context or "cannot be parsed"
        raise SettingError(f"{name}{place}: {problem}; correct the YAML there.") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise SettingError(f"{name}: invalid YAML: {str(error).splitlines()[0]}.") from None
    return tuple(builder.documents)


class _Open:
    """A collection under construction."""

    def __init__(self, event: Any, *, block: bool) -> None:
        self.start: int = event.start_mark.index
        self.line: int = event.start_mark.line
        self.anchor: str | None = event.anchor
        self.block = block
        self.nodes: list[Node] = []


class _Builder:
    """Turns events into nodes with a stack of open collections."""

    def __init__(self, text: str, name: str, yaml: Any) -> None:
        self.text = text
        self.name = name
        self.yaml = yaml
        self.resolver = yaml.resolver.Resolver()
        self.constructor = yaml.constructor.SafeConstructor()
        self.documents: list[Node] = []
        self.stack: list[_Open] = []
        self.anchors: dict[str, Node] = {}
        self.num_nodes = 0

    def take(self, event: Any) -> None:
        """Add one event to the tree."""
        yaml = self.yaml
        if isinstance(event, yaml.DocumentStartEvent):
            self.anchors = {}
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            if len(self.stack) >= _MAX_DEPTH:
                self.fail(event, f"nested more than {_MAX_DEPTH} levels deep; a configuration needs four")
            self.stack.append(_Open(event, block=isinstance(event, yaml.MappingStartEvent)))
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self.close(event)
        elif isinstance(event, yaml.ScalarEvent):
            self.add(self.scalar(event), event.anchor, event)
        elif isinstance(event, yaml.AliasEvent):
            span = Span(event.start_mark.index, event.end_mark.index)
            named = self.anchors.get(event.anchor)
            if named is None and all(event.anchor != open_.anchor for open_ in self.stack):
                self.fail(event, f"undefined alias *{event.anchor}; define its anchor &{event.anchor} before it")
            # A copy at the alias's position; its content is shared, so copies cost nothing.
            self.add(replace(named, span=span) if named else Scalar(span, UNKNOWN), None, event)

    def scalar(self, event: Any) -> Scalar:
        start, end = event.start_mark.index, event.end_mark.index
        written = self.text[start:end].rstrip() if event.style is None else self.text[start:end]
        span = Span(start, start + len(written))
        value: object = event.value
        if event.tag not in {None, "!"} or is_placeholder(event.value):
            return Scalar(span, UNKNOWN, written)
        if event.implicit[0]:
            value = self.resolve(event)
        return Scalar(span, value, written)

    def resolve(self, event: Any) -> object:
        tag = self.resolver.resolve(self.yaml.ScalarNode, event.value, (True, False)).rpartition(":")[2]
        node = self.yaml.ScalarNode(f"tag:yaml.org,2002:{tag}", event.value)
        try:
            if tag == "bool":
                return self.constructor.construct_yaml_bool(node)
            if tag == "int":
                return self.constructor.construct_yaml_int(node)
            if tag == "float":
                return self.constructor.construct_yaml_float(node)
        except (ValueError, IndexError, OverflowError):
            self.fail(event, "invalid number")
        return None if tag == "null" else event.value

    def close(self, event: Any) -> None:
        done = self.stack.pop()
        last = done.nodes[-1].span.end if done.nodes else 0
        # A block collection's end mark is at the next token, lines below; its text ends with its last node.
        end = max(last, done.start)
        if event.end_mark.index > event.start_mark.index:  # a closing bracket
            end = event.end_mark.index
        span = Span(done.start, end)
        node: Node = self.block(span, done.nodes) if done.block else Items(span, tuple(done.nodes))
        self.add(node, done.anchor, event)

    def block(self, span: Span, nodes: list[Node]) -> Block:
        entries: list[Entry] = []
        merged: list[Entry] = []
        is_open = False
        for key, value in zip(nodes[::2], nodes[1::2], strict=False):
            if not isinstance(key, Scalar) or isinstance(key.value, type(UNKNOWN)):
                is_open = True
            elif key.text == "<<":
                sources = value.items if isinstance(value, Items) else (value,)
                for source in sources:
                    merged += source.entries if isinstance(source, Block) else ()
                    is_open |= not isinstance(source, Block)
            else:
                entries.append(Entry(str(key.value), key.span, value))
        self.num_nodes += len(merged)
        own = {entry.key for entry in entries}
        # A merged key that the block itself replaces is not a duplicate.
        inherited = {entry.key: entry for entry in reversed(merged) if entry.key not in own}
        return Block(span, (*inherited.values(), *entries), open=is_open)

    def add(self, node: Node, anchor: str | None, event: Any) -> None:
        self.num_nodes += 1
        if self.num_nodes > _MAX_NODES:
            self.fail(event, f"more than {_MAX_NODES} nodes, aliases included; a configuration is far smaller")
        if anchor:
            self.anchors[anchor] = node
        if self.stack:
            self.stack[-1].nodes.append(node)
        else:
            self.documents.append(node)

    def fail(self, event: Any, problem: str) -> None:
        mark = event.start_mark
        raise SettingError(f"{self.name}, line {mark.line + 1}, column {mark.column + 1}: {problem}.")
