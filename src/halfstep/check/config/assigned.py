"""Keys that a script sets after it has written a dictionary: `ds_config["fp16"] = {"enabled": True}`.

What follows the dictionary in the same list of statements always holds. What stands in a branch of an `if` holds together
with the rest of that branch, so each branch is a configuration to check. All other changes make their keys unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from halfstep.check.config.literals import Literals, subscript
from halfstep.check.script.syntax.names import key_of
from halfstep.precision.node import UNKNOWN, Block, Entry, Node, Scalar, Span

__all__ = ["Assignments"]

_MAX_BRANCHES = 8
Path = tuple[str, ...]


@dataclass(frozen=True)
class _Group:
    """The assignments to one variable's keys in one list of statements."""

    statements: list[ast.stmt]
    assigns: tuple[ast.Assign, ...]
    chain: int  # identifies the first `if` of a chain of elif; 0 if the list is no branch


class Assignments:
    """The assignments to keys in one script, by variable."""

    def __init__(self, nodes: Sequence[ast.AST], literals: Literals) -> None:
        self.nodes = nodes
        self.literals = literals
        self.groups: dict[str, list[_Group]] = {}
        functions = (n for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
        self.functions = [(n.lineno, n.end_lineno or 0) for n in functions]  # outer ones first
        self.classes = [(n.lineno, n.end_lineno or 0) for n in nodes if isinstance(n, ast.ClassDef)]
        tops: dict[int, int] = {}
        for node in nodes:
            for key in ("body", "orelse", "finalbody"):
                statements = getattr(node, key, None)
                if isinstance(statements, list) and statements:
                    self._read(node, statements, tops, is_else=key == "orelse")

    def _read(self, node: ast.AST, statements: list[ast.stmt], tops: dict[int, int], *, is_else: bool) -> None:
        chain = tops.get(id(node), id(node)) if isinstance(node, ast.If) else 0
        if chain and is_else and len(statements) == 1 and isinstance(statements[0], ast.If):
            tops[id(statements[0])] = chain  # elif
        assigns: dict[str, list[ast.Assign]] = {}
        for statement in statements:
            made = [statement] if isinstance(statement, ast.Assign) else self._updates(statement)
            for assign in made:
                name, path = subscript(assign.targets[0])
                if len(assign.targets) == 1 and name and path:
                    assigns.setdefault(name, []).append(assign)
        for name, group in assigns.items():
            self.groups.setdefault(name, []).append(_Group(statements, tuple(group), chain))

    def _updates(self, statement: ast.stmt) -> list[ast.Assign]:
        """The assignments that `config.update({"fp16": {...}})` makes, with the places of its keys and values."""
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return []
        if call.func.attr != "update" or len(call.args) > 1:
            return []
        option = call.args[0] if call.args else ast.Dict([], [])
        if not isinstance(option, ast.Dict):
            return []  # its keys are unknown, as `changes` has them
        pairs = [(k, v) for k, v in zip(option.keys, option.values, strict=True)]
        pairs += [
            (ast.copy_location(ast.Constant(k.arg), k), k.value) if k.arg else (None, k.value) for k in call.keywords
        ]
        assigns = []
        for key, value in pairs:
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                return []
            target = ast.copy_location(ast.Subscript(call.func.value, key, ast.Store()), key)
            assigns.append(ast.copy_location(ast.Assign([target], value), value))
        return assigns

    def versions(self, root: Block, name: str, binding: ast.AST) -> Iterator[Block]:
        """A dictionary with the keys that are always set later, then one for each branch that sets more of them.

        Nothing if a change cannot be followed: a key that is not a literal, or a function that may change any of them.
        """
        changes = self.literals.changes.get(name, [])
        if None in changes:
            nodes = self.literals.changed_at[name]
            changes = [path for path, node in zip(changes, nodes, strict=True) if node not in self._merging]
            root = replace(root, open=True)
        if None in changes:
            return
        paths = [path for path in changes if path]  # `del config` changes no key
        if not paths:
            yield root
            return
        always, branches = self._groups_after(name, binding)
        yield self._build(root, always, paths)
        for branch in branches[:_MAX_BRANCHES]:
            left = list(paths)
            for other in branches:
                if other is not branch and branch.chain and other.chain == branch.chain:
                    _remove(left, other.assigns)
            yield self._build(root, (*always, *branch.assigns), left)

    @cached_property
    def _merging(self) -> frozenset[ast.AST]:
        """What runs only where another dictionary is merged into this one: the `update` of `if options: config.update(options)`.

        A run without that dictionary has the values that are written.
        """
        optional = [(n, key) for n in self.nodes if isinstance(n, ast.If) and (key := _tested(n.test))]
        merges = [(s, key) for branch, key in optional for s in branch.body if isinstance(s, (ast.For, ast.Expr))]
        return frozenset(node for statement, key in merges if _reads(statement, key) for node in ast.walk(statement))

    def _groups_after(self, name: str, binding: ast.AST) -> tuple[tuple[ast.Assign, ...], list[_Group]]:
        """The assignments next to the dictionary, and those of each branch of an `if` in the same function, or of other methods."""
        line = getattr(binding, "lineno", 1)
        around = [lines for lines in self.functions if lines[0] <= line <= lines[1]]
        first, last = around[-1] if around else (1, 1 << 30)
        always: tuple[ast.Assign, ...] = ()
        branches = []
        for group in self.groups.get(name, ()):
            assigns = tuple(a for a in group.assigns if line < a.lineno <= last)
            if any(getattr(statement, "value", None) is binding for statement in group.statements):
                always = assigns
            elif assigns and group.chain and first <= assigns[0].lineno:
                branches.append(replace(group, assigns=assigns))
            elif name.startswith("self.") and self._is_other_method(group.assigns[0].lineno, line, first):
                branches.append(group)  # another method sets more keys, here or in a branch of its own
        return always, branches

    def written(self, call: ast.Call, entries: Sequence[Entry], name: str, source: ast.expr) -> ast.Call:
        """A call with the values of `**options` as its own arguments: those of the dictionary and those assigned later."""
        made = [a.value for group in self.groups.get(name, ()) for a in group.assigns]
        parts = source.values if isinstance(source, ast.Dict) else [k.value for k in getattr(source, "keywords", ())]
        values = {self.literals.span(value): value for value in (*parts, *made)}
        keywords = [ast.keyword(e.key, values[e.value.span]) for e in entries if e.value.span in values]
        return ast.copy_location(ast.Call(call.func, [], keywords), call)

    def _is_other_method(self, line: int, binding: int, first: int) -> bool:
        """Whether a line is in another method of the class in which line `binding` is, in the method that starts at `first`."""
        owner = next((lines for lines in reversed(self.classes) if lines[0] <= binding <= lines[1]), None)
        method = next((lines for lines in reversed(self.functions) if lines[0] <= line <= lines[1]), None)
        return owner is not None and method is not None and owner[0] < method[0] <= owner[1] and method[0] != first

    def _build(self, root: Block, assigns: Sequence[ast.Assign], paths: Sequence[Path]) -> Block:
        """The dictionary with these assignments made, in their order, and every other changed key unknown."""
        left = list(paths)
        _remove(left, assigns)
        for assign in sorted(assigns, key=lambda a: a.lineno):
            target = assign.targets[0]
            path = subscript(target)[1]
            if path and isinstance(target, ast.Subscript):
                span = self.literals.span(target.slice)
                root = _with_value(root, path, span, self.literals.node(assign.value))
        for path in left:
            root = _with_unknown(root, path)
        return root


def _tested(test: ast.expr) -> str:
    """The variable of `if options:` and `if options is not None:`."""
    is_set = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)
    return key_of(test.left if is_set and isinstance(test, ast.Compare) else test)


