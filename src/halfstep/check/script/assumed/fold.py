"""What is left of a script for one value of a setting: branches decided, tables looked up, flags replaced.

    dtype = torch.float32                                   with precision = "fp16":
    if args.precision == "fp16":                            dtype = torch.float16
        dtype = torch.float16                               scaler = GradScaler(enabled=False)
    scaler = GradScaler(enabled=args.precision == "amp")

Rules then read plain code, in the same places of the text. Only what depends on the setting is decided: a flag that the
file sets to a constant stays a flag, because somebody may change it.
"""

from __future__ import annotations

import ast
import copy
from typing import Any, TypeGuard

from halfstep.check.script.assumed.gpu import HAS_BF16, asks, words_in
from halfstep.check.script.assumed.reads import Place, fallback, is_read
from halfstep.check.script.assumed.settings import OF_ENGINE, Assumption
from halfstep.check.script.syntax.children import SIMPLE, all_children_of, statements_in
from halfstep.check.script.syntax.constants import Constants
from halfstep.check.script.syntax.evaluate import OPEN, chosen_case, value_of
from halfstep.check.script.syntax.excluded import is_rejection
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Outline

__all__ = ["Rejected", "fold"]

Plain = str | bool | int | float | None
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_BLOCKS = ("body", "orelse", "finalbody")
MAX_STEPS = 4  # of a value that is passed from function to function
_AVAILABLE = "torch.cuda.is_available"
_READ = {"Accelerator", "is_available", "mixed_precision"}  # what is read in the same way for every setting


class Rejected(Exception):
    """The file raises for this value."""


def fold(tree: ast.Module, outline: Outline, assumption: Assumption, settled: set[ast.AST]) -> bool:
    """Decide what depends on the setting, in place; whether anything has changed.

    `settled` are the nodes that earlier rounds have decided, and receives those of this one.
    """
    folder = _Folder(tree, outline, assumption, settled)
    folder.visit(tree)
    return folder.changed


