"""Assignments of a simulated run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable
from typing import Any

from halfstep.check.simulation.decisions import Decisions
from halfstep.check.simulation.values import Env, Instance, Library, Optimizer, Params, Scaler, Tensor, Unknown, unknown

__all__ = ["Assignments"]

MAX_ENTRIES = 8  # of a table that a loop fills


class Assignments(Decisions):
    """Assigns."""

    def assign(self, target: ast.expr, value: Any, env: Env) -> None:
        """Assign to a name, an attribute, an element or several."""
        if isinstance(target, ast.Name | ast.Attribute):
            name = target.id if isinstance(target, ast.Name) else target.attr
            if "scaler" in name.lower():
                self._note_none(name, value)
        if isinstance(target, ast.Name):
            self.assign_name(env, target.id, value)
        elif isinstance(target, ast.Attribute):
            base = self.value(target.value, env)
            if isinstance(base, Instance):
                base.attributes[target.attr] = value
            elif isinstance(base, Unknown):
                self.bindings[f"{base.key}.{target.attr}"] = value
            if target.attr == "grad" and value is None:
                if not self.relevance.is_of_some_parameters(target):
                    self.gradients.clear(None)
            elif target.attr == "grad":  # computed, or divided, by the script
                self.gradients.lose()
            elif target.attr == "requires_grad":
                models = base.models if isinstance(base, Params) else None
                self.gradients.frozen.set(models, value, is_all=self.relevance.is_of_all_parameters(target))
        elif isinstance(target, ast.Tuple | ast.List):
            self._assign_several(target.elts, value, env)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, value, env)
        elif isinstance(target, ast.Subscript):
            base, index = self.value(target.value, env), self.value(target.slice, env)
            has_place = isinstance(index, int) and isinstance(base, list) and -len(base) <= index < len(base)
            if has_place or (isinstance(base, dict) and isinstance(index, str | int)):
                operator.setitem(base, index, value)
            elif isinstance(base, dict) and isinstance(index, Unknown | Library) and len(base) < MAX_ENTRIES:
                base[index] = value

    def assign_result(self, target: ast.expr, value: Any, call: ast.expr, env: Env) -> None:
        """Assign what a call gives: `model, optimizer = prepare(model, optimizer)` gives the objects that it gets.

        What a function of another file gives is a scaler or an optimizer if it is assigned to the name of one.
        """
        if (
            not isinstance(target, ast.Tuple)
            or not isinstance(call, ast.Call)
            or not isinstance(value, Unknown | Tensor)
        ):
            self.assign(target, value, env)
            return
        passed = {ast.unparse(a): self.value(a, env) for a in call.args if isinstance(a, ast.Name | ast.Attribute)}
        self.assign(target, value, env)
        owner = value.key if isinstance(value, Unknown) else self.path.fresh("made")
        for part in target.elts:
            name = ast.unparse(part)
            if isinstance(part, ast.Name | ast.Attribute) and self.names_object(name):
                old = passed.get(name)
                own = Unknown(f"{owner}.{name.rpartition('.')[2]}")
                self.assign(part, old if isinstance(old, Optimizer | Scaler) else own, env)

    def _note_none(self, name: str, value: Any) -> None:
        self.none_since.pop(name, None)
        if value is None:
            self.none_since[name] = len(self.path.taken)

    def _assign_several(self, targets: list[ast.expr], value: Any, env: Env) -> None:
        if isinstance(value, list | tuple) and len(value) == len(targets):
            values: Iterable[Any] = value
        elif isinstance(value, Tensor | Params):
            values = [value] * len(targets)
        elif isinstance(value, Optimizer):
            values = self._optimizers_of(value, targets)
        elif isinstance(value, Unknown):
            values = [unknown(f"{value.key}.{i}") for i in range(len(targets))]
        else:
            values = [Unknown(self.path.fresh("part")) for _ in targets]
        for target, each in zip(targets, values, strict=True):
            self.assign(target, each, env)

    def _optimizers_of(self, made: Optimizer, targets: list[ast.expr]) -> list[Any]:
        """What a function gives that creates optimizers, and perhaps a schedule: by the names of its targets, or the first."""
        names = [ast.unparse(target) for target in targets]
        wanted = [name for name in names if self.names_object(name)] or names[:1]
        made.key = wanted[0]
        others = {name: Optimizer(name, made.models, made.node, made.sites, made.is_of_all) for name in wanted[1:]}
        if others and made.models is not None and len(made.models) > 1:  # whose each one is, is not known
            for each in (made, *others.values()):
                each.models = None
        self.gradients.optimizers += others.values()
        return [made if n == wanted[0] else others.get(n, Unknown(self.path.fresh("part"))) for n in names]

    def assign_name(self, env: Env, name: str, value: Any) -> None:
        """Assign to a variable of a scope, or of the one around it that it declares."""
        scope = env
        while name in scope.of_parent and scope.parent is not None:
            scope = scope.parent
        if isinstance(value, Scaler) and value.key == "":
            value.key = name
        old = scope.variables.get(name)
        if isinstance(old, Optimizer) and isinstance(value, Optimizer) and old is not value and not old.stepped:
            # Of two branches that both ran here, or replaced before anybody used it; a step makes it known again.
            self.gradients.optimizers[:] = [o for o in self.gradients.optimizers if o is not old]
        scope.variables[name] = value

    def assign_key(self, env: Env, key: str, value: Any) -> None:
        """Assign to `name` or `self.name`."""
        owner, _, name = key.rpartition(".")
        if not owner:
            self.assign_name(env, name, value)
            return
        base = env.variables.get(owner)
        if isinstance(base, Instance):
            base.attributes[name] = value
