"""A script and the DeepSpeed configuration it runs with, checked together.

Each half can be right and the pair wrong: a script that clips gradients itself while ZeRO has them in shards, a Trainer
whose arguments contradict the file it names. `joint_configs` finds the configurations a script names (files, or
dictionaries in it) and gives each once more, of kind "joint", with what the script does around DeepSpeed's engine. Scripts
that use DeepSpeed only under some condition are left alone: which half of them runs is not in the text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from halfstep.check.config.config import Config, Where, read_configs
from halfstep.check.config.literals import Literals
from halfstep.check.files.source import Settings, Source
from halfstep.check.finding import Finding
from halfstep.check.rule import ConfigRule
from halfstep.check.script.names import Names, chain, key_of, read_names
from halfstep.errors import SettingError
from halfstep.precision.json_tree import MAX_BYTES
from halfstep.precision.node import Block, Span

__all__ = ["JointRule", "Use", "joint_configs", "named_files", "read_use", "uses_name"]

_HINT = re.compile(r"deepspeed", re.IGNORECASE)
_CONFIG_FILE = re.compile(r"^[^\s{}$%*?<>|]+\.(?:json|jsonc|hjson|ya?ml)$")
_MAX_FILES = 20


@dataclass(frozen=True, eq=False)
class Use:
    """How a script uses DeepSpeed: its engine, and the calls around it."""

    source: Source
    literals: Literals
    names: Names
    nodes: tuple[ast.AST, ...]
    trainers: tuple[Config, ...]  # TrainingArguments and its relatives
    initialize: ast.Call | None  # deepspeed.initialize, where it is called once and always
    engine: str = ""  # the variable that holds the engine
    optimizer: str = ""  # and the one that holds its optimizer

    def calls(self, name: str, on: str = "") -> list[ast.Call]:
        """The calls of a method, `on.name(...)`; of any object's where `on` is empty."""
        return [
            node
            for node in self.nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == name
            and (not on or key_of(node.func.value) == on)
        ]

    def where(self, place: ast.AST | Span) -> Where:
        """The place of a node of the script, as `Rule.finding` takes it."""
        span = place if isinstance(place, Span) else self.literals.span(place)
        whole = Config("deepspeed", Block(span, ()), self.source, Settings())
        return whole.where(span)


class JointRule(ConfigRule):
    """A rule over a script and one DeepSpeed configuration that it runs with."""

    def check(self, config: Config) -> Iterator[Finding]:
        """The findings in `config`, if it is the other half of a script."""
        if config.kind == "joint" and isinstance(config.use, Use):
            yield from self.inspect(config.use, config)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """The findings in the pair."""
        raise NotImplementedError


def joint_configs(
    tree: ast.Module, source: Source, settings: Settings, configs: tuple[Config, ...]
) -> Iterator[Config]:
    """The DeepSpeed configurations a script runs with, each with what the script does; `configs` are those written in it."""
    if not _HINT.search(source.text):
        return
    use = read_use(tree, source, configs)
    if use.initialize is None and not use.trainers:
        return
    found = tuple(_partners(tree, source, settings, configs))
    # A script that takes its configuration from the command line still has an engine to be used rightly.
    unknown = Config("joint", Block(Span(0, 0), (), open=True), source, settings)
    for config in found or (unknown,):
        yield replace(config, kind="joint", use=use)


def named_files(tree: ast.Module, source: Source) -> tuple[str, ...]:
    """The configuration files a script names that exist, beside the script or in the working directory."""
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _CONFIG_FILE.match(node.value):
            for folder in (Path(source.path).parent, Path()):
                path = folder / node.value
                if _is_file(path):
                    found.setdefault(str(path))
                    break
        if len(found) >= _MAX_FILES:
            break
    return tuple(found)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than the system allows, or a folder that may not be looked into
        return False


def read_use(tree: ast.Module, source: Source, configs: tuple[Config, ...]) -> Use:
    """What a script does with DeepSpeed."""
    nodes = tuple(ast.walk(tree))
    names = read_names((n, False) for n in nodes if isinstance(n, ast.Import | ast.ImportFrom))
    literals = Literals(list(nodes), source.text, names)
    trainers = tuple(config for config in configs if config.kind == "transformers")
    made = [n for n in nodes if isinstance(n, ast.Call) and names.full(n.func) == "deepspeed.initialize"]
    initialize = made[0] if len(made) == 1 and not _is_conditional(made[0], tree) else None
    engine = optimizer = ""
    for node in nodes:
        if isinstance(node, ast.Assign) and node.value is initialize and isinstance(node.targets[0], ast.Tuple):
            bound = [key_of(item) for item in node.targets[0].elts]
            engine, optimizer = (*bound, "", "")[:2]
    return Use(source, literals, names, nodes, trainers, initialize, engine, "" if optimizer == "_" else optimizer)


def _partners(tree: ast.Module, source: Source, settings: Settings, configs: tuple[Config, ...]) -> Iterator[Config]:
    """The DeepSpeed configurations a script runs with; none where it chooses among several files."""
    inline = [c for c in configs if c.kind == "deepspeed"]
    yield from inline if len(inline) == 1 else [c for c in inline if c.origin != "a dictionary"]
    files: list[Config] = []
    for path in named_files(tree, source):
        try:
            text = _read(Path(path))
            files += [c for c in read_configs(text, settings) if c.kind == "deepspeed"] if text else []
        except SettingError:
            continue  # the file's own check says so
    if len(files) == 1:
        yield files[0]


def _read(path: Path) -> Source | None:
    """The text of a file that a script names, where it can be one."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError):
        return None
    return Source(str(path), text, "yaml" if path.suffix in {".yaml", ".yml"} else "json")


def _is_conditional(call: ast.Call, tree: ast.Module) -> bool:
    """Whether a call stands under an `if` other than the one that asks for __main__."""
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, under = todo.pop()
        if node is call:
            return under
        if isinstance(node, ast.If):
            under |= not any(isinstance(n, ast.Constant) and n.value == "__main__" for n in ast.walk(node.test))
        todo.extend((child, under) for child in ast.iter_child_nodes(node))
    return False


def uses_name(node: ast.AST, name: str) -> bool:
    """Whether an expression is made from a variable: `engine.module.parameters()` from `engine`."""
    while isinstance(node, ast.Attribute | ast.Call):
        if isinstance(node, ast.Attribute) and key_of(node) == name:
            return True
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return bool(name) and ".".join(chain(node)) == name