class _Folder(ast.NodeTransformer):
    def __init__(self, tree: ast.Module, outline: Outline, assumption: Assumption, settled: set[ast.AST]) -> None:
        self.outline = outline
        self.assumption = assumption
        self.constants = Constants(outline)
        self.functions = {f.node: f for f in outline.functions}
        self.function = outline.module
        self.settled = settled
        self.names = _settled_names(outline, settled)
        available = {name for name, full in outline.names.table.items() if full == _AVAILABLE}
        read = {name for name, _ in assumption.values} | available | _READ
        names = self.names | read | (words_in(tree) if HAS_BF16 in read else frozenset())
        self.involved = _involved(tree, names, settled)
        self.around: Place = ()
        self.changed = False

    def visit(self, node: ast.AST) -> Any:
        if node not in self.involved:  # 97 % of the nodes
            is_block = not isinstance(node, ast.expr) and type(node) not in SIMPLE
            for statement in reversed(statements_in(node)) if is_block else ():
                self._tidy(statement)
            return node
        if isinstance(node, _FUNCTIONS):
            return self._visit_function(node)
        if isinstance(node, ast.If):
            return self._visit_if(node)
        self.generic_visit(node)
        if isinstance(node, ast.Match):
            return self._visit_match(node)
        if isinstance(node, ast.expr):
            return node if node in self.settled else self._reduced(node)
        self._tidy(node)
        return node

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        if node not in self.functions:
            return node  # no rule looks at it
        outer, around = self.function, self.around
        self.function, self.around = self.functions[node], (node.lineno, *around)
        self.generic_visit(node)
        self._tidy(node)
        self.function, self.around = outer, around
        return node

    def _visit_if(self, node: ast.If) -> Any:
        node.test = self.visit(node.test)
        value = self._value(node.test)
        if not self._is_settled(node.test) or value is OPEN:
            self.generic_visit(node)
            self._tidy(node)
            return node
        self.changed = True
        self._settle_none(node.orelse if value else node.body)
        return self._chosen(node, node.body if value else node.orelse)

    def _settle_none(self, dropped: list[ast.stmt]) -> None:
        """Settle a None that nothing replaces any more: `scaler = None` above `if args.amp: scaler = GradScaler()`."""
        assigned = (n for statement in dropped for n in ast.walk(statement) if isinstance(n, ast.Assign))
        for key in {key_of(target) for assign in assigned for target in assign.targets}:
            for binding in self.outline.bindings.get(key, ()):
                if isinstance(binding.value, ast.Constant) and binding.value.value is None:
                    self.settled.add(binding.value)

    def _chosen(self, node: ast.stmt, body: list[ast.stmt]) -> list[ast.stmt]:
        """The statements of the branch that runs."""
        if body and is_rejection(body[-1]):
            raise Rejected
        statements: list[ast.stmt] = []
        for statement in body:
            if isinstance(statement, ast.Assign):
                self.settled |= {statement, statement.value}
            result = self.visit(statement)
            statements += result if isinstance(result, list) else [result] if result is not None else []
        return statements or [ast.copy_location(ast.Pass(), node)]

    def _visit_match(self, node: ast.Match) -> Any:
        subject = self._value(node.subject)
        if not self._is_settled(node.subject) or subject is OPEN:
            return node
        case = chosen_case(node, subject, self._leaf)
        if not isinstance(case, ast.match_case):
            return node
        self.changed = True
        return self._chosen(node, case.body)

    def _tidy(self, node: ast.AST) -> None:
        """Drop what cannot run, and assignments that a decided branch replaces."""
        for name in _BLOCKS:
            block = getattr(node, name, None)
            if not isinstance(block, list) or not block or not isinstance(block[0], ast.stmt):
                continue
            for index, statement in enumerate(block[:-1]):
                if isinstance(statement, _LEAVES):
                    del block[index + 1 :]
                    break
            for index in range(len(block) - 1, 0, -1):
                if block[index] in self.settled:
                    _drop_replaced(block, index)

    def _is_settled(self, node: ast.AST) -> bool:
        """Whether the value of an expression depends on the setting."""
        if node in self.settled:
            return True
        if isinstance(node, (ast.Name, ast.Attribute)):
            is_literal = self._may_be_settled(node) and self.constants.literal(node, self.function) in self.settled
            return is_literal or self._is_none(node)
        return any(self._is_settled(child) for child in ast.iter_child_nodes(node))

    def _is_none(self, node: ast.Name | ast.Attribute) -> bool:
        """Whether the setting leaves a variable None: `scaler = GradScaler() if args.amp else None`."""
        if not self._may_be_settled(node):
            return False
        source = self.constants.source(node, self.function)
        for _ in range(MAX_STEPS):
            if source is None or source[0] in self.settled:
                break
            source = self.constants.source(*source)
        value = source[0] if source is not None and source[0] in self.settled else None
        return isinstance(value, ast.Constant) and value.value is None

    def _may_be_settled(self, node: ast.Name | ast.Attribute) -> bool:
        return (node.id if isinstance(node, ast.Name) else node.attr) in self.names

    def _reduced(self, node: ast.expr) -> ast.expr:
        """A simpler expression with the same value."""
        value = self._assumed(node)
        if _is_plain(value):
            return self._constant(value, node)
        if isinstance(node, ast.Call) and last_name(key_of(node.func)) == "Accelerator":
            return self._with_precision(node)
        if isinstance(node, ast.Call) and self.outline.names.full(node.func) == _AVAILABLE:
            return self._constant(True, node)
        if (default := fallback(node)) is not None and default in self.settled:
            self.changed = True
            return default  # a setting that follows the one that is assumed, unless it is set too
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._literal(node) if isinstance(node.ctx, ast.Load) and self._may_be_settled(node) else node
        if isinstance(node, ast.IfExp):
            test = self._value(node.test) if self._is_settled(node.test) else OPEN
            if test is OPEN:
                return node
            self.changed = True
            return self._marked(node.body if test else node.orelse)
        if isinstance(node, ast.BoolOp):
            return self._joined(node)
        if isinstance(node, (ast.Subscript, ast.Call)) and self._has_settled_key(node):
            if (entry := self._entry(node)) is not None:
                self.changed = True
                return self._marked(entry)
            literal, value = self._literal(node), self._value(node)
            return literal if literal is not node or not _is_plain(value) else self._constant(value, node)
        if isinstance(node, (ast.Compare, ast.UnaryOp)) and self._is_settled(node):
            value = self._value(node)
            return self._constant(value, node) if _is_plain(value) else node
        return node

    def _assumed(self, node: ast.expr) -> object:
        """The value of a setting that an expression reads."""
        assumption = self.assumption
        name, value = assumption.values[0]
        if name == HAS_BF16:
            answer = asks(node)
            return answer is value if answer is not None else OPEN
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "mixed_precision"
            and key_of(node.value) in assumption.engines
        ):
            return assumption.values[0][1] if isinstance(node.ctx, ast.Load) else OPEN
        reads = (value for name, value in assumption.values if is_read(node, name, self.around, assumption.params))
        return next(reads, OPEN)

    def _with_precision(self, call: ast.Call) -> ast.Call:
        """An Accelerator that reads its own configuration, with the precision that is assumed there."""
        name, value = self.assumption.values[0]
        if name.endswith(OF_ENGINE) and not any(k.arg == "mixed_precision" for k in call.keywords):
            call.keywords.append(ast.copy_location(ast.keyword("mixed_precision", self._constant(value, call)), call))
        return call

    def _has_settled_key(self, node: ast.Subscript | ast.Call) -> bool:
        """Whether an entry, or the arguments of a call, depend on the setting."""
        if isinstance(node, ast.Subscript):
            return isinstance(node.ctx, ast.Load) and self._is_settled(node.slice)
        own = node.func.value if isinstance(node.func, ast.Attribute) else None
        return any(
            self._is_settled(a) for a in (*node.args, *(k.value for k in node.keywords), *([own] if own else ()))
        )

    def _entry(self, node: ast.Subscript | ast.Call) -> ast.expr | None:
        """The entry of `{"nf4": BitsAndBytesConfig(...), "fp16": None}[setting]`, written in place, or None of a table, also by `get`."""
        is_get = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" and len(node.args) == 1
        if isinstance(node, ast.Subscript):
            table, index = node.value, node.slice
        elif is_get and isinstance(node.func, ast.Attribute) and not node.keywords:
            table, index = node.func.value, node.args[0]
        else:
            return None
        key, entries = self._value(index), self.constants.table(table, self.function)
        if not _is_plain(key) or entries is None or (key not in entries and not is_get):
            return None
        entry, _ = entries.get(key, (ast.Constant(None), self.function))
        if isinstance(entry, ast.Constant) and entry.value is None:
            return ast.copy_location(ast.Constant(None), node)
        return entry if isinstance(table, ast.Dict) else None

    def _literal(self, node: ast.expr) -> ast.expr:
        """The literal that a variable, an entry or a result stands for, if that depends on the setting."""
        is_key = isinstance(node, (ast.Subscript, ast.Call))
        literal = self.constants.literal(node, self.function)
        if literal is None and is_key:
            literal = self._default(node)
        if literal is None or literal is node or not (is_key or literal in self.settled):
            return node
        return self._constant(literal, node)

    def _default(self, node: ast.expr) -> ast.expr | None:
        """The default of `table.get(setting, default)`, for a value that the table does not have."""
        func = node.func if isinstance(node, ast.Call) else None
        if not isinstance(func, ast.Attribute) or func.attr != "get" or not isinstance(node, ast.Call):
            return None
        entries = self.constants.table(func.value, self.function)
        key = self._value(node.args[0])
        if entries is None or len(node.args) != 2 or key is OPEN or key in entries:
            return None
        return self.constants.literal(node.args[1], self.function)

    def _marked(self, node: ast.expr) -> ast.expr:
        self.settled.add(node)
        return node

    def _constant(self, value: Plain | ast.expr, old: ast.expr) -> ast.expr:
        self.changed = True
        new = copy.deepcopy(value) if isinstance(value, ast.expr) else ast.Constant(value)
        for part in ast.walk(new):
            if isinstance(part, ast.expr):
                ast.copy_location(part, old)
        return self._marked(new)

    def _joined(self, node: ast.BoolOp) -> ast.expr:
        """`and` and `or` without the operands that the setting decides."""
        is_and = isinstance(node.op, ast.And)
        left: list[ast.expr] = []
        for part in node.values:
            value = self._value(part) if self._is_settled(part) else OPEN
            if value is OPEN:
                left.append(part)
            elif bool(value) is not is_and:
                self.changed = True
                return self._marked(part) if not left else self._constant(not is_and, node)
        if len(left) == len(node.values):
            return node
        self.changed = True
        if not left:
            return self._marked(node.values[-1])
        node.values = left
        return left[0] if len(left) == 1 else node

    def _value(self, node: ast.expr) -> object:
        """The constant that an expression is; a dtype is a tuple of its name, which no string of the script is equal to."""
        return value_of(node, self._leaf)

    def _leaf(self, node: ast.expr) -> object:
        full = self.outline.names.full(node)
        if full.startswith("torch."):
            return (full,)
        is_variable = isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
        literal = self.constants.literal(node, self.function) if is_variable else None
        if literal is not None and literal is not node:
            return self._value(literal)
        return None if isinstance(node, (ast.Name, ast.Attribute)) and self._is_none(node) else OPEN


