"""Which statements of a script matter to what its scaler and optimizers do."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from halfstep.check.regex import regex
from halfstep.check.script.syntax.children import all_children_of, nodes_in
from halfstep.check.script.syntax.names import key_of
from halfstep.check.simulation.aliases import called_name, read_aliases

__all__ = ["ENDS", "Relevance", "leaves", "rejects"]

_EVENTS = {
    "backward", "step", "update", "unscale_", "scale", "zero_grad", "clip_grad_norm_", "clip_grad_value_", "clip_grad_norm",
    "autocast", "GradScaler", "manual_backward", "scale_loss", "requires_grad_",
}  # fmt: skip
_OF_TRAINING = {"backward", "step", "update", "unscale_", "manual_backward", "scale_loss", "zero_grad"}
_NOT_AN_EVENT = regex(
    r"sched|prof|env|bar|writer|meter|metric|tracker|wandb|dict|hash|ema|config|cfg|log|tqdm|progress"
)
_LEAVES = (ast.Continue, ast.Break, ast.Return, ast.Raise)
ENDS = {"exit", "quit", "sys.exit", "os._exit"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.GeneratorExp)
_OF_NAME = {"startswith", "endswith", "match", "search", "fullmatch"}  # tests of a parameter's name


def _is_event(call: ast.Call) -> bool:
    name = called_name(call.func)
    if name not in _EVENTS:
        return False
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return not (name in {"step", "update", "scale"} and _NOT_AN_EVENT.search(owner.lower()))


def leaves(node: ast.AST) -> bool:
    """Whether it is a statement after which nothing of its block runs, or a call that ends the process."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return key_of(node.value.func) in ENDS
    return isinstance(node, _LEAVES)


def _clears(node: ast.Attribute) -> bool:
    return node.attr == "zero_grad" or (node.attr == "grad" and isinstance(node.ctx, ast.Store))


def rejects(body: list[ast.stmt]) -> bool:
    """Whether a block ends the run whatever it is: the `else` of a chain that knows no other value."""
    if len(body) == 1 and isinstance(body[0], ast.If):
        return rejects(body[0].body) and rejects(body[0].orelse)
    return bool(body) and (isinstance(body[-1], ast.Raise) or (isinstance(body[-1], ast.Expr) and leaves(body[-1])))


_Answer = TypeVar("_Answer")


def _remembered(method: Callable[[Relevance, Any], _Answer]) -> Callable[[Relevance, Any], _Answer]:
    """Answer each question once; the answers go with the object, so that no syntax tree outlives the check of its file."""

    @functools.wraps(method)
    def answer(self: Relevance, node: ast.AST) -> _Answer:
        key = (method.__name__, node)
        if key not in self._answers:
            self._answers[key] = method(self, node)
        return self._answers[key]  # type: ignore[no-any-return]

    return answer


def _functions_that_act(
    calls: list[ast.Call],
    events: list[ast.Call],
    around: dict[ast.AST, list[str]],
    aliases: list[tuple[str, frozenset[str]]],
) -> set[str]:
    """The names of functions in which an event, or a call of such a function, can run."""
    acting = {name for event in events for name in around[event]}
    for _ in range(6):  # depth of calls
        more = {name for call in calls if called_name(call.func) in acting for name in around[call]}
        more |= {alias for alias, functions in aliases if functions & acting}
        if more <= acting:
            break
        acting |= more
    return acting


