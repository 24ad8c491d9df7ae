"""The precision settings that a file reads, and the values to check it with.

    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"])       mixed_precision: "fp16", "bf16", "no"
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[cfg["dtype"]]          dtype: "fp16", "bf16"
    if args.fp16:                                                                  fp16: True, False

A setting comes from outside: an option of the command line, an entry of a configuration, or a parameter that no call of the
file decides. One that the file assigns itself has the value that is assigned, also in a class without fields to fill. Settings
are told apart by their last names, because `args.dtype` is `dtype` in the functions that receive it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from halfstep.check.regex import regex
from halfstep.check.script.assumed.configurator import parsed, replaceable
from halfstep.check.script.assumed.gpu import HAS_BF16, is_asked
from halfstep.check.script.assumed.reads import Place, is_read, read_name, without_case
from halfstep.check.script.syntax.children import all_children_of
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["OF_ENGINE", "Assumption", "assumptions"]

OF_ENGINE = ".mixed_precision"  # of an Accelerator that is created without one, and reads its own configuration
MAX_ASSUMPTIONS = 8  # of one file: each is checked as a script of its own
_HALF = ("fp16", "float16", "half", "16-mixed", "16", "f16")
_BFLOAT = ("bf16", "bfloat16", "bf16-mixed")
_FULL = ("no", "fp32", "float32", "none", "32", "32-true", "full", "off")
_SIXTEEN_BIT = {*_HALF, *_BFLOAT}
_ENGINES = {"fp16", "bf16", "no"}  # what an Accelerator accepts, whatever the file compares its setting with
_FABRIC = {"16-mixed"}  # the one precision with which Fabric and Lightning's Trainer scale the loss
_FLAG = regex(
    r"^(use_|enable_|is_|with_|no_|disable_)?(torch_|native_|cuda_)?(fp16|bf16|half|float16|bfloat16|amp|mixed_precision|mixed|autocast|half_precision)"
    r"(_enabled|_training|_train)?$"
)
_FLOAT16, _BFLOAT16 = regex(r"(^|_)(fp16|float16|half)(_|$)"), regex(r"bf16|bfloat16")
_OFF = regex(r"^(no|disable)_")
_TRAINS = {"backward", "manual_backward"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Assumption:
    """The values of settings in one run, by last name; the first one is what the run is about."""

    values: tuple[tuple[str, str | bool], ...]
    params: frozenset[tuple[int, str]] = (
        frozenset()
    )  # parameters that have a setting: the line of the function, and the name; global variables of a configurator
    engines: frozenset[str] = frozenset()  # variables with an Accelerator that has the first one as its mixed_precision

    def __str__(self) -> str:
        name, value = self.values[0]
        return f"{name}={value!r}"


@dataclass
class _Shown:
    """What a file shows of a setting."""

    strings: set[str] = field(default_factory=set)  # those that it is compared with, or that a table has for it
    choices: set[str] | None = None  # those that the command line, or a type, accepts
    is_flag: bool = False

    def values(self) -> list[str | bool]:
        """One value of each kind."""
        strings = self.strings | self.choices if self.choices else self.strings
        strings = strings & self.choices if self.choices is not None else strings
        by_kind = [[value for value in words if value in strings] for words in (_HALF, _BFLOAT, _FULL)]
        if by_kind[0] or by_kind[1]:
            return [value for values in by_kind for value in values[:1]]
        return [True, False] if self.is_flag and not self.strings else []


def assumptions(outline: Outline, tree: ast.Module) -> list[Assumption]:
    """The values of settings to check a file with, one setting at a time."""
    steps = not _TRAINS.isdisjoint(outline.calls) and "step" in outline.calls
    trains = steps or any(name.endswith("Trainer") for name in outline.calls)
    names_format = not _SIXTEEN_BIT.isdisjoint(outline.strings) or any(map(_FLAG.search, outline.loads))
    of_gpu = [Assumption(((HAS_BF16, value),)) for value in (True, False)] if trains and is_asked(outline) else []
    if not trains or not (names_format or "Fabric" in outline.calls):
        return of_gpu
    params = _open_parameters(outline) | replaceable(outline) | parsed(outline)
    reader = _Reader(outline, params)
    for node, around in _nodes(tree):
        reader.read(node, around)
    engines = _engines(outline)
    for name in engines:
        if name.endswith(OF_ENGINE):
            reader.shown.setdefault(name, _Shown()).strings |= _ENGINES
    flags = [name for name, shown in reader.shown.items() if shown.values()[:1] == [True]]
    result: list[Assumption] = []
    for name, shown in reader.shown.items():
        if not reader.is_assigned(name):
            written = reader.written(name)
            for value in shown.values():
                if written and value not in written:
                    continue
                others = tuple((other, False) for other in flags if value is True and _excludes(name, other))
                result.append(Assumption(((name, value), *others), params, engines.get(name, frozenset())))
    return [*result[:MAX_ASSUMPTIONS], *of_gpu]


def _excludes(name: str, other: str) -> bool:
    """Whether nobody sets two flags together: one of each 16-bit format."""
    pair = (name, other)
    return not any(map(_OFF.search, pair)) and any(
        _FLOAT16.search(a) and _BFLOAT16.search(b) for a, b in (pair, pair[::-1])
    )


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, Place]]:
    """Every node except contexts and operators, with the lines of the functions around it, innermost first."""
    stack: list[tuple[ast.AST, Place]] = [(tree, ())]
    while stack:
        node, around = stack.pop()
        yield node, around
        inner = (node.lineno, *around) if isinstance(node, _FUNCTIONS) else around
        stack += [(child, inner) for child in reversed(all_children_of(node))]


def _open_parameters(outline: Outline) -> frozenset[tuple[int, str]]:
    """The parameters that no call of the file decides: nothing calls the function, or every call passes a setting of that name."""
    result: set[tuple[int, str]] = set()
    for function in outline.functions:
        if isinstance(function.node, ast.Module) or not function.params:
            continue
        sites = outline.calls.get(function.cls if function.name == "__init__" else function.name, ())
        calls = [s for s in sites if outline.call_target(s.call, s.function) is function]
        for param in function.params:
            passed = list(outline.passed(param, function)) if calls else []
            if len(passed) == len(calls) and all(read_name(value) == param for value, _ in passed):
                result.add((function.node.lineno, param))
    return frozenset(result)


def _engines(outline: Outline) -> dict[str, frozenset[str]]:
    """The variables that have an Accelerator, by the setting that it is created with: its own if it reads a configuration of its own."""
    engines: dict[str, frozenset[str]] = {}
    for key, bindings in outline.bindings.items():
        call = bindings[0].value if len(bindings) == 1 else None
        if isinstance(call, ast.Call) and last_name(key_of(call.func)) == "Accelerator":
            passed = [k.value for k in call.keywords if k.arg in {"mixed_precision", None}]
            name = read_name(without_case(passed[0])) if passed else key + OF_ENGINE
            if name:
                engines[name] = engines.get(name, frozenset()) | {key}
    return engines


class _Reader:
    """Collects what the nodes of a file show of its settings."""

    def __init__(self, outline: Outline, params: frozenset[tuple[int, str]]) -> None:
        self.outline = outline
        self.params = params
        self.functions = {f.node.lineno: f for f in outline.functions if not isinstance(f.node, ast.Module)}
        self.shown: dict[str, _Shown] = {}

    def is_assigned(self, name: str) -> bool:
        """Whether the file sets a setting itself: `args.dtype = "bf16"`, not a copy of it."""
        keys = [key for key in self.outline.bindings if last_name(key) == name and "." in key]
        owned = [key for key in keys if not key.startswith("self.") or key.count(".") > 1]
        return any(read_name(b.value) != name for key in owned for b in self.outline.bindings[key])

    def written(self, name: str) -> set[object]:
        """The constants of a setting in plain classes, `class Config: bf16 = True`, whose objects are created without arguments."""
        values: set[object] = set()
        for binding in self.outline.bindings.get(name, ()):
            cls = self.outline.parents.get(binding.node)
            is_plain = isinstance(cls, ast.ClassDef) and not (cls.bases or cls.keywords or cls.decorator_list)
            if not is_plain or not isinstance(cls, ast.ClassDef) or "__init__" in self.outline.classes[cls.name]:
                continue
            if isinstance(binding.node, ast.AnnAssign) and "Literal" in ast.unparse(binding.node.annotation):
                continue  # which names the other values
            values |= {binding.value.value} if isinstance(binding.value, ast.Constant) else set()
        return values

    def read(self, node: ast.AST, around: Place) -> None:
        """Add what one node shows."""
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            strings = {string for part in parts for string in _strings(part)}
            for part in parts if strings else ():
                self._add(part, around, strings)
        elif isinstance(node, ast.Subscript):
            self._add(node.slice, around, self._keys(node.value))
        elif isinstance(node, ast.Match):
            patterns = [p for case in node.cases for p in ast.walk(case.pattern)]
            self._add(node.subject, around, {s for p in patterns for s in _strings(getattr(p, "value", None))})
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self._declare(node.target.id, _literals(node.annotation))
        elif isinstance(node, ast.Call):
            self._read_call(node, around)
        for name in self._named(node, around) if isinstance(node, ast.expr) else ():
            if _FLAG.search(name):
                self.shown.setdefault(name, _Shown()).is_flag = True

    def _read_call(self, call: ast.Call, around: Place) -> None:
        name = last_name(key_of(call.func)) or getattr(call.func, "attr", "")
        if name == "get" and isinstance(call.func, ast.Attribute) and call.args:
            self._add(call.args[0], around, self._keys(call.func.value))
        elif name == "getattr" and len(call.args) > 1 and key_of(call.args[0]) == "torch":
            self._add(call.args[1], around, {"float16", "bfloat16", "float32"})
        elif name == "add_argument":
            flags = [string for value in call.args for string in _strings(value)]
            choices = next((k.value for k in call.keywords if k.arg == "choices"), None)
            self._declare(flags[-1].lstrip("-").replace("-", "_") if flags else "", set(_strings(choices)))
        elif name in {"Accelerator", "Fabric", "Trainer"}:
            option, values = ("mixed_precision", _ENGINES) if name == "Accelerator" else ("precision", _FABRIC)
            for keyword in call.keywords:
                if keyword.arg == option:
                    self._add(keyword.value, around, values)

    def _declare(self, name: str, choices: set[str]) -> None:
        if name and choices:
            self.shown.setdefault(name, _Shown()).choices = choices

    def _add(self, node: ast.expr, around: Place, strings: set[str]) -> None:
        for name in self._named(node, around) if strings else ():
            self.shown.setdefault(name, _Shown()).strings |= strings

    def _named(self, node: ast.expr | None, around: Place, depth: int = 3) -> tuple[str, ...]:
        """The setting that an expression reads, also through a variable that is assigned once; those that the calls of a function pass."""
        node = without_case(node)
        name = read_name(node)
        if not name or node is None:
            return ()
        if is_read(node, name, around, self.params):
            return (name,)
        key = key_of(node)
        functions = (self.functions.get(line) for line in around)
        receiver = next((f for f in functions if f is not None and key in f.params), None)
        if receiver is not None and depth:
            passed = [self._named(value, _place(f), depth - 1) for value, f in self.outline.passed(key, receiver)]
            return tuple(dict.fromkeys(name for names in passed for name in names))
        bound = self.outline.bindings.get(key, []) if key.isidentifier() or key.startswith("self.") else []
        if len(bound) != 1 or bound[0].index is not None or not depth:
            return ()
        return self._named(bound[0].value, _place(bound[0].function), depth - 1)

    def _keys(self, table: ast.expr) -> set[str]:
        """The keys of a dictionary that is written in place, or assigned once."""
        if not isinstance(table, ast.Dict):
            bound = self.outline.bindings.get(key_of(table), ())
            table = bound[0].value if len(bound) == 1 and bound[0].value is not None else table
        return {s for key in table.keys for s in _strings(key)} if isinstance(table, ast.Dict) else set()


def _place(function: Function) -> Place:
    """The lines of a function and those around it, innermost first."""
    lines: list[int] = []
    scope: Function | None = function
    while scope is not None and not isinstance(scope.node, ast.Module):
        lines.append(scope.node.lineno)
        scope = scope.parent
    return tuple(lines)


def _literals(annotation: ast.expr) -> set[str]:
    """The strings of `Literal["fp16", "bf16"]`, anywhere in a type."""
    types = [
        p for p in ast.walk(annotation) if isinstance(p, ast.Subscript) and last_name(key_of(p.value)) == "Literal"
    ]
    return {string for part in types for string in _strings(part.slice)}


def _strings(node: ast.AST | None) -> list[str]:
    """The string of a literal, or those of a literal list."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return [string for element in node.elts for string in _strings(element)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