def _settled_names(outline: Outline, settled: set[ast.AST]) -> set[str]:
    """The names of variables, attributes and parameters that may be what an earlier round has decided; all others stay."""
    names = {last_name(key) for key, bindings in outline.bindings.items() if any(b.value in settled for b in bindings)}
    calls = [s.call for sites in outline.calls.values() for s in sites]
    called = {
        name
        for call in calls
        if any(value in settled for value in (*call.args, *(k.value for k in call.keywords)))
        for name in (last_name(key_of(call.func)), *(k.arg for k in call.keywords if k.arg))
    }
    params = (p for f in outline.functions if f.name in called or f.cls in called for p in f.params)
    # `use_amp, dtype = formats("fp16")`: what a function returns for the value.
    results = (
        last_name(key)
        for key, bindings in outline.bindings.items()
        if any(isinstance(b.value, ast.Call) and last_name(key_of(b.value.func)) in called for b in bindings)
    )
    return names | called | set(params) | set(results)


def _involved(tree: ast.Module, names: set[str], settled: set[ast.AST]) -> set[ast.AST]:
    """The nodes that contain one of the names, or what an earlier round has decided: no other one can change."""
    parents: dict[ast.AST, ast.AST] = {}
    involved: set[ast.AST] = set()
    nodes: list[ast.AST] = [tree]
    for node in nodes:  # grows
        name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", None) or getattr(node, "value", None)
        if node in settled or (isinstance(name, str) and name in names):
            around: ast.AST | None = node
            while around is not None and around not in involved:
                involved.add(around)
                around = parents.get(around)
        for child in all_children_of(node):
            parents[child] = node
            nodes.append(child)
    return involved


def _is_plain(value: object) -> TypeGuard[Plain]:
    return value is None or isinstance(value, (str, bool, int, float))


def _drop_replaced(block: list[ast.stmt], index: int) -> None:
    """Drop the assignment of a variable that the one at `index` replaces before anything reads it."""
    new = block[index]
    key = key_of(new.targets[0]) if isinstance(new, ast.Assign) and len(new.targets) == 1 else ""
    if not key or not isinstance(new, ast.Assign) or _reads(new.value, key):
        return
    for before in range(index - 1, -1, -1):
        old = block[before]
        if isinstance(old, ast.Assign) and len(old.targets) == 1 and key_of(old.targets[0]) == key:
            block[before] = ast.copy_location(ast.Pass(), old)
            return
        if _reads(old, key):
            return


def _reads(node: ast.AST, key: str) -> bool:
    return any(key_of(n) == key for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute)))
