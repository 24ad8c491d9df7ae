"""Comprehensions of a simulated run: loops, which may train as others do."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from halfstep.check.simulation.decisions import Decisions
from halfstep.check.simulation.values import Env, Params, Suspended, Tensor, Unknown, is_plain

__all__ = ["Comprehensions"]

MAX_ELEMENTS = 8  # of a list of the script's own
_Evaluate = Callable[[Env], None]


class Comprehensions(Decisions):
    """Evaluates comprehensions."""

    def _value_ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, env: Env) -> Any:
        results: list[Any] = []
        first = self.value(node.generators[0].iter, env)
        if isinstance(first, Params) and len(node.generators) == 1:
            return first
        is_known = self._comprehend(
            node, node.generators, first, env, lambda scope: results.append(self.value(node.elt, scope))
        )
        if is_known or (results and (self.relevance.acts(node) or all(isinstance(r, Tensor) for r in results))):
            return results
        return Unknown(f"each of {first.key}" if isinstance(first, Unknown) else self.path.fresh("list"))

    _value_GeneratorExp = _value_ListComp

    _value_SetComp = _value_ListComp

    def _value_DictComp(self, node: ast.DictComp, env: Env) -> Any:
        table: dict[Any, Any] = {}

        def add(scope: Env) -> None:
            key, value = self.value(node.key, scope), self.value(node.value, scope)
            if is_plain(key) and not isinstance(key, list):
                table[key] = value

        first = self.value(node.generators[0].iter, env)
        is_known = self._comprehend(node, node.generators, first, env, add)
        return table if is_known else Unknown(self.path.fresh("table"))

    def _comprehend(
        self, node: ast.expr, parts: list[ast.comprehension], source: Any, env: Env, evaluate: _Evaluate
    ) -> bool:
        """Evaluate for each element; whether the text decides what the elements are."""
        elements, is_known = self._elements_of(node, source)
        gradients = self.gradients
        made = None if is_known or self.relevance.acts(node) else (list(gradients.optimizers), list(gradients.scalers))
        for element in elements:
            scope = Env(env)
            self.assign(parts[0].target, element, scope)
            tests = [self.value(test, scope) for test in parts[0].ifs]
            if not all(self.truth(test) for test in tests):
                continue
            if len(parts) > 1:
                inner = self.value(parts[1].iter, scope)
                is_known = self._comprehend(node, parts[1:], inner, scope, evaluate) and is_known
            else:
                evaluate(scope)
        if made is not None:  # how many there are is not known
            gradients.optimizers[:], gradients.scalers[:] = made
        return is_known

    def _elements_of(self, node: ast.expr, source: Any) -> tuple[list[Any], bool]:
        """What a comprehension runs through, and whether the text decides it."""
        source = self.sequence(source)
        if isinstance(source, list | tuple):
            return list(source[:MAX_ELEMENTS]), True
        if isinstance(source, Params):
            return [source], True
        if isinstance(source, Suspended):
            return self.collected(source), False
        if isinstance(source, dict):
            return list(source)[:MAX_ELEMENTS], True
        if isinstance(source, Tensor):
            return [source], False
        if self.relevance.acts(node):
            return list(self.elements(source, self.iterations(node))), False
        return [
            Unknown(f"each of {source.key}") if isinstance(source, Unknown) else Unknown(self.path.fresh("batch"))
        ], False
