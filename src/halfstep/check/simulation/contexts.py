"""Generators and context managers of a simulated run.

What a generator of the script yields is consumed where it yields: the body of `for x in steps():`, or of `with stepping():`, runs
there, inside the regions and between the statements of the generator.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from halfstep.check.simulation.decisions import Decisions
from halfstep.check.simulation.values import Autocast, Env, Func, Instance, NoGrad, Suspended, Unknown

__all__ = ["Closed", "Contexts", "Left"]

_Consume = Callable[[Any], None]


class Left(Exception):
    """A `break`, `continue` or `return`."""

    def __init__(self, kind: str, value: Any = None) -> None:
        super().__init__(kind)
        self.kind, self.value = kind, value


class Closed(Exception):
    """What consumes a generator leaves its loop or its `with`."""

    def __init__(self, left: Left | None = None) -> None:
        super().__init__()
        self.left = left


class Contexts(Decisions):
    """Runs generators, and the bodies of `with`."""

    def _value_Yield(self, node: ast.Yield, env: Env) -> Any:
        value = self.value(node.value, env) if node.value is not None else None
        self._consume(value)
        return Unknown(self.path.fresh("sent"))

    def _value_YieldFrom(self, node: ast.YieldFrom, env: Env) -> Any:
        source = self.value(node.value, env)
        if isinstance(source, Suspended):
            return self.resume(source, self._consume)
        for element in self.elements(source, self.iterations(node)):
            self._consume(element)
        return Unknown(self.path.fresh("sent"))

    def _consume(self, value: Any) -> None:
        """Run what consumes the generator that yields a value here."""
        if not self.consumers:
            return
        consume = self.consumers.pop()
        try:
            consume(value)
        except Left as left:
            raise Closed(left) from None
        finally:
            self.consumers.append(consume)

    def resume(self, generator: Suspended, consume: _Consume) -> Any:
        """Run a generator to its end, or until what consumes it leaves; what it returns."""
        self.consumers.append(consume)
        try:
            return self.run_function(generator.function, generator.args, generator.kwargs, generator.node)
        except Closed as closed:
            if closed.left is not None:
                raise closed.left from None
            return None
        finally:
            self.consumers.pop()

    def collected(self, generator: Suspended) -> list[Any]:
        """What a generator yields."""
        values: list[Any] = []
        self.resume(generator, values.append)
        return values

    def enter(self, context: Any) -> Any:
        """Enter a context that a stack leaves later: its regions are open from here on."""
        if isinstance(context, Autocast | NoGrad):
            self.regions.append(context)
        elif isinstance(context, Suspended):
            depth, opened = len(self.regions), list[Any]()

            def stop(_: Any) -> None:
                opened.extend(self.regions[depth:])
                raise Closed

            self.resume(context, stop)
            self.regions += opened
        return context

    def _run_With(self, node: ast.With | ast.AsyncWith, env: Env) -> None:
        depth = len(self.regions)
        try:
            self._run_inside(node.items, node.body, env)
        finally:
            del self.regions[depth:]

    _run_AsyncWith = _run_With

    def _run_inside(self, items: list[ast.withitem], body: list[ast.stmt], env: Env) -> None:
        """Enter contexts one after the other, and run a block inside."""
        if not items:
            self.run(body, env)
            return
        item, others = items[0], items[1:]
        context = self.value(item.context_expr, env)

        def run_block(entered: Any) -> None:
            if item.optional_vars is not None:
                self.assign(item.optional_vars, entered, env)
            self._run_inside(others, body, env)

        if isinstance(context, Suspended):
            self.resume(context, run_block)
            return
        if isinstance(context, Instance) and isinstance(context.cls.lookup("__enter__"), Func):
            run_block(self.call(self.attribute(context, "__enter__", item.context_expr), [], {}, item.context_expr))
            leave = self.attribute(context, "__exit__", item.context_expr)
            self.call(leave, [None, None, None], {}, item.context_expr)
            return
        if isinstance(context, Autocast | NoGrad):
            self.regions.append(context)
        elif self.may_cast(context, item.context_expr):
            self.regions.append(Autocast("", True, item.context_expr))
        run_block(context if isinstance(context, Instance | Unknown) else Unknown(self.path.fresh("context")))
