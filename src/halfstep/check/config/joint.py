"""The configurations of a script: those written in it, and the DeepSpeed configurations it runs with.

A script and its configuration can each be right and the pair wrong: a script that clips gradients itself while ZeRO has
partitioned them, a Trainer whose arguments contradict the file it names. `joint_configs` finds the configurations a
script names (files, or dictionaries in it) and returns each again as a `JointConfig`, with what the script does around
DeepSpeed's engine. Scripts that use DeepSpeed only under some condition get none: the text does not decide which branch
runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from halfstep.check.config.arms import DefaultConfig
from halfstep.check.config.config import Config, place_of, read_configs
from halfstep.check.config.engines import Engines, read_engines
from halfstep.check.config.literals import Literals, literals_of
from halfstep.check.config.objects import optimizer_configs
from halfstep.check.config.prepared import PreparedModels, read_prepared
from halfstep.check.config.python_reader import expects_error, find_in_script
from halfstep.check.files.source import Source
from halfstep.check.finding import Finding, Place
from halfstep.check.regex import regex
from halfstep.check.rule import ConfigRule
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import Names, chain, key_of, read_names
from halfstep.check.settings import Settings
from halfstep.errors import SettingError
from halfstep.precision.json_tree import MAX_BYTES
from halfstep.precision.node import Block, Span

__all__ = [
    "JointConfig",
    "JointRule",
    "Use",
    "configs_in_script",
    "joint_configs",
    "named_files",
    "read_use",
    "uses_name",
]

_HINT = regex(r"deepspeed", re.IGNORECASE)
_MODEL = regex(r"(^|[._])(model|net)$")
_CONFIG_FILE = regex(r"^[^\s{}$%*?<>|]+\.(?:json|jsonc|hjson|ya?ml)$")
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
    engine: str = ""  # the variable of the engine, by its assignment or its name; a model that Accelerate prepares for DeepSpeed is one too
    optimizer: str = ""  # the variable its optimizer is assigned to
    engines: Engines | None = None  # every engine, also where the script creates several, or one under a condition
    prepared: PreparedModels = field(
        default_factory=PreparedModels
    )  # models that are engines where Accelerate runs DeepSpeed

    def calls(self, name: str, on: str = "") -> list[ast.Call]:
        """The calls of a method, `on.name(...)`; of any object if `on` is empty."""
        return [
            node
            for node in self.nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == name
            and (not on or key_of(node.func.value) == on)
        ]

    def where(self, part: ast.AST | Span) -> Place:
        """The place of a node of the script, for `Rule.finding`."""
        return place_of(part if isinstance(part, Span) else self.literals.span(part), self.source)


@dataclass(frozen=True, eq=False)
class JointConfig(Config):
    """A DeepSpeed configuration (of kind "joint") together with the script that runs with it."""

    use: Use = field(kw_only=True)


class JointRule(ConfigRule):
    """A rule over a script and one DeepSpeed configuration that it runs with."""

    def check(self, config: Config) -> Iterator[Finding]:
        """The findings in `config`, if it comes with a script."""
        if isinstance(config, JointConfig):
            yield from self.inspect(config.use, config)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """The findings in the pair."""
        raise NotImplementedError


def configs_in_script(tree: ast.Module, source: Source, settings: Settings) -> tuple[Config, ...]:
    """The configurations written in a script, followed by the DeepSpeed configurations it runs with."""
    written = find_in_script(tree, source, settings)
    return (*written, *joint_configs(tree, source, settings, written))


def joint_configs(
    tree: ast.Module, source: Source, settings: Settings, configs: tuple[Config, ...]
) -> Iterator[Config]:
    """The DeepSpeed configurations a script runs with, each with what the script does; `configs` are those written in it.

    One with an optimizer object follows once more, with that object as its `optimizer` block.
    """
    if not _HINT.search(source.text):
        return
    use = read_use(tree, source, configs)
    if use.initialize is None and not use.engine and not use.trainers and not use.engines and not use.prepared:
        return
    partners = tuple(_partners(tree, source, settings, configs))
    # A script that takes its configuration from the command line can still misuse the engine.
    unknown = Config("deepspeed", Block(Span(0, 0), (), open=True), source, settings)
    for config in partners or (unknown,):
        yield JointConfig(
            "joint", config.root, config.source, settings, config.origin, config.strict, config.script, use=use
        )
        if use.initialize is not None:
            yield from optimizer_configs(config, use.initialize, use.nodes, use.names, use.literals, source)


def named_files(tree: ast.Module, source: Source) -> tuple[str, ...]:
    """The configuration files a script names that exist, next to the script or in the working directory."""
    paths: dict[str, None] = {}
    for node in all_nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _CONFIG_FILE.match(node.value):
            for folder in (Path(source.path).parent, Path()):
                path = folder / node.value
                if _is_file(path):
                    paths.setdefault(str(path))
                    break
        if len(paths) >= _MAX_FILES:
            break
    return tuple(paths)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than the system allows, or a folder without permission
        return False


def read_use(tree: ast.Module, source: Source, configs: tuple[Config, ...]) -> Use:
    """What a script does with DeepSpeed."""
    nodes = all_nodes(tree)
    names = read_names((n, False) for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom)))
    literals = literals_of(tree, source.text, names)
    trainers = tuple(config for config in configs if config.kind == "transformers")
    made = [n for n in nodes if isinstance(n, ast.Call) and names.full(n.func) == "deepspeed.initialize"]
    initialize = made[0] if len(made) == 1 and not _is_conditional(made[0], tree) else None
    engine, optimizer = _bound(nodes, initialize) if initialize is not None else ("", "")
    if not made:
        engine = _prepared(nodes, names) or _named(nodes, names)
    optimizer = "" if optimizer == "_" else optimizer
    engines = read_engines(nodes, names) if made else None
    engine = _running(nodes, engine, engines) if engine and engines is not None else engine
    prepared = PreparedModels() if made else read_prepared(nodes, names)
    return Use(source, literals, names, nodes, trainers, initialize, engine, optimizer, engines, prepared)


def _bound(nodes: tuple[ast.AST, ...], initialize: ast.Call) -> tuple[str, str]:
    """The variables of the engine and its optimizer: of `engine, optimizer, _, _ = initialize(...)`, or of its [0]."""
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        value, target = node.value, node.targets[0]
        if value is initialize and isinstance(target, ast.Tuple | ast.List):
            bound = [key_of(item) for item in target.elts]
            return (*bound, "", "")[0], (*bound, "", "")[1]
        first = isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant) and value.slice.value == 0
        if first and isinstance(value, ast.Subscript) and value.value is initialize:
            return key_of(target), ""
    return "", ""


def _running(nodes: tuple[ast.AST, ...], engine: str, engines: Engines) -> str:
    """The variable that runs the engine, if a function creates it under one name and returns it to another: `self.engine`."""
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    runs = [(c, key_of(c.func.value)) for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "backward"]
    keys = {key for call, key in runs if key in engines.visible(call)}
    return keys.pop() if len(keys) == 1 and engine not in keys else engine


def _prepared(nodes: tuple[ast.AST, ...], names: Names) -> str:
    """The one model that an Accelerator with a DeepSpeedPlugin prepares; its forward runs in DeepSpeed's engine."""
    calls = [n for n in nodes if isinstance(n, ast.Call)]
    accelerators = [c for c in calls if names.full(c.func) == "accelerate.Accelerator"]
    if len(accelerators) != 1 or not any(
        k.arg == "deepspeed_plugin" and not isinstance(k.value, ast.Constant | ast.IfExp)
        for k in accelerators[0].keywords
    ):
        return ""
    prepares = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "prepare"]
    models = {(c, i) for c in prepares for i, a in enumerate(c.args) if _MODEL.search(key_of(a))}
    # `self.model, self.optimizer = accelerator.prepare(model, optimizer)`: the engine has the name on the left.
    assigned = {n.value: n.targets[0] for n in nodes if isinstance(n, ast.Assign)}
    keys = {_at(assigned.get(call), index, call) for call, index in models}
    return keys.pop() if len(keys) == 1 else ""


