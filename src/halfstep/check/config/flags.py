"""Two flags of which at most one may be true: which a user can set, and which is true whatever the user sets.

`TrainingArguments(fp16=args.fp16, bf16=True)` raises for everyone who asks for `--fp16`. A flag is offered if it is an option,
a key of a configuration or a parameter. It is on by itself if it is True, the answer of the GPU, or a setting that falls back
to the answer of the GPU without a look at the other flag.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from halfstep.check.regex import regex
from halfstep.check.script.syntax.names import Names, chain, key_of

__all__ = ["PAIRS", "assigned_facts", "by_default", "flag_facts", "offered", "on_by_itself"]

PAIRS = (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval"))
_ASKS = frozenset({"is_bf16_supported", "is_bfloat16_supported", "is_torch_bf16_gpu_available"})
_FLAG = regex(r"(?i)fp16|bf16|float16|half|precision|dtype")
_STOPS = frozenset({"exit", "_exit", "error", "fail"})
_MAX_DEPTH = 4
AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


def offered(key: str) -> str:
    """The fact that a user can switch this flag on."""
    return f"{key} is offered"


def on_by_itself(key: str) -> str:
    """The fact that this flag is on, at least on a GPU with the format, whatever the user chooses for the other one."""
    return f"{key} is on by itself"


def by_default(key: str) -> str:
    """The fact that this flag is an option of the command line that is on unless the user switches it off."""
    return f"{key} is on by default"


def flag_facts(call: ast.Call, nodes: Sequence[ast.AST], names: Names) -> frozenset[str]:
    """The facts about the pairs of flags that a call gets: one is offered, and the other is on by itself."""
    passed = {k.arg: k.value for k in call.keywords if k.arg}
    facts: set[str] = set()
    for pair in PAIRS:
        if not all(key in passed for key in pair) or all(isinstance(passed[key], ast.Constant) for key in pair):
            continue
        flags = _Flags(call, nodes, names)
        # A literal is on where a branch has set it: `options["bf16"] = True`.
        is_set = any(isinstance(passed[key], ast.Constant) for key in pair)
        if all(flags.is_on(passed[key]) or (is_set and flags.is_default(passed[key])) for key in pair) and not any(
            flags.relates(passed[key], other) for key, other in (pair, pair[::-1])
        ):
            facts |= {on_by_itself(key) for key in pair}
        for first, second in (pair, pair[::-1]):
            if flags.is_offered(passed[first]) and flags.is_on(passed[second]):
                facts |= {offered(first), on_by_itself(second)} if not flags.relates(passed[first], second) else set()
            elif flags.is_offered(passed[first]) and flags.is_default(passed[second]):
                related = any(flags.relates(passed[key], other) for key, other in ((first, second), (second, first)))
                facts |= {offered(first), on_by_itself(second), by_default(second)} if not related else set()
    return frozenset(facts)


def assigned_facts(call: ast.Call, nodes: Sequence[ast.AST], names: Names) -> frozenset[str]:
    """The facts about flags that a branch assigns: `options["bf16"] = True` is on in that branch only, whatever else is offered."""
    offers = {offered(key) for pair in PAIRS for key in pair}
    return flag_facts(call, nodes, names) - offers


class _Flags:
    """What decides the flags of one call."""

    def __init__(self, call: ast.Call, nodes: Sequence[ast.AST], names: Names) -> None:
        self.call = call
        self.names = names
        self.ifs = [n for n in nodes if isinstance(n, ast.If)]
        self.functions = [n for n in nodes if isinstance(n, AnyFunction)]  # outer ones first
        self.classes = {n.name for n in nodes if isinstance(n, ast.ClassDef)}
        self.calls = [n for n in nodes if isinstance(n, ast.Call)]
        self.targets = [t for n in nodes if isinstance(n, ast.Assign) for t in n.targets if not isinstance(t, ast.Name)]
        self.bound: dict[str, list[tuple[ast.stmt, ast.expr | None]]] = {}
        for node in nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self.bound.setdefault(key_of(target), []).append((node, node.value))
            elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For)):
                value = node.value if isinstance(node, ast.AnnAssign) else None
                self.bound.setdefault(key_of(node.target), []).append((node, value))

    def is_offered(self, value: ast.expr) -> bool:
        """Whether a user can make an expression true: an option, a key of a configuration or a parameter, as it is."""
        value = _unwrapped(value)
        if isinstance(value, ast.Compare):
            chosen = value.comparators[0]
            is_choice = (
                isinstance(value.ops[0], ast.Eq) and isinstance(chosen, ast.Constant) and "16" in str(chosen.value)
            )
            return len(value.ops) == 1 and is_choice and self.is_offered(value.left)
        key, owner = _read(value)
        if not _FLAG.search(key):
            return False
        if owner is None:
            return self._is_parameter(value)
        return self._is_filled_elsewhere(owner) and all(
            self._is_fallback(node, key_of(value)) or (bound is not None and self._is_passed_on(bound))
            for node, bound in self.bound.get(key_of(value), ())
        )

    def _is_passed_on(self, value: ast.expr) -> bool:
        """Whether a value comes from the user: `self.fp16 = fp16` in the constructor, `self.fp16 = options.get("fp16")`."""
        value = _unwrapped(value)
        key, owner = _read(value)
        return bool(_FLAG.search(key)) and (
            self._is_parameter(value) if owner is None else not isinstance(value, ast.Attribute)
        )

    def _is_parameter(self, value: ast.expr) -> bool:
        """Whether a name is a parameter of the function around it, which does not assign to it."""
        function = self._around(value)
        if not isinstance(value, ast.Name) or function is None:
            return False
        args = function.args
        names = {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
        return value.id in names and not any(self._around(node) is function for node, _ in self.bound.get(value.id, ()))

    def _is_filled_elsewhere(self, owner: ast.expr) -> bool:
        """Whether an object has values of the user: it is no class, module or dictionary that the script writes out."""
        key = key_of(owner)
        values = [value for _, value in self.bound.get(key, ())]
        written = any(isinstance(v, ast.Dict) or (isinstance(v, ast.Call) and key_of(v.func) == "dict") for v in values)
        return bool(key) and key not in self.classes and not written and not self.names.full(owner)

    def is_on(self, value: ast.expr, depth: int = 0) -> bool:
        """Whether an expression is true on a GPU with the format, unless the user switches it off."""
        value = _unwrapped(value)
        if depth > _MAX_DEPTH:
            return False
        if isinstance(value, ast.Constant):
            return value.value is True
        if isinstance(value, ast.BoolOp):
            answers = [self.is_on(part, depth + 1) for part in value.values]
            return any(answers) if isinstance(value.op, ast.Or) else all(answers)
        if isinstance(value, ast.Call):
            last = value.func.attr if isinstance(value.func, ast.Attribute) else key_of(value.func)
            return last in _ASKS or self.names.full(value.func) == "torch.cuda.is_available"
        if isinstance(value, ast.IfExp):  # `args.bf16 if args.bf16 is not None else torch.cuda.is_bf16_supported()`
            asked = {f"{ast.unparse(value.body)} is not None", ast.unparse(value.body)}
            return ast.unparse(value.test) in asked and self.is_on(value.orelse, depth + 1)
        bound = self.bound.get(key_of(value), [])
        if isinstance(value, ast.Name):
            here = [v for node, v in bound if self._around(node) is self._around(value)]
            return len(here) == 1 and here[0] is not None and self.is_on(here[0], depth + 1)
        fallbacks = [v for node, v in bound if self._is_fallback(node, key_of(value), alone=True)]
        return bool(fallbacks) and all(v is not None and self.is_on(v, depth + 1) for v in fallbacks)

    def is_default(self, value: ast.expr) -> bool:
        """Whether an expression is an option of the command line that is true unless the user switches it off, and nothing changes it."""
        value = _unwrapped(value)
        is_inverted = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)  # `fp16=not args.cpu`
        value = value.operand if isinstance(value, ast.UnaryOp) and is_inverted else value
        name, owner = _read(value)
        if not isinstance(value, ast.Attribute) or owner is None or not self._is_filled_elsewhere(owner):
            return False
        parsed = [v for _, v in self.bound.get(key_of(owner), ()) if isinstance(v, ast.Call)]
        is_changed = any(_read(target)[0] == name for target in self.targets)
        return (
            bool(parsed or self._is_parameter(owner))
            and not is_changed
            and defaults_of(self.calls, name) == {not is_inverted}
        )

    def _is_fallback(self, node: ast.stmt, key: str, *, alone: bool = False) -> bool:
        """Whether a setting is assigned where the user did not set it: below `if config.bf16 is None`, and nothing else if `alone`."""
        tests = [ast.unparse(test.test) for test in self.ifs if _contains(test, node)]
        return any(f"{key} is None" == test or (not alone and f"{key} is None" in test) for test in tests)

    def relates(self, value: ast.expr, second: str) -> bool:
        """Whether a test of a setting decides about the call, the other flag, or whether the run starts at all."""
        text = ast.unparse(_unwrapped(value))
        for test in self.ifs:
            if text not in ast.unparse(test.test):
                continue
            inside = [n for statement in (*test.body, *test.orelse) for n in ast.walk(statement)]
            calls = [n.func for n in inside if isinstance(n, ast.Call)]
            stops = any((*chain(f), getattr(f, "attr", ""))[-1] in _STOPS for f in calls)
            assigned = [t for n in inside if isinstance(n, ast.Assign) for t in n.targets]
            if stops or any(n is self.call or isinstance(n, (ast.Raise, ast.Return)) for n in inside):
                return True
            if any(_read(target)[0] == second for target in assigned):
                return True
        return False

    def _around(self, node: ast.AST) -> AnyFunction | None:
        return next((f for f in reversed(self.functions) if _contains(f, node)), None)


def defaults_of(calls: Sequence[ast.Call], name: str) -> set[bool]:
    """The defaults that options of the command line have which are switches of this name; empty if none is one."""
    defaults = set()
    for call in calls:
        last = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        passed = {k.arg: k.value for k in call.keywords if k.arg}
        if last == "set_defaults" and name in passed:
            defaults = {_is_true(passed[name])}
            break
        if last != "add_argument" or name not in _destinations(call, passed):
            continue
        action = getattr(passed.get("action"), "value", "")
        value = passed.get("default")
        defaults.add(_is_true(value) if value is not None else action == "store_false")
    return defaults


def _destinations(call: ast.Call, passed: dict[str, ast.expr]) -> set[str]:
    """The names that an option of the command line sets."""
    if "dest" in passed:
        return {str(getattr(passed["dest"], "value", ""))}
    return {str(getattr(flag, "value", "")).lstrip("-").replace("-", "_") for flag in call.args}


def _is_true(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def _contains(outer: ast.stmt, inner: ast.AST) -> bool:
    return outer.lineno <= getattr(inner, "lineno", 0) <= (outer.end_lineno or 0)


def _unwrapped(value: ast.expr) -> ast.expr:
    """The setting in `bool(args.fp16)` and `args.fp16 or False`."""
    if isinstance(value, ast.Call) and key_of(value.func) == "bool" and len(value.args) == 1:
        return _unwrapped(value.args[0])
    if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.Or) and isinstance(value.values[-1], ast.Constant):
        return _unwrapped(value.values[0]) if len(value.values) == 2 and not value.values[-1].value else value
    return value


def _read(value: ast.expr) -> tuple[str, ast.expr | None]:
    """The name of a setting and the object it is read from: of `args.fp16`, `options["fp16"]`, `getattr(args, "fp16", False)`."""
    if isinstance(value, ast.Name):
        return value.id, None
    if isinstance(value, ast.Attribute):
        return value.attr, value.value
    if isinstance(value, ast.Subscript):
        return str(getattr(value.slice, "value", "")), value.value
    if (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr == "get"
        and value.args
    ):
        return str(getattr(value.args[0], "value", "")), value.func.value
    if isinstance(value, ast.Call) and key_of(value.func) == "getattr" and len(value.args) > 1:
        return str(getattr(value.args[1], "value", "")), value.args[0]
    return "", None
