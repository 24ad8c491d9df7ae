"""Every variable of a script that is an engine of DeepSpeed: created here, returned by a helper, or passed to a function.

`read_engines` follows `deepspeed.initialize` through assignments, `return` and arguments of the script's own functions, and
`Engines.bare_backwards` finds the calls of `loss.backward()` that run where an engine's `backward` should.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from halfstep.check.regex import regex
from halfstep.check.script.syntax.names import Names, key_of

__all__ = ["Engines", "read_engines"]

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef
_ROUNDS = 4  # helpers of helpers
_OPTIMIZER = regex(r"opt(?:im|imizer)?s?(?:$|[\[_])", re.IGNORECASE)
_ABOUT_ENGINE = regex(r"deepspeed|engine|zero|\bds\b|hasattr", re.IGNORECASE)


@dataclass(eq=False)
class Engines:
    """The engines of one script, by the function or class in which their variable is visible."""

    nodes: tuple[ast.AST, ...]
    names: Names
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    keys: dict[ast.AST | None, set[str]] = field(default_factory=dict)  # None: the module
    optimizers: set[str] = field(default_factory=set)
    made: list[ast.Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(self.keys.values())

    def scope(self, node: ast.AST, *kinds: type[ast.AST]) -> ast.AST | None:
        """The innermost function (or node of these kinds) around a node; None for the module."""
        parent = self.parents.get(node)
        while parent is not None and not isinstance(parent, kinds or (ast.FunctionDef, ast.AsyncFunctionDef)):
            parent = self.parents.get(parent)
        return parent

    def add(self, target: ast.AST, at: ast.AST) -> None:
        """Record that a variable is an engine where `at` stands."""
        key = key_of(target)
        if key and key != "_":
            scope = self.scope(at, ast.ClassDef) if key.startswith("self.") else self.scope(at)
            self.keys.setdefault(scope, set()).add(key)

    def visible(self, node: ast.AST) -> set[str]:
        """The engines that a statement can name."""
        keys: set[str] = set()
        scope = self.parents.get(node)
        hidden: set[str] = set()
        while scope is not None:
            if isinstance(scope, AnyFunction | ast.ClassDef):
                keys |= self.keys.get(scope, set()) - hidden
            if isinstance(scope, AnyFunction):
                hidden |= set(_parameters(scope))
            scope = self.parents.get(scope)
        return keys | (self.keys.get(None, set()) - hidden)

    def is_made(self, node: ast.expr) -> bool:
        """Whether a variable is an engine that its function makes of it in every run: `model = wrap(model)`."""
        key, scope = key_of(node), self.scope(node)
        if key not in self.visible(node):
            return False
        assigned = [n for n in self.nodes if isinstance(n, ast.Assign) and self.scope(n) is scope]
        bound = [n for n in assigned if key in {key_of(t) for t in n.targets} and n.lineno < node.lineno]
        return len(bound) == 1 and isinstance(self.parents.get(bound[0]), ast.FunctionDef | ast.Module)

    def bare_backwards(self) -> Iterator[tuple[ast.Call, str]]:
        """The calls of `loss.backward()` in functions that run an engine and step, each with that engine.

        None where any call such as `engine.backward(loss)` exists: the script then chooses between the two.
        """
        calls = [n for n in self.nodes if isinstance(n, ast.Call)]
        methods = [(c, c.func) for c in calls if isinstance(c.func, ast.Attribute)]
        if any(f.attr == "backward" and c.args and self.names.full(f) != "torch.autograd.backward" for c, f in methods):
            return
        if any(self.names.full(c.func).endswith("Accelerator") for c in calls):
            return  # another rule's
        for call, func in methods:
            is_function = self.names.full(func) == "torch.autograd.backward"
            if self._scales(func.value):
                continue
            if func.attr != "backward" or (call.args and not is_function) or self._excluded(call):
                continue
            around = self.scope(call)
            inside = [(c, f) for c, f in methods if self.scope(c) is around]
            run = {key_of(c.func) for c in calls if self.scope(c) is around}
            stepped = {key_of(f.value) for _, f in inside if f.attr == "step"}
            for key in sorted(self.visible(call)):
                forward = {key, f"{key}.module", f"{key}.forward"} & run
                if key in stepped or (forward and any(_OPTIMIZER.search(s.rpartition(".")[2]) for s in stepped)):
                    yield call, key
                    break

    def handled_backwards(self) -> Iterator[tuple[ast.Call, str]]:
        """The calls of `loss.backward()` in a handler of what an engine's `backward` of the same loss raises, each with that engine."""
        for node in (n for n in self.nodes if isinstance(n, ast.Try)):
            tried = {
                ast.unparse(c.args[0]): key for c, key in _backwards(node.body) if c.args and key in self.visible(c)
            }
            for call, loss in (pair for handler in node.handlers for pair in _backwards(handler.body)):
                if not call.args and loss in tried:
                    yield call, tried[loss]

    def scaler_calls(self, method: str, key: str) -> list[ast.Call]:
        """The backwards or steps of a GradScaler that run instead of an engine's, after its forward: in the other branch, or without any.

        `if use_amp: scaler.scale(loss).backward()` next to `else: engine.backward(loss)`, of an engine that always exists.
        """
        calls = [n for n in self.nodes if isinstance(n, ast.Call)]
        result: list[ast.Call] = []
        for call in calls:
            if not self._is_of_scaler(call, method, key) or key not in self.visible(call) or self._excluded(call):
                continue
            inside = [c for c in calls if self.scope(c) is self.scope(call)]
            own = [c for c in inside if key_of(c.func) == f"{key}.{method}"]
            forwards = [c for c in inside if key_of(c.func) in {key, f"{key}.forward"} and not self.are_apart(c, call)]
            if forwards and all(self.are_apart(c, call) for c in own):
                result.append(call)
        return result

    def optimizer_steps(self) -> Iterator[tuple[ast.Call, str]]:
        """The steps of an engine's optimizer after `engine.backward(loss)`, each with that engine, in a script where no engine steps.

        Also of an engine that only some runs create: `optimizer.step()` is then common to the runs with and without it.
        """
        calls = [n for n in self.nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        methods = [(c, key_of(c.func.value), c.func.attr) for c in calls if isinstance(c.func, ast.Attribute)]
        if any(name == "step" and key in self.visible(c) for c, key, name in methods):
            return
        backwards = [(c, key) for c, key, name in methods if name == "backward" and c.args and key in self.visible(c)]
        for call, optimizer, name in methods:
            if name != "step" or call.args or optimizer not in self.optimizers or self._excluded(call):
                continue
            own = [(c, key) for c, key in backwards if self.scope(c) is self.scope(call)]
            own = [(c, key) for c, key in own if c.lineno < call.lineno and not self.are_apart(c, call)]
            made = {self.scope(m) for m in self.made}
            if own and (optimizer.startswith("self.") or made & {self.scope(call), None}):
                yield call, own[0][1]

    def _is_of_scaler(self, call: ast.Call, method: str, key: str) -> bool:
        """Whether a call is `scaler.scale(loss).backward()`, or `scaler.step(optimizer)` with the optimizer of an engine."""
        func = call.func if isinstance(call.func, ast.Attribute) else None
        if func is None or func.attr != method:
            return False
        if method == "step":
            return len(call.args) == 1 and key_of(call.args[0]) in self.optimizers and key_of(func.value) != key
        scale = func.value.func if isinstance(func.value, ast.Call) else None
        is_scaled = isinstance(scale, ast.Attribute) and scale.attr == "scale" and bool(key_of(scale.value))
        return is_scaled and not self._scales(func.value)

    def _scales(self, loss: ast.expr) -> bool:
        """Whether a loss is `engine.scale(loss)`, DeepSpeed's API for a separate backward pass."""
        func = loss.func if isinstance(loss, ast.Call) else None
        return isinstance(func, ast.Attribute) and func.attr == "scale" and key_of(func.value) in self.visible(loss)

    def is_without(self, node: ast.AST) -> bool:
        """Whether a node is in the branch of a script that runs without DeepSpeed: `else` of `if use_deepspeed:`."""
        return any("deepspeed" in test.lower() and not is_true for test, is_true in self._guards(node))

    def are_apart(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether two nodes are in the two branches of one condition."""
        opposite = {(test, not is_true) for test, is_true in self._guards(one)}
        return bool(opposite & set(self._guards(other)))

    def _excluded(self, call: ast.Call) -> bool:
        """Whether a call cannot run, or may not run, where the engine exists."""
        created = {g for made in self.made for g in self._guards(made)}
        for test, is_true in self._guards(call):
            if (test, not is_true) in created:
                return True
            if _ABOUT_ENGINE.search(test) and (test, is_true) not in created:
                return True
        tests = {test for test, _ in created}
        # `if args.deepspeed: ...; return` further up
        leaves = [n for n in self.nodes if isinstance(n, ast.If) and isinstance(n.body[-1], ast.Return | ast.Continue)]
        return any(_guard(n.test, is_true=True)[0] in tests for n in leaves)

    def _guards(self, node: ast.AST) -> Iterator[tuple[str, bool]]:
        """The conditions around a node, as text and truth value."""
        parent = self.parents.get(node)
        while parent is not None:
            if isinstance(parent, ast.If):
                is_main = "__main__" in ast.dump(parent.test)
                if not is_main:
                    yield _guard(parent.test, is_true=node in parent.body)
            node, parent = parent, self.parents.get(parent)


def _backwards(body: list[ast.stmt]) -> Iterator[tuple[ast.Call, str]]:
    """The calls of a method `backward` in some statements, each with its object as text."""
    for call in (n for statement in body for n in ast.walk(statement) if isinstance(n, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            yield call, ast.unparse(call.func.value)


def _guard(test: ast.expr, *, is_true: bool) -> tuple[str, bool]:
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, is_true = test.operand, not is_true
    return ast.unparse(test), is_true


def _parameters(function: AnyFunction) -> list[str]:
    args = function.args
    return [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]


def read_engines(nodes: tuple[ast.AST, ...], names: Names) -> Engines:
    """The engines of a script; empty if it does not call deepspeed.initialize."""
    engines = Engines(nodes, names)
    engines.made = [n for n in nodes if isinstance(n, ast.Call) and names.full(n.func) == "deepspeed.initialize"]
    if not engines.made:
        return engines
    engines.parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    functions = {n.name: n for n in nodes if isinstance(n, AnyFunction)}
    tuples: dict[str, int] = {}  # function -> position of the engine in the tuple that it returns, or -1
    for _ in range(_ROUNDS):
        for node in nodes:
            if isinstance(node, ast.Assign):
                _assign(engines, node, tuples)
            elif isinstance(node, ast.Return) and node.value is not None:
                position = _position(engines, node.value, tuples)
                scope = engines.scope(node)
                if position is not None and isinstance(scope, AnyFunction):
                    tuples[scope.name] = position
            elif isinstance(node, ast.Call):
                _pass(engines, node, functions)
    return engines


def _position(engines: Engines, value: ast.expr, tuples: dict[str, int]) -> int | None:
    """Where an expression has the engine: -1 if it is one, i if it is a tuple with the engine at i, None if neither."""
    if isinstance(value, ast.Call):
        if value in engines.made:
            return 0
        name = key_of(value.func).rpartition(".")[2]
        return tuples.get(name) if key_of(value.func) in {name, f"self.{name}"} else None
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
        return -1 if _position(engines, value.value, tuples) == value.slice.value else None
    visible = engines.visible(value)
    if isinstance(value, ast.Tuple):
        return next((i for i, item in enumerate(value.elts) if key_of(item) in visible), None)
    return -1 if key_of(value) in visible else None


def _assign(engines: Engines, node: ast.Assign, tuples: dict[str, int]) -> None:
    position = _position(engines, node.value, tuples)
    target = node.targets[0]
    if position is None:
        return
    if isinstance(target, ast.Tuple | ast.List):
        if 0 <= position < len(target.elts):
            engines.add(target.elts[position], node)
        if node.value in engines.made and len(target.elts) > 1:
            engines.optimizers |= {key_of(target.elts[1])} - {"", "_"}
    elif position == -1:
        engines.add(target, node)
    elif isinstance(target, ast.Name):  # `parts = deepspeed.initialize(...)`, then `parts[0]`
        for other in engines.nodes:
            if not isinstance(other, ast.Assign) or engines.scope(other) is not engines.scope(node):
                continue
            value = other.value
            index = (
                value.slice.value
                if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant)
                else None
            )
            if isinstance(value, ast.Subscript) and key_of(value.value) == target.id and index == position:
                engines.add(other.targets[0], other)
            first = other.targets[0]
            if key_of(value) == target.id and isinstance(first, ast.Tuple) and len(first.elts) > position:
                engines.add(first.elts[position], other)


def _pass(engines: Engines, call: ast.Call, functions: dict[str, AnyFunction]) -> None:
    """Record the parameters of the script's functions that are engines."""
    name = key_of(call.func).rpartition(".")[2]
    function = functions.get(name) if key_of(call.func) in {name, f"self.{name}"} else None
    if function is None:
        return
    visible = engines.visible(call)
    parameters = _parameters(function)
    parameters = parameters[1:] if parameters[:1] == ["self"] else parameters
    passed = [*zip(parameters, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
    for parameter, value in passed:
        if parameter in parameters and key_of(value) in visible:
            engines.keys.setdefault(function, set()).add(str(parameter))
