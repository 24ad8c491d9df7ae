"""What an expression is in one run: variables, parameters, attributes and functions of the file followed, settings as given.

    self.amp_dtype = torch.bfloat16 if opt.amp_bf16 else torch.float16      in the run with amp_bf16, on a GPU
    if not torch.cuda.is_bf16_supported():                                  without bfloat16: float16
        self.amp_dtype = torch.float16

A run is a dictionary of settings. Where an expression needs one that the run has no value for, `Undecided` names it, and the
caller divides the run into one for each of its values; so only settings that decide something are ever asked for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from halfstep.check.regex import regex
from halfstep.check.script.objects.values import DTYPES, constant, text_of
from halfstep.check.script.syntax.children import blocks_of
from halfstep.check.script.syntax.excluded import is_rejection
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Binding, Function, Outline
from halfstep.check.script.syntax.scope import default_of
from halfstep.check.script.syntax.settled import setting_name

__all__ = ["OTHER", "Format", "Leaf", "Reader", "Rejected", "Undecided", "Unreadable"]

MAX_DEPTH = 12
OTHER = "<other>"  # a string that no test of the file names
DEVICE = "device"
_OWNER = regex(r"(^|[._])(args?|cfg|conf|config|opts?|options?|hparams|hp|flags|settings|environ)(\W|$)", re.IGNORECASE)
_DEVICES = regex(r"^(self\.)?(\w+_)?(device|device_type|dev)(\.type)?$")
_PRECISION = regex(r"16|32|dtype|bf|half|float|precision|amp|autocast|scal|cuda|gpu|device|mps|cpu", re.IGNORECASE)
_TEXT = {"lower", "upper", "strip"}
_THING = object()  # a scaler, a model, or anything else that is not None


class Format(NamedTuple):
    """A dtype of torch."""

    name: str


class Leaf(NamedTuple):
    """Something that the file does not decide: a setting, a parameter without callers, a test of the hardware or of anything else."""

    kind: str  # "setting", "parameter", "device", "test"
    name: str


class Undecided(Exception):
    """A leaf that the run has no value for, and the values that it may have."""

    def __init__(self, leaf: Leaf, values: tuple[object, ...]) -> None:
        super().__init__(leaf.name)
        self.leaf = leaf
        self.values = values


class Unreadable(Exception):
    """An expression that the file decides in a way that this module does not follow."""


class Rejected(Exception):
    """The file raises in this run."""


@dataclass
class Reader:
    """The values of expressions in one run."""

    outline: Outline
    run: Mapping[Leaf, object]
    calls: dict[Function, tuple[ast.Call, Function]] = field(default_factory=dict)  # by the functions they run
    read: set[Leaf] = field(default_factory=set)
    assumed: set[tuple[str, bool]] = field(default_factory=set)  # conditions on what is reached
    depth: int = 0

    def value(self, node: ast.expr, function: Function, wanted: tuple[str, ...] = ()) -> object:
        """The value of an expression; `wanted` are the strings that it is compared with."""
        if self.depth > MAX_DEPTH:
            raise Unreadable
        self.depth += 1
        try:
            return self._value(node, function, wanted)
        finally:
            self.depth -= 1

    def _value(self, node: ast.expr, function: Function, wanted: tuple[str, ...]) -> object:
        if isinstance(node, ast.Constant):
            return node.value
        if (full := self.outline.names.full(node)) in DTYPES:
            return Format(DTYPES[full])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self.value(node.operand, function)
        if isinstance(node, ast.BoolOp):
            return self._joined(node, function)
        if isinstance(node, ast.IfExp):
            return self.value(node.body if self.value(node.test, function) else node.orelse, function, wanted)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return tuple(self.value(element, function) for element in node.elts)
        if isinstance(node, ast.Compare):
            return self._compared(node, function)
        if isinstance(node, ast.Call):
            return self._called(node, function, wanted)
        if isinstance(node, ast.Subscript) and (table := self._table(node.value, function)) is not None:
            return self._entry(table, node.slice, function)
        if key_of(node):
            return self._variable(node, function, wanted)
        raise Unreadable

    def _joined(self, node: ast.BoolOp, function: Function) -> object:
        value: object = None
        for part in node.values:
            value = self.value(part, function)
            if bool(value) is isinstance(node.op, ast.Or):
                break
        return value

    def leaf(self, kind: str, name: str, wanted: tuple[str, ...] = ()) -> object:
        """The value of a leaf in this run."""
        leaf = Leaf(kind, name)
        self.read.add(leaf)
        if leaf not in self.run:
            others = () if kind == "device" else (OTHER,)
            raise Undecided(leaf, (*wanted, *others) if wanted else (True, False))
        return self.run[leaf]

    def _test(self, node: ast.expr) -> object:
        """The outcome of a test that the file does not decide."""
        if "scaler" in text_of(node).lower():
            raise Unreadable
        return self.leaf("test", text_of(node))

    def on_device(self) -> object:
        """The kind of device."""
        return self.leaf("device", DEVICE, ("cuda", "mps"))

    def _compared(self, node: ast.Compare, function: Function) -> object:
        op, right = node.ops[0], node.comparators[0]
        parts = right.elts if isinstance(right, (ast.Tuple, ast.List, ast.Set)) else [right]
        strings = tuple(str(p.value) for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str))
        is_plain = len(node.ops) == 1 and isinstance(op, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn))
        if not is_plain:
            return self._test(node)
        try:
            other = self.value(right, function)
            left = self.value(node.left, function, strings)
        except Unreadable:
            return self._test(node)
        except Undecided as undecided:
            is_own = undecided.leaf.kind != "test" and undecided.leaf.name == setting_name(node.left)
            if strings or not is_own or isinstance(constant(right), bool):
                raise
            if constant(right) is not None:
                raise Unreadable from None  # `args.dtype == torch.bfloat16`
            return self._test(node)
        if left is OTHER and not strings:
            raise Unreadable
        if isinstance(op, (ast.In, ast.NotIn)):
            if not isinstance(other, (tuple, str)) or (isinstance(other, str) and not isinstance(left, str)):
                return self._test(node)
            return (left in other) is isinstance(op, ast.In)
        return (left == other) is isinstance(op, (ast.Eq, ast.Is))

    def _called(self, node: ast.Call, function: Function, wanted: tuple[str, ...]) -> object:
        full, name = self.outline.names.full(node.func), last_name(key_of(node.func))
        first = node.args[0] if node.args else None
        if full == "torch.cuda.is_available":
            return self.on_device() == "cuda"
        if name == "GradScaler" or name.endswith("GradScaler"):
            return _THING
        if full in {"torch.device", "str", "bool"} or name in {"str", "bool"}:
            if first is None:
                raise Unreadable
            value = self.value(first, function, wanted)
            return bool(value) if name == "bool" else value
        if name == "getattr" and len(node.args) > 1:
            return self._named(node, function, wanted)
        if isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if node.func.attr in _TEXT or (node.func.attr == "startswith" and first is not None):
                text = self.value(owner, function, wanted)
                prefix = self.value(first, function) if first is not None else ""
                if not isinstance(text, str) or not isinstance(prefix, str):
                    raise Unreadable
                return text.startswith(prefix) if first is not None else getattr(text, node.func.attr)()
            if node.func.attr in {"get", "getenv"} and first is not None:
                if (table := self._table(owner, function)) is not None:
                    return self._entry(table, first, function, node.args[1] if len(node.args) > 1 else None)
                if isinstance(first, ast.Constant) and (name == "getenv" or _OWNER.search(text_of(owner))):
                    return self.leaf("setting", str(first.value), wanted)
        returned = self._returned(node, function)
        if returned is not None:
            return self.value(*returned)
        return self._test(node)

    def _named(self, node: ast.Call, function: Function, wanted: tuple[str, ...]) -> object:
        """`getattr(torch, name)`, and `getattr(args, "amp", False)`."""
        if self.outline.names.full(node.args[0]) == "torch":
            name = self.value(node.args[1], function)
            if f"torch.{name}" not in DTYPES:
                raise Unreadable
            return Format(DTYPES[f"torch.{name}"])
        if isinstance(node.args[1], ast.Constant) and _OWNER.search(text_of(node.args[0])):
            return self.leaf("setting", str(node.args[1].value), wanted)
        raise Unreadable

    def _returned(self, call: ast.Call, function: Function) -> tuple[ast.expr, Function] | None:
        """What a function of this file returns in this run; None if it is another file's."""
        target = self.outline.call_target(call, function)
        if target is None or target.name == "__init__" or isinstance(target.node, ast.Module):
            return None
        self.calls[target] = (call, function)
        returned = self._run(target.node.body, target)
        if returned is None or returned.value is None:
            raise Unreadable
        return returned.value, target

    def _run(self, statements: list[ast.stmt], function: Function) -> ast.Return | None:
        """The `return` at which statements end."""
        for statement in statements:
            if isinstance(statement, ast.Return):
                return statement
            if is_rejection(statement):
                raise Rejected
            if isinstance(statement, ast.If):
                branch = statement.body if self.value(statement.test, function) else statement.orelse
                if (returned := self._run(branch, function)) is not None:
                    return returned
            elif any(isinstance(n, (ast.Return, ast.Yield)) for n in ast.walk(statement)):
                raise Unreadable
        return None

    def _table(self, node: ast.expr, function: Function) -> ast.Dict | None:
        if isinstance(node, ast.Dict):
            return node
        values = self.outline.values(key_of(node), function) if key_of(node) else []
        return values[0] if len(values) == 1 and isinstance(values[0], ast.Dict) else None

    def _entry(self, table: ast.Dict, index: ast.expr, function: Function, default: ast.expr | None = None) -> object:
        keys = [key.value if isinstance(key, ast.Constant) else None for key in table.keys]
        if None in keys:
            raise Unreadable
        wanted = self.value(index, function, tuple(key for key in keys if isinstance(key, str)))
        for key, value in zip(keys, table.values, strict=True):
            if key == wanted:
                return self.value(value, function)
        if default is not None:
            return self.value(default, function)
        raise Rejected if wanted is OTHER else Unreadable

    def _variable(self, node: ast.expr, function: Function, wanted: tuple[str, ...]) -> object:
        key = key_of(node)
        if _DEVICES.search(key):
            return self.on_device()
        owner, name = key.rpartition(".")[0], setting_name(node)
        bindings, scope = self._bindings(key, function)
        if not owner and scope is not None and key in scope.params and not bindings:
            return self._parameter(key, scope, wanted)
        reached = self._last(bindings, node, function)
        if reached is not None:
            return self._bound(reached, wanted)
        is_part = isinstance(node, (ast.Attribute, ast.Subscript))
        if name and is_part and _OWNER.search(text_of(node.value)) and (not bindings or owner):  # type: ignore[attr-defined]
            return self.leaf("setting", name, wanted)
        if owner == "self" and not bindings and isinstance(node, ast.Attribute):
            return self.leaf("parameter", name, wanted)
        raise Unreadable

    def _bindings(self, key: str, function: Function) -> tuple[list[Binding], Function | None]:
        """The assignments of a variable in the nearest scope, and that scope."""
        if not key.isidentifier():
            every = self.outline.bindings.get(key, [])
            owners = self._classes(function.cls)
            return [b for b in every if not key.startswith("self.") or b.function.cls in owners], None
        scope: Function | None = function
        while scope is not None:
            own = self.outline.by_function(key).get(scope.node, [])
            if own or key in scope.params:
                return own, scope
            scope = scope.parent
        return [], None

    def _classes(self, cls: str, depth: int = 4) -> set[str]:
        """A class and its bases."""
        bases = self.outline.bases.get(cls, ()) if depth else ()
        return {cls}.union(*(self._classes(base.id, depth - 1) for base in bases if isinstance(base, ast.Name)))

    def _last(self, bindings: list[Binding], node: ast.expr, function: Function) -> Binding | None:
        """The assignment that a variable has in this run where an expression reads it."""
        reached = None
        if len(makers := {b.function for b in bindings}) > 1 and any(f.name != "__init__" for f in makers - {function}):
            raise Unreadable
        for binding in sorted(bindings, key=lambda b: getattr(b.node, "lineno", 0)):
            is_above = binding.function is not function or getattr(binding.node, "lineno", 0) < node.lineno
            if is_above and self.is_reached(binding.node, binding.function):
                reached = binding
        return reached

    def _bound(self, binding: Binding, wanted: tuple[str, ...]) -> object:
        statement = next(s for s in (binding.node, *self.outline.above(binding.node)) if isinstance(s, ast.stmt))
        if binding.value is None or not isinstance(statement, (ast.Assign, ast.AnnAssign)):
            raise Unreadable
        value, function = binding.value, binding.function
        if binding.index is not None:
            if isinstance(value, ast.Call) and (result := self._returned(value, function)) is not None:
                value, function = result
            if not isinstance(value, ast.Tuple) or binding.index >= len(value.elts):
                raise Unreadable
            value = value.elts[binding.index]
        return self.value(value, function, wanted)

    def _parameter(self, name: str, function: Function, wanted: tuple[str, ...]) -> object:
        """What is passed for a parameter: by the call that led here, or by every call in the file."""
        default = default_of(function, name)
        if function in self.calls:
            call, caller = self.calls[function]
            position = function.params.index(name) - (function.method and function.params[0] in {"self", "cls"})
            passed = [k.value for k in call.keywords if k.arg == name] or call.args[position : position + 1]
            if passed:
                return self._passed(passed[0], caller, name, wanted)
            if default is None:
                raise Unreadable
            return self.value(default, function.parent or function, wanted)
        values = [self._passed(value, caller, name, wanted) for value, caller in self.outline.passed(name, function)]
        if not values:
            return self.leaf("parameter", name, wanted)
        if any(value != values[0] for value in values):
            raise Unreadable
        return values[0]

    def _passed(self, value: ast.expr, caller: Function, name: str, wanted: tuple[str, ...]) -> object:
        """What is passed for a parameter; a setting with a default in this file, which is written in its place, is open."""
        is_flag = isinstance(value, ast.Constant) and isinstance(value.value, bool)
        length = (value.end_col_offset or 0) - value.col_offset if value.end_lineno == value.lineno else 0
        if is_flag and length != len(text_of(value)):
            return self.leaf("setting", name, wanted)
        return self.value(value, caller, wanted)

    def is_reached(self, node: ast.AST, function: Function, *, assuming: bool = False) -> bool:
        """Whether a run reaches a node of a function that it calls; `assuming` that what is not about precision lets it."""
        for child, parent in self._above(node, function):
            if isinstance(parent, (ast.If, ast.IfExp)) and child is not parent.test:
                body = parent.body if isinstance(parent.body, list) else [parent.body]
                is_true, decide = any(child is part for part in body), self._may_be if assuming else self._is
                if not decide(parent.test, function, is_true=is_true):
                    return False
            elif isinstance(parent, ast.match_case):
                raise Unreadable
            elif isinstance(parent, ast.ExceptHandler):
                return False
            for block in blocks_of(parent):
                index = next((i for i, statement in enumerate(block) if statement is child), 0)
                if any(self._leaves(statement, function) for statement in block[:index]):
                    return False
        return True

    def _is(self, test: ast.expr, function: Function, *, is_true: bool) -> bool:
        return bool(self.value(test, function)) is is_true

    def _may_be(self, test: ast.expr, function: Function, *, is_true: bool) -> bool:
        """Whether a condition has a value; a part that is not about precision is assumed to."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._may_be(test.operand, function, is_true=not is_true)
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is is_true:
            return all(self._may_be(part, function, is_true=is_true) for part in test.values)
        try:
            return self._is(test, function, is_true=is_true)
        except Undecided as undecided:
            text = text_of(test)
            if _PRECISION.search(f"{text} {undecided.leaf.name}"):
                raise
            self.read.discard(undecided.leaf)
            self.assumed.add((text, is_true))
            return True

    def _above(self, node: ast.AST, function: Function) -> Iterator[tuple[ast.AST, ast.AST]]:
        while node is not function.node and (parent := self.outline.parents.get(node)) is not None:
            yield node, parent
            node = parent

    def _leaves(self, statement: ast.stmt, function: Function) -> bool:
        """Whether a function returns or raises at an `if`, for a reason that settings decide."""
        if not isinstance(statement, ast.If) or not statement.body:
            return False
        last = statement.body[-1]
        if not isinstance(last, ast.Return) and not is_rejection(last):
            return False
        try:
            return bool(self.value(statement.test, function))
        except Unreadable:
            return False
        except Undecided as undecided:
            if undecided.leaf.kind == "test":
                self.read.discard(undecided.leaf)
                return False
            raise