def _at(target: ast.expr | None, index: int, call: ast.Call) -> str:
    """The variable that gets one of the objects which a call prepares; its argument if none does."""
    items = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    key = key_of(items[index]) if len(items) == len(call.args) else ""
    return key or key_of(call.args[index])


def _named(nodes: tuple[ast.AST, ...], names: Names) -> str:
    """The one variable such as `model_engine` that runs backward and steps, where another function or file creates it."""
    if names.uses("colossalai"):  # its engine has the same methods
        return ""
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    owners = {
        method: {key_of(c.func.value) for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == method}
        for method in ("backward", "step")
    }
    engines = {key for key in owners["backward"] & owners["step"] if key.rsplit(".", 1)[-1].endswith("engine")}
    return engines.pop() if len(engines) == 1 else ""


def _partners(tree: ast.Module, source: Source, settings: Settings, configs: tuple[Config, ...]) -> Iterator[Config]:
    """The DeepSpeed configurations a script runs with; no file if it chooses among several."""
    inline = [c for c in configs if c.kind == "deepspeed" and not isinstance(c, DefaultConfig)]
    inline = inline if len(inline) == 1 else [c for c in inline if c.origin != "a dictionary"]
    yield from inline
    places = {c.root.span for c in inline}
    yield from (c for c in configs if isinstance(c, DefaultConfig) and c.root.span in places)
    files: list[Config] = []
    for path in named_files(tree, source):
        try:
            text = _read(Path(path))
            files += [c for c in read_configs(text, settings) if c.kind == "deepspeed"] if text else []
        except SettingError:
            continue  # checking the file itself reports it
    if len(files) == 1:
        yield files[0]


def _read(path: Path) -> Source | None:
    """The text of a file that a script names; None if it is too large or not UTF-8."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError):
        return None
    return Source(str(path), text, "yaml" if path.suffix in {".yaml", ".yml"} else "json")


def _is_conditional(call: ast.Call, tree: ast.Module) -> bool:
    """Whether a call is inside an `if` other than the test for __main__, or where a test expects it to fail."""
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, under = todo.pop()
        if node is call:
            return under
        if isinstance(node, ast.If):
            under |= not any(isinstance(n, ast.Constant) and n.value == "__main__" for n in ast.walk(node.test))
        under |= expects_error(node)
        todo.extend((child, under) for child in ast.iter_child_nodes(node))
    return False


def uses_name(node: ast.AST, name: str) -> bool:
    """Whether an expression starts at a variable: `engine.module.parameters()` at `engine`."""
    while isinstance(node, ast.Attribute | ast.Call):
        if isinstance(node, ast.Attribute) and key_of(node) == name:
            return True
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return bool(name) and ".".join(chain(node)) == name
