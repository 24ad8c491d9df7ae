"""Whether every name that a fix inserts has a value on the line where it is inserted.

A fix that writes `scaler.unscale_(optimizer)` into a helper whose caller has these variables, above the line that creates
the scaler, or where the scaler may be None, would break a script that runs. The edited text is parsed, and each name and
attribute that an edit inserts must be certain there:

    assigned before on every path, and not to None       scaler = GradScaler(...)
    or used before or after it in any case               scaler.scale(loss).backward()

`if` branches count where both assign, or where the inserted line is under the same condition. A name of the module, of a
function around this one or of `self` must be certain wherever this function is called. What cannot be shown is missing.
"""

from __future__ import annotations

import ast
import bisect
import builtins
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from halfstep.check.finding import Edit
from halfstep.check.fixes.certain import (
    assigned_names,
    assumptions,
    certain_after,
    inside,
    is_used_later,
    may_be_none,
)
from halfstep.check.script.syntax.children import all_children_of, blocks_of
from halfstep.check.script.syntax.edits import Lines
from halfstep.check.script.syntax.names import key_of

__all__ = ["apply_text", "missing_names"]

MAX_CALLS = 4  # functions followed from a use up to the module
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


def apply_text(text: str, edits: Iterable[Edit]) -> str:
    """A text with edits applied."""
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def missing_names(text: str, edits: Sequence[Edit]) -> frozenset[str]:
    """The variables that the edits of a Python text read where they may have no value; SyntaxError if it no longer parses."""
    new_text = apply_text(text, edits)
    starts, ends, shift = [], [], 0
    for edit in sorted(edits):
        starts.append(edit.start + shift)
        ends.append(edit.start + shift + len(edit.text))
        shift += len(edit.text) - (edit.end - edit.start)
    replaced = set(_words(" ".join(text[edit.start : edit.end] for edit in edits)))
    tree = ast.parse(new_text)
    lines = Lines(new_text)
    facts: _Facts | None = None
    missing = set()
    for node in _read_variables(tree):
        start = lines.offset(node.lineno, node.col_offset)
        number = bisect.bisect_right(starts, start) - 1
        if number < 0 or start >= ends[number]:
            continue
        facts = facts or _Facts(tree)
        key = key_of(node)
        if key.partition(".")[0] in facts.imported:
            key = key.partition(".")[0]  # the members of a module are the rule's to know
        if not key or key in replaced:
            continue
        use = _Use(key, node, needs_value=facts.needs_value(node))
        if not facts.certain(use, node):
            missing.add(key)
    return frozenset(missing)


