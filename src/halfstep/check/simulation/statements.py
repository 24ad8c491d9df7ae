"""Statements of a simulated run.

A loop over something unknown runs a few times: enough for two windows of two micro-batches. A branch that nothing in the training
depends on is not decided: what it assigns is unknown afterwards.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from halfstep.check.simulation.aliases import called_name
from halfstep.check.simulation.assignments import Assignments
from halfstep.check.simulation.contexts import Closed, Contexts, Left
from halfstep.check.simulation.gradients import Raised
from halfstep.check.simulation.paths import PRECISION
from halfstep.check.simulation.relevance import leaves, rejects
from halfstep.check.simulation.values import (
    Class,
    Env,
    Func,
    Instance,
    Library,
    Partial,
    Suspended,
    Test,
    Unknown,
    is_plain,
)

__all__ = ["Statements"]

NUM_ITERATIONS = 4  # of a loop that trains: two windows of two micro-batches
NUM_EPOCHS = 2


_HANDLERS: dict[type, Any] = {}  # methods, by the type of the statement


class Statements(Assignments, Contexts):
    """Runs statements."""

    def run(self, body: Iterable[ast.stmt], env: Env) -> None:
        """Run a block."""
        for statement in body:
            self.path.step()
            kind = type(statement)
            if kind not in _HANDLERS:
                _HANDLERS[kind] = getattr(type(self), f"_run_{kind.__name__}", None)
            handler = _HANDLERS[kind]
            if handler is not None:
                handler(self, statement, env)

    def _run_Import(self, node: ast.Import, env: Env) -> None:
        for alias in node.names:
            top = alias.name.split(".")[0]
            self.assign_name(env, alias.asname or top, Library(alias.name if alias.asname else top))

    def _run_ImportFrom(self, node: ast.ImportFrom, env: Env) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            if alias.name != "*":
                self.assign_name(env, alias.asname or alias.name, Library(f"{module}.{alias.name}"))

    def _run_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, env: Env) -> None:
        function = Func(node, env)
        env.functions.append(function)
        self.assign_name(env, node.name, self._decorated(function, env))

    def _decorated(self, function: Func, env: Env) -> Any:
        """What decorators of the script make of a function."""
        made: Any = function
        for decorator in reversed(getattr(function.node, "decorator_list", [])):
            if self.relevance.defines(called_name(decorator.func if isinstance(decorator, ast.Call) else decorator)):
                result = self.call(self.value(decorator, env), [made], {}, decorator)
                made = result if isinstance(result, Func | Partial | Instance) else made
        return made

    _run_AsyncFunctionDef = _run_FunctionDef

    def _run_ClassDef(self, node: ast.ClassDef, env: Env) -> None:
        inner = Env(env)
        self.run(node.body, inner)
        cls = Class(node, tuple(self.value(base, env) for base in node.bases), inner.variables)
        for method in inner.functions:
            method.cls, method.env = cls, env  # a method does not see the names of its class
        for value in inner.variables.values():
            if isinstance(value, Func):
                value.cls = cls
        self.assign_name(env, node.name, cls)

    def _run_Global(self, node: ast.Global | ast.Nonlocal, env: Env) -> None:
        env.of_parent.update(node.names)

    _run_Nonlocal = _run_Global

    def _run_Delete(self, node: ast.Delete, env: Env) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                env.variables.pop(target.id, None)

    def _run_Expr(self, node: ast.Expr, env: Env) -> None:
        self.value(node.value, env)

    def _run_Assign(self, node: ast.Assign, env: Env) -> None:
        value = self.value(node.value, env)
        for target in node.targets:
            self.assign_result(target, value, node.value, env)

    def _run_AnnAssign(self, node: ast.AnnAssign, env: Env) -> None:
        if node.value is not None:
            self.assign(node.target, self.value(node.value, env), env)
        elif isinstance(node.target, ast.Name) and env.parent is not None and not env.local:
            env.variables[node.target.id] = Unknown(node.target.id)  # a field of a dataclass

    def _run_AugAssign(self, node: ast.AugAssign, env: Env) -> None:
        if isinstance(node.op, ast.Add) and isinstance(node.value, ast.Constant) and node.value.value == 1:
            self.assign(node.target, self.counter(self.value(_loaded(node.target), env)), env)
        binary = ast.copy_location(ast.BinOp(_loaded(node.target), node.op, node.value), node)
        self.assign(node.target, self.value(binary, env), env)

    def _run_If(self, node: ast.If, env: Env) -> None:
        if not self.relevance.matters(node) and not self.knows(
            node.test, env
        ):  # both branches: each may fill a list of parameters
            self.run([*node.body, *node.orelse], env)
            for name in self.relevance.assigned(node):
                self.assign_key(env, name, Unknown(self.path.fresh(name)))
            return
        is_rejecting = rejects(node.body)
        is_left = is_rejecting or (not node.orelse and leaves(node.body[-1]) and not self.relevance.is_accepting(node))
        if (
            is_left
            and not rejects(node.orelse)
            and isinstance(node.test, ast.BoolOp)
            and isinstance(node.test.op, ast.Or)
        ):
            parts = [part for part in node.test.values if not (is_rejecting and _counts(part))]
            is_true = any(self.truth(self.value(part, env), 1, is_firm=is_rejecting) for part in parts)
            self.run(node.body if is_true else node.orelse, env)
            return
        test = self._tested(node, is_rejecting, env)
        is_special = isinstance(test, Test) and isinstance(test.other, str) and not PRECISION.search(test.question)
        is_passed = (is_left or (is_special and not node.orelse)) and not rejects(node.orelse)
        self.run(
            node.body
            if self.truth(test, int(is_passed), is_firm=is_rejecting or rejects(node.orelse))
            else node.orelse,
            env,
        )

    def knows(self, test: ast.expr, env: Env) -> bool:
        """Whether a test that nothing in the training depends on has a value in this run."""
        return False

    def _tested(self, node: ast.If, is_rejecting: bool, env: Env) -> Any:
        """The value of a test; one that would reject what a run has counted or collected is false, as its loops are short."""
        parts = node.test.values if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And) else []
        if is_rejecting and parts:
            for part in parts[:-1]:
                if not self.truth(self.value(part, env), int(not PRECISION.search(ast.unparse(part).lower()))):
                    return False
        value = self.value(parts[-1] if is_rejecting and parts else node.test, env)
        is_counted = is_plain(value) and value is True and (_tests_emptiness(node.test) or _counts(node.test))
        return False if is_rejecting and (isinstance(value, list) or is_counted) else value

    def _run_Assert(self, node: ast.Assert, env: Env) -> None:
        test = self.value(node.test, env)
        if is_plain(test) and not isinstance(test, tuple | list) and not test and not _counts(node.test):
            raise Raised

    def _breaks(self, node: ast.For | ast.AsyncFor | ast.While, env: Env) -> bool:
        """Run an iteration of a loop; whether it ends the loop."""
        self.loops.append(self.relevance.trains(node))
        try:
            self.run(node.body, env)
        except Left as left:
            if left.kind == "return":
                raise
            return left.kind == "break"
        finally:
            self.loops.pop()
        return False

    def iterations(self, node: ast.AST) -> int:
        """How often a loop over something unknown is run."""
        if not self.relevance.trains(node):
            if self.consumers and self.relevance.yields_in(node):  # what trains is where its values are consumed
                return NUM_ITERATIONS
            return 1 if isinstance(node, ast.While) else 2
        return NUM_EPOCHS if self.relevance.has_training_loop(node) else NUM_ITERATIONS

    def _run_For(self, node: ast.For | ast.AsyncFor, env: Env) -> None:
        source = self.value(node.iter, env)
        generator, numbers = _generator_in(source)
        if generator is not None:
            self._run_for_generator(node, generator, numbers, env)
            return
        for element in self.elements(source, self.iterations(node)):
            self.assign(node.target, element, env)
            if self._breaks(node, env):
                return
        self.run(node.orelse, env)

    def _run_for_generator(
        self, node: ast.For | ast.AsyncFor, generator: Suspended, numbers: Iterator[int] | None, env: Env
    ) -> None:
        """The body of a loop runs where the generator yields."""

        def run_body(value: Any) -> None:
            self.assign(node.target, value if numbers is None else (next(numbers), value), env)
            if self._breaks(node, env):
                raise Closed

        self.resume(generator, run_body)
        self.run(node.orelse, env)

    _run_AsyncFor = _run_For

    def _run_While(self, node: ast.While, env: Env) -> None:
        for _ in range(self.iterations(node)):
            test = self.value(node.test, env)
            if is_plain(test) and not test:
                break
            if self._breaks(node, env):
                return

    def _run_Break(self, node: ast.Break, env: Env) -> None:
        raise Left("break")

    def _run_Continue(self, node: ast.Continue, env: Env) -> None:
        self.gradients.skips += self.loops[-1:] != [False]
        raise Left("continue")

    def _run_Return(self, node: ast.Return, env: Env) -> None:
        value = self.value(node.value, env) if node.value is not None else None
        if not self.relevance.is_last(node) and (not self.active or self.relevance.trains(self.active[-1])):
            self.gradients.skips += 1
        raise Left("return", value)

    def _run_Raise(self, node: ast.Raise, env: Env) -> None:
        if node.exc is not None:
            self.value(node.exc, env)  # `raise SystemExit(main())`
        raise Raised

    def _run_Try(self, node: ast.Try, env: Env) -> None:
        handlers = [handler for handler in node.handlers if _catches(handler)]
        try:
            chosen = self._interrupted(node, handlers)
            if chosen is None:
                self.run(node.body, env)
                self.run(node.orelse, env)
            else:
                self.run(chosen.body, env)
        except Raised:
            if not handlers:
                self.run(node.finalbody, env)
                raise
            self.run(handlers[0].body, env)
        except (Left, Closed):
            self.run(node.finalbody, env)
            raise
        self.run(node.finalbody, env)

    def _interrupted(self, node: ast.Try, handlers: list[ast.ExceptHandler]) -> ast.ExceptHandler | None:
        """The handler that runs because a forward pass raises before anything else happens, as one without memory does."""
        continuing = [h for h in handlers if not any(isinstance(part, ast.Raise) for part in h.body)]
        if not continuing or not any(self.relevance.acts(part) for part in node.body):
            return None
        chosen = self.path.choose(self.path.fresh(f"raises in {node.lineno}"), len(continuing) + 1)
        return continuing[chosen - 1] if chosen else None

    _run_TryStar = _run_Try

    def _run_Match(self, node: ast.Match, env: Env) -> None:
        subject = self.value(node.subject, env)
        key = subject.key if isinstance(subject, Unknown) else self.path.fresh("match")
        chosen = self.path.choose(f"{key} matches", len(node.cases))
        self.run(node.cases[chosen].body, env)


def _generator_in(source: Any) -> tuple[Suspended | None, Iterator[int] | None]:
    """The generator of the script that a loop runs through, and the numbers that `enumerate` gives its values."""
    if isinstance(source, Suspended):
        return source, None
    if isinstance(source, Partial) and source.function == "enumerate" and isinstance(source.args[0], Suspended):
        return source.args[0], itertools.count(source.args[1] if isinstance(source.args[1], int) else 0)
    return None, None


def _loaded(target: ast.expr) -> ast.expr:
    """The target of an assignment as an expression."""
    if isinstance(target, ast.Name):
        return ast.copy_location(ast.Name(target.id, ast.Load()), target)
    if isinstance(target, ast.Attribute):
        return ast.copy_location(ast.Attribute(target.value, target.attr, ast.Load()), target)
    if isinstance(target, ast.Subscript):
        return ast.copy_location(ast.Subscript(target.value, target.slice, ast.Load()), target)
    return target


def _tests_emptiness(test: ast.expr) -> bool:
    """Whether a test asks if a number is 0 or less."""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.LtE | ast.Lt | ast.Eq):
        return False
    limit = test.comparators[0]
    return isinstance(limit, ast.Constant) and type(limit.value) is int and limit.value in {0, 1}


def _counts(test: ast.expr) -> bool:
    """Whether a test is about the length of something, which a run does not know: its loops are short."""
    return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "len" for n in ast.walk(test))


def _catches(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches what a forward pass raises."""
    names = ast.unparse(handler.type) if handler.type is not None else "Exception"
    return any(name in names for name in ("Exception", "RuntimeError", "OutOfMemory", "OOM"))
