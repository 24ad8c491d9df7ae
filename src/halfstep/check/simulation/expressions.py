"""Expressions of a simulated run: values, decisions and assignments."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable
from typing import Any

from halfstep.check.regex import regex
from halfstep.check.simulation.gradients import Gradients
from halfstep.check.simulation.paths import Path
from halfstep.check.simulation.relevance import Relevance
from halfstep.check.simulation.values import (
    Autocast,
    Class,
    Env,
    Func,
    Instance,
    Library,
    Negated,
    NoGrad,
    Params,
    Scaler,
    Tensor,
    Test,
    Unknown,
    is_plain,
)

__all__ = ["BUILTINS", "Expressions"]

BUILTINS = {
    "range", "enumerate", "len", "zip", "int", "float", "str", "bool", "min", "max", "isinstance", "hasattr", "getattr", "print",
    "list", "dict", "tuple", "set", "sum", "super", "iter", "next", "any", "all", "abs", "round", "type", "exit", "quit", "object",
    "setattr", "sorted", "reversed", "map", "filter", "callable", "id", "open", "vars",
}  # fmt: skip
_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.BitOr: operator.or_, ast.BitAnd: operator.and_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_SYMBOLS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_OPPOSITE = {"<": ">=", ">=": "<", ">": "<=", "<=": ">"}
# Names of one setting in different places.
_SAME = {
    **dict.fromkeys(("use_amp", "enable_amp", "amp_enabled", "mixed_precision", "use_mixed_precision", "is_amp", "with_amp"), "amp"),
    **dict.fromkeys(("use_fp16", "enable_fp16", "is_fp16"), "fp16"),
    **dict.fromkeys(("use_bf16", "enable_bf16"), "bf16"),
}  # fmt: skip
_SETTINGS = {"amp", "fp16", "bf16", *_SAME}
_WITHOUT_ATTRIBUTES = {"object", "torch.nn.Module", "torch.nn.modules.module.Module", "abc.ABC"}
_RARE = regex(r"resume|debug|ckpt|checkpoint|profil|isnan|isinf|is None|dry_run|eval_only|test_only|load_")
WINDOWS = (2, 1)  # micro-batches of a window, where the text does not decide it


def unknown(key: str) -> Unknown:
    """An unknown value; names of the same precision setting are one value."""
    last = key.rpartition(".")[2]
    return Unknown(f"setting {_SAME.get(last, last)}") if last in _SETTINGS else Unknown(key)


class Expressions:
    """Evaluates expressions."""

    def __init__(self, relevance: Relevance, table: dict[str, str], path: Path) -> None:
        self.relevance, self.table, self.path = relevance, table, path
        self.gradients = Gradients()
        self.regions: list[Autocast | NoGrad] = []
        self.active: list[ast.AST] = []
        self.bindings: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}  # scalers and optimizers that another file created, by key

    # --- what calls need; see `calls` ---------------------------------------------------------------------------------

    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """What a call gives."""
        raise NotImplementedError

    def call_method(self, base: Any, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
        """What a call of a method gives."""
        raise NotImplementedError

    # --- decisions ------------------------------------------------------------------------------------------------------

    def truth(self, value: Any, default: int = 0) -> bool:
        """Whether a value is true; a decision if that is not known."""
        value = self.resolved(value)
        if isinstance(value, Negated):
            return not self.truth(value.value, 1 - default)
        if isinstance(value, Test):
            return self._decide_test(value, default)
        if isinstance(value, Unknown | Tensor):
            key = value.key if isinstance(value, Unknown) else self.path.fresh("tensor")
            if self.path.answers.get(f"{key} is None") == 0:
                return False
            holds = self.path.choose(key, 2, 1 if _RARE.search(key) else default) == 0
            if holds:
                self.path.settle(f"{key} is None", 1)
            return holds
        if isinstance(value, dict | list | tuple | str | int | float | bool | bytes | type(None)):
            return bool(value)
        return True

    def _decide_test(self, test: Test, default: int) -> bool:
        question = test.question
        if question not in self.path.answers:
            implied = self._implied(test)
            if implied is not None:
                return implied
            if test.operator == "is" and test.other is None and self.path.answers.get(test.key) == 0:
                return False
        holds = self.path.choose(question, 2, 1 if _RARE.search(question) else default) == 0
        if holds and test.operator in {"==", "is"}:
            self.bindings[test.key] = test.other
        return holds

    def _implied(self, test: Test) -> bool | None:
        """What an earlier answer about the same value says."""
        opposite = _OPPOSITE.get(test.operator)
        answer = self.path.answers.get(f"{test.key} {opposite} {test.other!r}") if opposite else None
        return None if answer is None else answer == 1

    def resolved(self, value: Any) -> Any:
        """The value that this run has decided on."""
        if isinstance(value, Unknown) and value.key in self.bindings:
            return self.bindings[value.key]
        if isinstance(value, Test) and value.key in self.bindings and is_plain(self.bindings[value.key]):
            return _compare(value.operator, self.bindings[value.key], value.other)
        return value

    def window(self, value: Unknown) -> int:
        """The number of micro-batches that this run assumes for an unknown window."""
        allowed = [n for n in WINDOWS if self._agrees(value.key, n)] or [WINDOWS[0]]
        chosen = allowed[min(self.path.choose(f"{value.key} % window", len(allowed)), len(allowed) - 1)]
        self.bindings[value.key] = chosen
        return chosen

    def _agrees(self, key: str, number: int) -> bool:
        for sign in ("<", ">", "<=", ">=", "=="):
            for other in (0, 1, 2):
                answer = self.path.answers.get(f"{key} {sign} {other!r}")
                if answer is not None and (answer == 0) != _compare(sign, number, other):
                    return False
        return self.path.answers.get(key) != 1  # 0 is false

    # --- values ---------------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr, env: Env) -> Any:
        """The value of an expression."""
        self.path.step()
        handler = getattr(self, f"_value_{type(node).__name__}", None)
        result = handler(node, env) if handler is not None else Unknown(self.path.fresh(type(node).__name__))
        return self.resolved(result)

    def _value_Constant(self, node: ast.Constant, env: Env) -> Any:  # noqa: N802, ARG002 - named for the class of the node
        return node.value

    def _value_Name(self, node: ast.Name, env: Env) -> Any:  # noqa: N802
        scope: Env | None = env
        while scope is not None:
            if node.id in scope.variables:
                return scope.variables[node.id]
            if node.id in scope.local and node.id not in scope.of_parent:
                return unknown(node.id)  # not assigned yet on this path
            scope = scope.parent
        if node.id in BUILTINS:
            return Library(node.id)
        return Library(self.table[node.id]) if node.id in self.table else unknown(node.id)

    def _value_Attribute(self, node: ast.Attribute, env: Env) -> Any:  # noqa: N802
        return self.attribute(self.value(node.value, env), node.attr, node)

    def attribute(self, base: Any, name: str, node: ast.AST) -> Any:
        """An attribute of a value."""
        if isinstance(base, Library):
            return Library(f"{base.full}.{name}")
        if isinstance(base, Instance):
            return self._of_instance(base, name, node)
        if isinstance(base, Class):
            found = base.lookup(name)
            return unknown(f"{base.node.name}.{name}") if found is ... else found
        if isinstance(base, Unknown):
            return unknown(base.key if name == "module" else f"{base.key}.{name}")
        if isinstance(base, Tensor):
            return base if name in {"loss", "data", "logits", "T"} else Unknown(self.path.fresh(name))
        return Unknown(self.path.fresh(name))

    def _of_instance(self, base: Instance, name: str, node: ast.AST) -> Any:
        if name in base.attributes:
            return base.attributes[name]
        member = base.cls.lookup(name)
        if isinstance(member, Func):
            names = {ast.unparse(d).rpartition(".")[2] for d in getattr(member.node, "decorator_list", ())}
            if "staticmethod" in names:
                return member
            bound = Func(member.node, member.env, base.cls if "classmethod" in names else base, member.cls)
            return self.call(bound, [], {}, node) if names & {"property", "cached_property"} else bound
        if member is not ...:
            return member
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            self._miss(base, name, node)
        return unknown(f"{base.cls.node.name}.{name}")

    def _miss(self, base: Instance, name: str, node: ast.Attribute) -> None:
        """An attribute that this run has not assigned: an error if only other runs create a scaler there."""
        libraries = [b for b in base.cls.libraries() if not (isinstance(b, Library) and b.full in _WITHOUT_ATTRIBUTES)]
        if libraries or not base.is_built:
            return
        created = [self.relevance.scaler_attributes(cls.node).get(name) for cls in base.cls.lineage()]
        place = next((c for c in created if c is not None), None)
        if place is not None:
            self.gradients.missing(f"self.{name}", node, place)

    def _value_Subscript(self, node: ast.Subscript, env: Env) -> Any:  # noqa: N802
        base = self.value(node.value, env)
        if isinstance(node.slice, ast.Slice):
            return base if isinstance(base, Tensor | Params) else Unknown(self.path.fresh("slice"))
        index = self.value(node.slice, env)
        if isinstance(base, dict | list | tuple | str):
            if is_plain(index):
                try:
                    return base[index]
                except (LookupError, TypeError):
                    pass
            return Unknown(self.path.fresh("element"))
        if isinstance(base, Unknown) and is_plain(index):
            name = index if isinstance(index, str) else repr(index)
            return unknown(f"{base.key}.{name}")
        return base if isinstance(base, Tensor | Params) else Unknown(self.path.fresh("element"))

    def _value_Tuple(self, node: ast.Tuple, env: Env) -> Any:  # noqa: N802
        return tuple(self.value(e, env) for e in node.elts)

    def _value_List(self, node: ast.List | ast.Set, env: Env) -> Any:  # noqa: N802
        return [self.value(e, env) for e in node.elts]

    _value_Set = _value_List  # noqa: N815

    def _value_Starred(self, node: ast.Starred, env: Env) -> Any:  # noqa: N802
        return self.value(node.value, env)

    def _value_Dict(self, node: ast.Dict, env: Env) -> Any:  # noqa: N802
        table: dict[Any, Any] = {}
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            value = self.value(value_node, env)
            key = self.value(key_node, env) if key_node is not None else None
            if key_node is None and isinstance(value, dict):
                table |= value
            elif isinstance(key, str | int | float | bool | bytes | Library):
                table[key] = value
        return table

    def _value_JoinedStr(self, node: ast.JoinedStr, env: Env) -> Any:  # noqa: N802, ARG002
        return Unknown(self.path.fresh("text"))

    def _value_Lambda(self, node: ast.Lambda, env: Env) -> Any:  # noqa: N802
        return Func(node, env)

    def _value_NamedExpr(self, node: ast.NamedExpr, env: Env) -> Any:  # noqa: N802
        value = self.value(node.value, env)
        self.assign(node.target, value, env)
        return value

    def _value_Await(self, node: ast.Await, env: Env) -> Any:  # noqa: N802
        return self.value(node.value, env)

    def _value_IfExp(self, node: ast.IfExp, env: Env) -> Any:  # noqa: N802
        return self.value(node.body if self.truth(self.value(node.test, env)) else node.orelse, env)

    def _value_ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, env: Env) -> Any:  # noqa: N802
        first = node.generators[0]
        source = self.value(first.iter, env)
        if isinstance(source, Params):
            return source
        if len(node.generators) > 1 or not isinstance(source, list | tuple):
            inner = [source] if isinstance(source, Unknown) else []
            return Unknown(f"each of {inner[0].key}") if inner else Unknown(self.path.fresh("list"))
        results = []
        for element in source[:8]:
            scope = Env(env)
            self.assign(first.target, element, scope)
            tests = [self.value(test, scope) for test in first.ifs]
            if all(self.truth(test) for test in tests):
                results.append(self.value(node.elt, scope))
        return results

    _value_GeneratorExp = _value_ListComp  # noqa: N815
    _value_SetComp = _value_ListComp  # noqa: N815

    # --- operators --------------------------------------------------------------------------------------------------------

    def _value_BoolOp(self, node: ast.BoolOp, env: Env) -> Any:  # noqa: N802
        wanted = isinstance(node.op, ast.Or)
        for part in node.values[:-1]:
            value = self.value(part, env)
            if self.truth(value) == wanted:
                return value if wanted else (value if is_plain(value) else False)
        return self.value(node.values[-1], env)

    def _value_UnaryOp(self, node: ast.UnaryOp, env: Env) -> Any:  # noqa: N802
        value = self.value(node.operand, env)
        if isinstance(node.op, ast.Not):
            if isinstance(value, Unknown | Test | Negated | Tensor):
                return Negated(value)
            return not self.truth(value)
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return -value
        return value

    def _value_BinOp(self, node: ast.BinOp, env: Env) -> Any:  # noqa: N802
        left, right = self.value(node.left, env), self.value(node.right, env)
        if isinstance(node.op, ast.Mod) and isinstance(left, int | float) and isinstance(right, Unknown):
            right = self.window(right)
        if isinstance(left, Tensor) or isinstance(right, Tensor):
            return combined(left, right)
        if isinstance(left, Params) or isinstance(right, Params):
            return merged(left, right)
        if isinstance(left, list) and isinstance(right, list) and isinstance(node.op, ast.Add):
            return left + right
        if is_plain(left) and is_plain(right):
            try:
                return _OPERATORS[type(node.op)](left, right)
            except (KeyError, TypeError, ValueError, ArithmeticError, MemoryError):
                return Unknown(self.path.fresh("result"))
        if all(isinstance(side, Unknown | int | float) for side in (left, right)):
            sign = _SYMBOLS.get(type(node.op), "?")
            return Unknown(f"({_key(left)} {sign} {_key(right)})")
        return Unknown(self.path.fresh("result"))

    def _value_Compare(self, node: ast.Compare, env: Env) -> Any:  # noqa: N802
        left, sign = self.value(node.left, env), node.ops[0]
        right = self.value(node.comparators[0], env)
        if len(node.ops) > 1:
            return Unknown(self.path.fresh("comparison"))
        if isinstance(sign, ast.In | ast.NotIn):
            result = self._contains(right, left)
            return Negated(result) if isinstance(sign, ast.NotIn) else result
        return self._compared(left, sign, right)

    def _compared(self, left: Any, sign: ast.cmpop, right: Any) -> Any:
        if is_plain(left) and is_plain(right):
            try:
                return _OPERATORS[type(sign)](left, right)
            except (KeyError, TypeError):
                return Unknown(self.path.fresh("comparison"))
        if isinstance(left, Library) and isinstance(right, Library):
            same = left == right
            return same if isinstance(sign, ast.Eq | ast.Is) else not same
        if not isinstance(left, Unknown) and isinstance(right, Unknown):
            left, right, is_mirrored = right, left, True
        else:
            is_mirrored = False
        if isinstance(left, Unknown) and (is_plain(right) or isinstance(right, Library)):
            if isinstance(sign, ast.Eq | ast.Is | ast.NotEq | ast.IsNot):
                name = "is" if right is None else "=="
                test = Test(left.key, name, right)
                return test if isinstance(sign, ast.Eq | ast.Is) else Negated(test)
            symbol = _SYMBOLS[type(sign)]
            return Test(left.key, _MIRRORED[symbol] if is_mirrored else symbol, right)
        if isinstance(left, Unknown) and isinstance(right, Unknown):
            if left == right and isinstance(sign, ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
                return isinstance(sign, ast.Eq | ast.Is)  # `x != x` is a test for NaN
            if isinstance(sign, ast.NotEq | ast.IsNot):
                return Negated(Unknown(f"{left.key} == {right.key}"))
            return Unknown(f"{left.key} {_SYMBOLS.get(type(sign), '==')} {right.key}")
        if isinstance(sign, ast.Is | ast.IsNot | ast.Eq | ast.NotEq) and (left is None or right is None):
            return isinstance(sign, ast.IsNot | ast.NotEq)  # an object of ours is not None
        return Unknown(self.path.fresh("comparison"))

    def _contains(self, container: Any, item: Any) -> Any:
        if is_plain(container) and is_plain(item):
            try:
                return item in container
            except TypeError:
                return Unknown(self.path.fresh("membership"))
        if isinstance(container, dict) and is_plain(item):
            return item in container
        if isinstance(item, Unknown) and isinstance(container, list | tuple) and is_plain(container):
            for each in container:
                if self.truth(Test(item.key, "==", each), 1):
                    return True
            return False
        if isinstance(item, str) and isinstance(container, Unknown):
            return Unknown(f"{item!r} in {container.key}")
        return Unknown(self.path.fresh("membership"))

    # --- assignments ------------------------------------------------------------------------------------------------------

    def assign(self, target: ast.expr, value: Any, env: Env) -> None:
        """Assign to a name, an attribute, an element or several."""
        if isinstance(target, ast.Name):
            self.assign_name(env, target.id, value)
        elif isinstance(target, ast.Attribute):
            base = self.value(target.value, env)
            if isinstance(base, Instance):
                base.attributes[target.attr] = value
            elif isinstance(base, Unknown):
                self.bindings[f"{base.key}.{target.attr}"] = value
            if target.attr == "requires_grad":
                self.gradients.is_partial = True
        elif isinstance(target, ast.Tuple | ast.List):
            self._assign_several(target.elts, value, env)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, value, env)
        elif isinstance(target, ast.Subscript):
            base, index = self.value(target.value, env), self.value(target.slice, env)
            if isinstance(base, dict) and isinstance(index, str | int | float | bool):
                base[index] = value
            elif isinstance(base, list) and isinstance(index, int) and -len(base) <= index < len(base):
                base[index] = value

    def _assign_several(self, targets: list[ast.expr], value: Any, env: Env) -> None:
        if isinstance(value, list | tuple) and len(value) == len(targets):
            values: Iterable[Any] = value
        elif isinstance(value, Tensor | Params):
            values = [value] * len(targets)
        elif isinstance(value, Unknown):
            values = [unknown(f"{value.key}.{i}") for i in range(len(targets))]
        else:
            values = [Unknown(self.path.fresh("part")) for _ in targets]
        for target, each in zip(targets, values, strict=True):
            self.assign(target, each, env)

    def assign_name(self, env: Env, name: str, value: Any) -> None:
        """Assign to a variable of a scope, or of the one around it that it declares."""
        scope = env
        while name in scope.of_parent and scope.parent is not None:
            scope = scope.parent
        if isinstance(value, Scaler) and value.key == "":
            value.key = name
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


def _key(value: Any) -> str:
    return value.key if isinstance(value, Unknown) else repr(value)


def _compare(sign: str, left: Any, right: Any) -> bool:
    try:
        if sign == "is":
            return left is right
        return bool({"==": operator.eq, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}[sign](left, right))
    except TypeError:
        return False


def combined(*values: Any) -> Tensor:
    """What an operation makes of tensors and other values."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    models: frozenset[str] | None = frozenset()
    for tensor in tensors:
        models = None if models is None or tensor.models is None else models | tensor.models
    half = True if any(t.half for t in tensors) else None if any(t.half is None for t in tensors) else False
    scaled = next((t for t in tensors if t.scaler is not None), None)
    region = next((t.region for t in tensors if t.region is not None), None)
    halved = frozenset().union(*(t.halved for t in tensors))
    if scaled is None:
        return Tensor(models, half, None, 0, region, halved)
    return Tensor(models, half, scaled.scaler, scaled.version, region, halved)


def merged(*values: Any) -> Params:
    """Parameters of several collections."""
    return Params(frozenset().union(*(v.models for v in values if isinstance(v, Params))))