def _reads(statement: ast.For | ast.Expr, key: str) -> bool:
    """Whether a loop goes through a variable, or a call receives it: `for k, v in options.items():`, `config.update(options)`."""
    source = statement.iter if isinstance(statement, ast.For) else statement.value
    return any(key_of(node) == key for node in ast.walk(source) if isinstance(node, (ast.Name, ast.Attribute)))


def _remove(paths: list[Path], assigns: Sequence[ast.Assign]) -> None:
    """Take the paths of these assignments off a list, each once."""
    for assign in assigns:
        path = subscript(assign.targets[0])[1]
        if path in paths:
            paths.remove(path)


def _with_value(block: Block, path: Path, key_span: Span, node: Node) -> Block:
    """The block with a value set; a block that does not exist on the path stays unknown."""
    key, rest = path[0], path[1:]
    entry = block.entry(key)
    if rest:
        if entry is None or not isinstance(entry.value, Block):
            return _with_unknown(block, path)
        node, key_span = _with_value(entry.value, rest, key_span, node), entry.key_span
    new = Entry(key, key_span, node)
    if entry is None:
        return replace(block, entries=(*block.entries, new))
    return replace(block, entries=tuple(new if e is entry else e for e in block.entries))


def _with_unknown(block: Block, path: Path) -> Block:
    """The block with the value at a path unknown, or the block open if the key is absent."""
    key, rest = path[0], path[1:]
    entry = block.entry(key)
    if entry is None:
        return replace(block, open=True)
    node: Node = Scalar(entry.value.span, UNKNOWN)
    if rest and isinstance(entry.value, Block):
        node = _with_unknown(entry.value, rest)
    entries = tuple(Entry(e.key, e.key_span, node) if e is entry else e for e in block.entries)
    return replace(block, entries=entries)
