"""Statements of a simulated run.

A loop over something unknown runs a few times: enough for two windows of two micro-batches. A branch that nothing in the training
depends on is not decided: what it assigns is unknown afterwards.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from halfstep.check.simulation.expressions import Expressions
from halfstep.check.simulation.gradients import Raised
from halfstep.check.simulation.values import Autocast, Class, Env, Func, Instance, Library, NoGrad, Unknown, is_plain

__all__ = ["Machine"]

NUM_ITERATIONS = 4  # of a loop that trains: two windows of two micro-batches
NUM_EPOCHS = 2
MAX_ELEMENTS = 8  # of a list that a loop runs through
MAX_DEPTH = 14  # of calls


class _Left(Exception):  # noqa: N818
    """A `break`, `continue` or `return`."""

    def __init__(self, kind: str, value: Any = None) -> None:
        super().__init__(kind)
        self.kind, self.value = kind, value


class Machine(Expressions):
    """Runs statements."""

    depth = 0

    def run(self, body: Iterable[ast.stmt], env: Env) -> None:
        """Run a block."""
        for statement in body:
            self.path.step()
            handler = getattr(self, f"_run_{type(statement).__name__}", None)
            if handler is not None:
                handler(statement, env)

    # --- names ----------------------------------------------------------------------------------------------------

    def _run_Import(self, node: ast.Import, env: Env) -> None:  # noqa: N802 - named for the class of the node
        for alias in node.names:
            top = alias.name.split(".")[0]
            self.assign_name(env, alias.asname or top, Library(alias.name if alias.asname else top))

    def _run_ImportFrom(self, node: ast.ImportFrom, env: Env) -> None:  # noqa: N802
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            if alias.name != "*":
                self.assign_name(env, alias.asname or alias.name, Library(f"{module}.{alias.name}"))

    def _run_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, env: Env) -> None:  # noqa: N802
        self.assign_name(env, node.name, Func(node, env))

    _run_AsyncFunctionDef = _run_FunctionDef  # noqa: N815

    def _run_ClassDef(self, node: ast.ClassDef, env: Env) -> None:  # noqa: N802
        inner = Env(env)
        self.run(node.body, inner)
        cls = Class(node, tuple(self.value(base, env) for base in node.bases), inner.variables)
        for value in inner.variables.values():
            if isinstance(value, Func):
                value.cls, value.env = cls, env  # a method does not see the names of its class
        self.assign_name(env, node.name, cls)

    def _run_Global(self, node: ast.Global | ast.Nonlocal, env: Env) -> None:  # noqa: N802
        env.of_parent.update(node.names)

    _run_Nonlocal = _run_Global  # noqa: N815

    def _run_Delete(self, node: ast.Delete, env: Env) -> None:  # noqa: N802
        for target in node.targets:
            if isinstance(target, ast.Name):
                env.variables.pop(target.id, None)

    # --- assignments ------------------------------------------------------------------------------------------------

    def _run_Expr(self, node: ast.Expr, env: Env) -> None:  # noqa: N802
        self.value(node.value, env)

    def _run_Assign(self, node: ast.Assign, env: Env) -> None:  # noqa: N802
        value = self.value(node.value, env)
        for target in node.targets:
            self.assign(target, value, env)

    def _run_AnnAssign(self, node: ast.AnnAssign, env: Env) -> None:  # noqa: N802
        if node.value is not None:
            self.assign(node.target, self.value(node.value, env), env)
        elif isinstance(node.target, ast.Name) and isinstance(env.parent, Env) and self.is_class_body(env):
            env.variables[node.target.id] = Unknown(node.target.id)  # a field of a dataclass

    def is_class_body(self, env: Env) -> bool:
        """Whether names of this scope are fields."""
        return env.local == frozenset() and env.parent is not None

    def _run_AugAssign(self, node: ast.AugAssign, env: Env) -> None:  # noqa: N802
        binary = ast.copy_location(ast.BinOp(_loaded(node.target), node.op, node.value), node)
        self.assign(node.target, self.value(binary, env), env)

    # --- branches and loops -----------------------------------------------------------------------------------------

    def _run_If(self, node: ast.If, env: Env) -> None:  # noqa: N802
        if not self.relevance.matters(node):  # both branches: each may fill a list of parameters
            self.run([*node.body, *node.orelse], env)
            for name in self.relevance.assigned(node):
                self.assign_key(env, name, Unknown(self.path.fresh(name)))
            return
        leaves = not node.orelse and isinstance(node.body[-1], ast.Continue | ast.Raise | ast.Return | ast.Break)
        chosen = node.body if self.truth(self.value(node.test, env), 1 if leaves else 0) else node.orelse
        self.run(chosen, env)

    def _run_Assert(self, node: ast.Assert, env: Env) -> None:  # noqa: N802
        test = self.value(node.test, env)
        if is_plain(test) and not isinstance(test, tuple | list) and not test:
            raise Raised

    def _run_For(self, node: ast.For | ast.AsyncFor, env: Env) -> None:  # noqa: N802
        trains = self.relevance.acts(node)
        limit = 2 if not trains else NUM_EPOCHS if self.relevance.contains_training_loop(node) else NUM_ITERATIONS
        elements = self.elements(self.value(node.iter, env), limit, node.iter)
        for element in elements:
            self.assign(node.target, element, env)
            try:
                self.run(node.body, env)
            except _Left as left:
                if left.kind == "return":
                    raise
                if left.kind == "break":
                    return
        self.run(node.orelse, env)

    _run_AsyncFor = _run_For  # noqa: N815

    def _run_While(self, node: ast.While, env: Env) -> None:  # noqa: N802
        trains = self.relevance.acts(node)
        limit = 1 if not trains else NUM_EPOCHS if self.relevance.contains_training_loop(node) else NUM_ITERATIONS
        for _ in range(limit):
            test = self.value(node.test, env)
            if is_plain(test) and not test:
                break
            try:
                self.run(node.body, env)
            except _Left as left:
                if left.kind == "return":
                    raise
                if left.kind == "break":
                    return

    def _run_Break(self, node: ast.Break, env: Env) -> None:  # noqa: N802, ARG002
        self.gradients.skips += 1
        raise _Left("break")

    def _run_Continue(self, node: ast.Continue, env: Env) -> None:  # noqa: N802, ARG002
        self.gradients.skips += 1
        raise _Left("continue")

    def _run_Return(self, node: ast.Return, env: Env) -> None:  # noqa: N802
        value = self.value(node.value, env) if node.value is not None else None
        if not self.relevance.is_last(node):
            self.gradients.skips += 1
        raise _Left("return", value)

    def _run_Raise(self, node: ast.Raise, env: Env) -> None:  # noqa: N802, ARG002
        raise Raised

    def _run_Try(self, node: ast.Try, env: Env) -> None:  # noqa: N802
        try:
            self.run(node.body, env)
            self.run(node.orelse, env)
        except Raised:
            if not node.handlers:
                self.run(node.finalbody, env)
                raise
            self.run(node.handlers[0].body, env)
        except _Left:
            self.run(node.finalbody, env)
            raise
        self.run(node.finalbody, env)

    _run_TryStar = _run_Try  # noqa: N815

    def _run_Match(self, node: ast.Match, env: Env) -> None:  # noqa: N802
        subject = self.value(node.subject, env)
        key = subject.key if isinstance(subject, Unknown) else self.path.fresh("match")
        chosen = self.path.choose(f"{key} matches", len(node.cases))
        self.run(node.cases[chosen].body, env)

    def _run_With(self, node: ast.With | ast.AsyncWith, env: Env) -> None:  # noqa: N802
        depth = len(self.regions)
        for item in node.items:
            context = self.value(item.context_expr, env)
            if isinstance(context, Autocast | NoGrad):
                self.regions.append(context)
            elif self.may_cast(context, item.context_expr):
                self.regions.append(Autocast("", True, item.context_expr))
            if item.optional_vars is not None:
                self.assign(item.optional_vars, self.entered(context, item.context_expr), env)
        try:
            self.run(node.body, env)
        finally:
            del self.regions[depth:]

    _run_AsyncWith = _run_With  # noqa: N815

    # --- calls of the script's functions ------------------------------------------------------------------------------

    def call_function(self, function: Func, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """What a function of the script returns."""
        if self.depth >= MAX_DEPTH or function.node in self.active:
            return Unknown(self.path.fresh("recursion"))
        env = self.bind(function, args, kwargs)
        if isinstance(function.node, ast.Lambda):
            return self.value(function.node.body, env)
        if self.relevance.yields(function.node):
            return self.generator(function, env, node)
        depth = len(self.regions)
        self.depth += 1
        self.active.append(function.node)
        try:
            for decorator in function.node.decorator_list:
                region = self.value(decorator, function.env)
                if isinstance(region, Library):
                    region = self.call(region, [], {}, decorator)
                if isinstance(region, Autocast | NoGrad):
                    self.regions.append(region)
            self.run(function.node.body, env)
        except _Left as left:
            return left.value
        finally:
            self.depth -= 1
            self.active.pop()
            del self.regions[depth:]
        return None

    def generator(self, function: Func, env: Env, node: ast.AST) -> Any:  # noqa: ARG002
        """What a call of a function with `yield` gives: its statements do not run here."""
        return Unknown(self.path.fresh(getattr(function.node, "name", "generator")))

    def create(self, cls: Class, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """An object of a class of the script."""
        name = cls.node.name
        instance = Instance(cls, self.path.fresh(name))
        for each in reversed(cls.lineage()):
            for key, value in each.attributes.items():
                if not isinstance(value, Func):
                    instance.attributes[key] = value
        is_data = any("dataclass" in ast.unparse(d) for d in cls.node.decorator_list)
        if is_data:
            # Any field may be given by the caller; what this call passes is known.
            for key in instance.attributes:
                instance.attributes[key] = Unknown(f"{name}.{key}")
            instance.attributes |= kwargs
            return instance
        constructor = cls.lookup("__init__")
        if isinstance(constructor, Func):
            self.call_function(Func(constructor.node, constructor.env, instance, constructor.cls), args, kwargs, node)
        instance.is_built = True
        return instance

    def bind(self, function: Func, args: list[Any], kwargs: dict[str, Any]) -> Env:
        """The variables of a function at its start."""
        spec = function.node.args
        env = Env(function.env, local=self.relevance.locals_of(function.node))
        names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        if function.owner is not None and names:
            args = [function.owner, *args]
        defaults = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
        defaults |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
        for name, value in zip(names, args, strict=False):
            env.variables[name] = value
        if spec.vararg is not None:
            env.variables[spec.vararg.arg] = list(args[len(names) :])
        known = {*names, *(a.arg for a in spec.kwonlyargs)}
        env.variables |= {k: v for k, v in kwargs.items() if k in known}
        for name in known - env.variables.keys():
            is_open = None in kwargs or "" in kwargs or self.is_root(function)
            env.variables[name] = self.value(defaults[name], function.env) if name in defaults and not is_open else Unknown(name)
        if spec.kwarg is not None:
            env.variables[spec.kwarg.arg] = Unknown(self.path.fresh(spec.kwarg.arg))
        return env


def _loaded(target: ast.expr) -> ast.expr:
    """The target of an assignment as an expression."""
    if isinstance(target, ast.Name):
        return ast.copy_location(ast.Name(target.id, ast.Load()), target)
    if isinstance(target, ast.Attribute):
        return ast.copy_location(ast.Attribute(target.value, target.attr, ast.Load()), target)
    if isinstance(target, ast.Subscript):
        return ast.copy_location(ast.Subscript(target.value, target.slice, ast.Load()), target)
    return target