class Relevance:
    """Answers for one syntax tree."""

    def __init__(self, tree: ast.Module) -> None:
        self._answers: dict[tuple[str, ast.AST], Any] = {}
        self._parents: dict[ast.AST, ast.AST] = {}
        nodes: list[ast.AST] = [tree]
        for node in nodes:  # grows
            children = all_children_of(node)
            for child in children:
                self._parents[child] = node
            nodes += children
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        definitions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        self.classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        stored = [node for node in attributes if isinstance(node.ctx, ast.Store)]
        self._filled = {node.attr for node in stored if not self._empties(node)}
        self._last_statements = {definition.body[-1] for definition in definitions}
        self.clears = any(map(_clears, attributes))
        self.reads_gradients = any(n.attr == "grad" and isinstance(n.ctx, ast.Load) for n in attributes)
        self._functions: dict[str, list[ast.AST]] = {}
        for definition in definitions:
            self._functions.setdefault(definition.name, []).append(definition)
        events = [call for call in calls if _is_event(call)]
        around: dict[ast.AST, list[str]] = {call: self._names_around(call) for call in calls}
        aliases = read_aliases(nodes, self._functions)
        self._acting = _functions_that_act(calls, events, around, aliases)
        acting = [*events, *(call for call in calls if called_name(call.func) in self._acting)]
        self._acts = self._with_ancestors(acting)
        steps = [call for call in events if called_name(call.func) in _OF_TRAINING]
        self._training = _functions_that_act(calls, steps, around, aliases)
        self._trains = self._with_ancestors(
            [*steps, *(call for call in calls if called_name(call.func) in self._training)]
        )
        self._leaving = self._with_ancestors(node for node in nodes if leaves(node))
        self._live = self._names_that_decide(nodes, acting)

    def _empties(self, node: ast.AST) -> bool:
        """Whether an attribute is assigned None as it is written."""
        value = getattr(self._parents.get(node), "value", ...)
        return isinstance(value, ast.Constant) and value.value is None

    def placeholders(self, attributes: dict[str, Any]) -> list[str]:
        """The attributes of an object that are None until code of another file, such as a subclass, assigns them."""
        return [name for name, value in attributes.items() if value is None and name not in self._filled]

    def _names_around(self, node: ast.AST) -> list[str]:
        names = []
        parent = self._parents.get(node)
        while parent is not None:
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
                names.append(parent.name)
            parent = self._parents.get(parent)
        return names

    def _with_ancestors(self, nodes: Iterable[ast.AST]) -> set[ast.AST]:
        marked: set[ast.AST] = set()
        for node in nodes:
            around: ast.AST | None = node
            while around is not None and around not in marked:
                marked.add(around)
                around = self._parents.get(around)
        return marked

    def _names_that_decide(self, nodes: list[ast.AST], acting: list[ast.Call]) -> set[str]:
        """The names that conditions and calls of what acts read."""
        parts: list[ast.AST] = list(acting)
        for node in nodes:
            if (isinstance(node, ast.If | ast.While) and node in self._acts) or isinstance(node, ast.IfExp):
                parts.append(node.test)
            elif isinstance(node, ast.withitem):
                parts.append(node.context_expr)
            elif isinstance(node, ast.Attribute) and node.attr == "requires_grad" and isinstance(node.ctx, ast.Store):
                parts += self._iterated_around(node)
        inside = [n for part in parts for n in nodes_in(part)]
        live = {n.id for n in inside if isinstance(n, ast.Name)} | {
            n.attr for n in inside if isinstance(n, ast.Attribute)
        }
        return live - {"self", "torch", "args", "cfg", "config"}

    def _iterated_around(self, node: ast.AST) -> list[ast.AST]:
        """What the loops around a statement run through."""
        iterated: list[ast.AST] = []
        parent = self._parents.get(node)
        while parent is not None and not isinstance(parent, _FUNCTIONS):
            if isinstance(parent, ast.For):
                iterated.append(parent.iter)
            parent = self._parents.get(parent)
        return iterated

    def acts(self, node: ast.AST) -> bool:
        """Whether a backward pass, a step or the like can run in it."""
        return node in self._acts

    def trains(self, node: ast.AST) -> bool:
        """Whether a backward pass or a step can run in it, and not only a region."""
        return node in self._trains

    @_remembered
    def is_accepting(self, node: ast.If) -> bool:
        """Whether a branch returns what a block that ends in `raise` accepts."""
        parent = self._parents.get(node)
        inside: ast.AST = node
        if isinstance(parent, ast.For):  # a search
            inside, parent = parent, self._parents.get(parent)
        block: list[ast.stmt] = getattr(parent, "body", [])
        ends = bool(block) and isinstance(block[-1], ast.Raise) and inside in block
        return ends and isinstance(node.body[-1], ast.Return)

    @_remembered
    def matters(self, node: ast.AST) -> bool:
        """Whether it acts, leaves, or assigns what decides."""
        if node in self._acts or node in self._leaving:
            return True
        return any(key.rpartition(".")[2] in self._live for key in self.assigned(node))

    @_remembered
    def assigned(self, node: ast.AST) -> tuple[str, ...]:
        """The variables that it assigns, as `name` or `self.name`."""
        keys = []
        for inner in nodes_in(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                keys.append(inner.id)
            elif (
                isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
            ):
                keys.append(f"{inner.value.id}.{inner.attr}")
            elif isinstance(inner, ast.FunctionDef | ast.ClassDef):
                keys.append(inner.name)
        return tuple(dict.fromkeys(keys))

    @_remembered
    def has_training_loop(self, node: ast.AST) -> bool:
        """Whether a loop in it, or in what it calls, trains."""
        for inner in nodes_in(node):
            if inner is not node and isinstance(inner, _LOOPS) and self.trains(inner):
                return True
            if isinstance(inner, ast.Call) and (name := called_name(inner.func)) in self._training:
                for function in self._functions.get(name, ()):
                    if any(isinstance(n, _LOOPS) and self.trains(n) for n in nodes_in(function)):
                        return True
        return False

    @_remembered
    def locals_of(self, function: ast.AST) -> frozenset[str]:
        """The names that a function assigns."""
        body = function.body if isinstance(function.body, list) else []  # type: ignore[attr-defined]
        return frozenset(key for part in body for key in self.assigned(part) if "." not in key)

    @_remembered
    def yields(self, function: ast.AST) -> bool:
        """Whether it is a generator."""
        body = function.body if isinstance(function.body, list) else []  # type: ignore[attr-defined]
        return any(map(self.yields_in, body))

    @_remembered
    def yields_in(self, statement: ast.AST) -> bool:
        """Whether a statement of a generator yields."""
        stack = [statement]
        while stack:
            node = stack.pop()
            if isinstance(node, ast.Yield | ast.YieldFrom):
                return True
            if not isinstance(node, _FUNCTIONS):
                stack += ast.iter_child_nodes(node)
        return False

    @_remembered
    def scaler_attributes(self, cls: ast.ClassDef) -> dict[str, ast.AST]:
        """The attributes that a class's constructor assigns a new scaler to, and where."""
        constructors = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        places: dict[str, ast.AST] = {}
        for node in (n for c in constructors for n in nodes_in(c) if isinstance(n, ast.Assign)):
            if "GradScaler" in ast.unparse(node.value):
                places |= {t.attr: node for t in node.targets if isinstance(t, ast.Attribute)}
        return places

    @_remembered
    def is_of_all_parameters(self, node: ast.Attribute) -> bool:
        """Whether an attribute of a parameter is set for all of `model.parameters()`, in a loop without conditions of its own."""
        statement = self._parents.get(node)
        while isinstance(statement, ast.expr):
            statement = self._parents.get(statement)
        loop = self._parents.get(statement) if statement is not None else None
        if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call) or statement not in loop.body:
            return False
        around = self._parents.get(loop)
        while around is not None and not isinstance(around, _FUNCTIONS):
            if isinstance(around, ast.If | ast.Try) and not self.matters(around):
                return False  # both branches are run
            around = self._parents.get(around)
        return called_name(loop.iter.func) in {"parameters", "named_parameters"}

    def is_of_some_parameters(self, node: ast.Attribute) -> bool:
        """Whether an attribute is set for the parameters that a loop chooses: `if "head" in name: p.grad = None`."""
        part: ast.AST | None = node
        tests: list[ast.expr] = []
        while part is not None and not isinstance(part, (ast.For, *_FUNCTIONS)):
            tests += [part.test] if isinstance(part, ast.If) else []
            part = self._parents.get(part)
        parts = [n for test in tests for n in ast.walk(test)]
        by_name = any(isinstance(n, (ast.In, ast.NotIn)) or getattr(n, "attr", "") in _OF_NAME for n in parts)
        return isinstance(part, ast.For) and by_name

    def acts_now(self, statement: ast.stmt) -> bool:
        """Whether running a statement of the module acts: not if it only defines."""
        return not isinstance(statement, _FUNCTIONS) and self.acts(statement)

    def is_last(self, node: ast.Return) -> bool:
        """Whether a `return` is the last statement of its function."""
        return node in self._last_statements

    def is_acting(self, name: str) -> bool:
        """Whether a function of the script with this name acts."""
        return name in self._acting

    def defines(self, name: str) -> bool:
        """Whether the script has a function of this name."""
        return name in self._functions

    def functions(self) -> list[ast.AST]:
        """All functions and methods that act."""
        return [node for name in self._functions if name in self._acting for node in self._functions[name]]