def _read_variables(tree: ast.AST) -> Iterator[ast.Name | ast.Attribute]:
    """The variables a tree reads: `scaler` of `scaler.step(...)`, `self.scaler` of `self.scaler.step(...)`."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            pending += [node.func.value, *node.args, *node.keywords]  # the method is not a variable
            continue
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            yield node
            if not key_of(node):
                pending += all_children_of(node)
            continue
        pending += all_children_of(node)


def _words(text: str) -> Iterator[str]:
    """The variables in a text, each with what it is an attribute of: `self`, `self.loss`."""
    for match in re.finditer(r"[^\W\d]\w*(?:\.\w+)*", text):
        parts = match.group().split(".")
        yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


@dataclass(frozen=True)
class _Use:
    """A variable that is read; with `needs_value` it must not be None."""

    key: str
    node: ast.AST
    needs_value: bool = True

    @property
    def root(self) -> str:
        return self.key.partition(".")[0].partition("[")[0]


@dataclass
class _Facts:
    """A parsed text, with what is certain about its variables."""

    tree: ast.Module
    nodes: list[ast.AST] = field(default_factory=list)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes.append(self.tree)
        for parent in self.nodes:  # grows
            children = all_children_of(parent)
            self.nodes += children
            self.parents.update(dict.fromkeys(children, parent))

    @cached_property
    def imported(self) -> frozenset[str]:
        """The names that import statements bind."""
        statements = [n for n in self.nodes if isinstance(n, (ast.Import, ast.ImportFrom))]
        return frozenset(name for statement in statements for name in assigned_names(statement))

    @cached_property
    def nullable(self) -> frozenset[str]:
        """The last names of all variables and parameters that may be None somewhere."""
        names = set()
        for node in self.nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and may_be_none(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {_last(key_of(t)) for t in targets}
            elif isinstance(node, ast.keyword) and node.arg and may_be_none(node.value):
                names.add(node.arg)
            elif isinstance(node, ast.arguments):
                plain = [*node.posonlyargs, *node.args]
                pairs = [*zip(plain[len(plain) - len(node.defaults) :], node.defaults, strict=True)]
                pairs += [(p, d) for p, d in zip(node.kwonlyargs, node.kw_defaults, strict=True) if d is not None]
                names |= {p.arg for p, default in pairs if may_be_none(default)}
                hints = [p for p in (*plain, *node.kwonlyargs) if p.annotation is not None]
                names |= {p.arg for p in hints if p.annotation and "None" in ast.unparse(p.annotation)}
                names |= {p.arg for p in hints if p.annotation and "Optional" in ast.unparse(p.annotation)}
        return frozenset(names)

    def needs_value(self, node: ast.AST) -> bool:
        """Whether a variable is used for more than a test of what it is."""
        parent = self.parents.get(node)
        while isinstance(parent, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            node, parent = parent, self.parents.get(parent)
        return not (isinstance(parent, (ast.If, ast.IfExp, ast.While)) and parent.test is node)

    def scope_of(self, node: ast.AST) -> _Scope:
        """The function around a node, or the module; a function itself belongs to the scope it is defined in."""
        parent = self.parents.get(node)
        while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
            parent = self.parents.get(parent)
        assert parent is not None
        return parent

    def certain(self, use: _Use, at: ast.AST, depth: int = MAX_CALLS) -> bool:
        """Whether a variable has a value when the statement at a node runs."""
        scope = self.scope_of(at)
        if self._on_path(use, at, scope):
            return True
        params = _params(scope)
        if use.key in params:
            return not use.needs_value or use.key not in self.nullable
        if use.root in params and not (params[:1] == [use.root] and self._class_of(scope) is not None):
            return False  # an attribute of an argument, which nothing here uses
        if use.key == use.root and use.root not in params and self._assigns(scope, use.root):
            return False  # a local variable, not certain here
        if isinstance(scope, ast.Module):
            return hasattr(builtins, use.key)
        if use.needs_value and _last(use.key) in self.nullable:
            return False
        return depth > 0 and self._around(use, scope, depth)

    def _around(self, use: _Use, function: ast.FunctionDef | ast.AsyncFunctionDef, depth: int) -> bool:
        """Whether a variable of an outer scope, or an attribute of `self`, is certain whenever a function runs."""
        cls = self._class_of(function)
        calls = list(self._calls_of(function, is_method=cls is not None))
        if cls is not None and _params(function)[:1] == [use.root]:
            if function.name == "__init__":
                return False
            created = self._created_by(cls, use)
            own = [c for c in calls if self._class_of(self.scope_of(c)) is cls]
            return created and all(self.certain(use, c, depth - 1) for c in own)
        if "." in use.key or "[" in use.key:
            return False
        if self.certain(use, function, depth - 1):
            return True
        ends = self._at_end(use, self.scope_of(function))
        return ends and all(self.certain(use, call, depth - 1) for call in calls)

    def _at_end(self, use: _Use, scope: _Scope) -> bool:
        return isinstance(scope, ast.Module) and _knows(certain_after(scope.body, frozenset()), use)

    def _created_by(self, cls: ast.ClassDef, use: _Use) -> bool:
        """Whether every object of a class has an attribute once it is created."""
        if any(_last(use.key) in assigned_names(s) for s in cls.body if isinstance(s, (ast.Assign, ast.AnnAssign))):
            return True
        start = next((s for s in cls.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"), None)
        if start is None:
            bases = {b.id for b in cls.bases if isinstance(b, ast.Name)}
            classes = [n for n in self.nodes if isinstance(n, ast.ClassDef) and n.name in bases]
            return len(classes) == 1 and classes[0] is not cls and self._created_by(classes[0], use)
        key = ".".join([*_params(start)[:1], *use.key.split(".")[1:]])
        return _knows(certain_after(start.body, frozenset()), _Use(key, use.node))

    def _calls_of(self, function: ast.FunctionDef | ast.AsyncFunctionDef, *, is_method: bool) -> Iterator[ast.Call]:
        """The calls of a function by its name, or of a method through `self`."""
        for node in self.nodes:
            if not isinstance(node, ast.Call):
                continue
            func = node.func
            if is_method and isinstance(func, ast.Attribute) and func.attr == function.name:
                if key_of(func.value) in _params(self.scope_of(node))[:1]:
                    yield node
            elif not is_method and isinstance(func, ast.Name) and func.id == function.name:
                yield node

    def _class_of(self, scope: _Scope) -> ast.ClassDef | None:
        parent = self.parents.get(scope)
        return parent if isinstance(parent, ast.ClassDef) else None

    @staticmethod
    def _assigns(scope: _Scope, name: str) -> bool:
        """Whether a name is a local variable of a scope."""
        if any(name in node.names for node in ast.walk(scope) if isinstance(node, (ast.Global, ast.Nonlocal))):
            return False
        return any(name in assigned_names(node) for node in inside(scope.body))

    def _on_path(self, use: _Use, at: ast.AST, scope: _Scope) -> bool:
        """Whether the statements that run before or after `at` in any case give the variable a value or use it."""
        path = []
        node = at
        while node is not scope:
            path.append(node)
            node = self.parents[node]
        assumed: set[tuple[str, bool]] = set()
        for inner, outer in itertools.pairwise(path):
            if isinstance(outer, (ast.If, ast.IfExp)) and inner is not outer.test:
                is_body = inner is outer.body if isinstance(outer, ast.IfExp) else inner in outer.body
                assumed |= set(assumptions(outer.test, is_true=is_body))
        known: dict[str, int] = {}
        nodes = [scope, *reversed(path)]
        level = 2 if use.needs_value else 1
        for outer, inner in itertools.pairwise(nodes):
            block = next((b for b in blocks_of(outer) if inner in b), None)
            if block is None:
                continue
            if isinstance(outer, (ast.With, ast.AsyncWith, ast.For, ast.AsyncFor)):
                known.update(dict.fromkeys(assigned_names(outer), 2))
            index = [id(s) for s in block].index(id(inner))
            known = certain_after(block[:index], frozenset(assumed), known)
            if is_used_later(block[index + 1 :], use.key, level, frozenset(assumed)):
                return True
        # `if scaler is not None:` reads it, so it exists; where the edit inserts the test, that use is judged separately.
        if (use.key, True) in assumed:
            return True
        return _knows(known, use)


def _knows(known: dict[str, int], use: _Use) -> bool:
    return known.get(use.key, 0) >= (2 if use.needs_value else 1)


def _params(scope: _Scope) -> list[str]:
    if isinstance(scope, ast.Module):
        return []
    a = scope.args
    extra = [p.arg for p in (a.vararg, a.kwarg) if p is not None]
    return [*(p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)), *extra]


def _last(key: str) -> str:
    return key.rsplit(".", 1)[-1]
