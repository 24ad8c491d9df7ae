"""One function's statements as events in order, with the conditions, loops and regions around each.

The walk maintains three stacks. `guards` grows inside `if` branches, and after a branch that leaves (`continue`,
`return`, `raise` before the training) the rest of the block has the opposite condition. `loops` grows inside `for` and `while`. `regions`
grows inside `with`, and a decorator such as `@torch.no_grad()` puts the entire body inside one. Calls of functions of the
same file stay in the list as `Jump`s, for `trace` to follow.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.check.regex import regex
from halfstep.check.script.flow.conditions import Conditions, leaves_block, leaving
from halfstep.check.script.flow.contexts import Contexts
from halfstep.check.script.flow.event import Event, Guard, Loop, Region
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.flow.recognise import Recogniser
from halfstep.check.script.objects.expressions import arguments_of, numerator, unwrap
from halfstep.check.script.objects.tensors import adds_unscaled, grad_of
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import is_configured

__all__ = ["MODEL_NAME", "Item", "Jump", "read_flow"]

MAX_GUARDS = 100  # conditions in a row that are recorded; only generated code has more
MODEL_NAME = regex(r"model|^net(work)?$")
# Names that contain "model" without being one: model_path, model_state.
_ABOUT_MODEL = regex(
    r"file|path|name|dir|state|dict|config|cfg|args|url|type|ckpt|checkpoint|out|loss|size|param|input|pred|device"
)
_TENSOR = regex(r"torch\.(?!(load|compile)$)[a-z]\w*$|torch\.nn\.functional\.\w+$")  # functions that return one
_ABOUT_OPTIMIZER = regex(r"file|path|name|type|class|state|dict|config|cfg|args|ckpt|checkpoint|param|group|kwargs")
# Calls that only store the function they receive, or run it at another time.
_LATER = regex(
    r"register|hook|thread|process|signal|compile|jit|partial|submit|append|add_|set_|lr_?lambda", re.IGNORECASE
)
_CALL = regex(r"\w\(")
_ABOUT_LOSS = regex(r"loss|scal", re.IGNORECASE)  # what a function may be passed of a scaled loss, unlike inputs


@dataclass(frozen=True, eq=False)
class Jump:
    """A call of a function of the same file, to be followed."""

    call: ast.Call
    target: Function
    arguments: dict[str, str]  # parameter -> the caller's variable
    known: dict[str, bool]  # parameter -> truth value of the literal passed for it, or of its default
    guards: tuple[Guard, ...]
    loops: tuple[Loop, ...]
    regions: tuple[Region, ...]


Item = Event | Jump


@dataclass(frozen=True, eq=False)
class _Scaled:
    """How certainly a variable carries the loss scale, and the conditions under which it was assigned."""

    certainty: str  # yes, no or maybe
    guards: tuple[Guard, ...]
    scaler: str = ""  # the scaler's variable, where the assignment names it


def read_flow(outline: Outline, recogniser: Recogniser, function: Function) -> list[Item]:
    """The events and jumps of one function, in the order of its text."""
    walk = _Walk(outline, recogniser, function)
    regions = tuple(
        region
        for decorator in getattr(function.node, "decorator_list", ())
        if (region := walk.contexts.region(decorator, (), 0)).kind in {"autocast", "no_grad"}
    )
    if any(region.kind == "autocast" for region in regions):
        walk.items.append(Event("enter_function", function.node, function, regions=regions))
    walk.block(function.body, (), (), regions)
    return walk.items


def _is_taken_before(own: tuple[Guard, ...], others: tuple[Guard, ...]) -> bool:
    """Whether an `elif` asks for what a branch before it has taken: the same command twice. A call may return something else."""
    return bool(others) and not possible(others, own) and not any(_CALL.search(text) for text, _ in (*own, *others))


class _Walk:
    def __init__(self, outline: Outline, recogniser: Recogniser, function: Function) -> None:
        self.outline = outline
        self.recogniser = recogniser
        self.function = function
        self.tests = Conditions(outline, function)
        self.items: list[Item] = []
        self.scaled: dict[str, _Scaled] = {}  # variables that carry the loss scale
        self.contexts = Contexts(outline, function)

    def block(
        self, body: list[ast.stmt], guards: tuple[Guard, ...], loops: tuple[Loop, ...], regions: tuple[Region, ...]
    ) -> tuple[Guard, ...]:
        """Walk a list of statements; the conditions that are true after it."""
        for position, statement in enumerate(body):
            guards = self.statement(statement, guards, loops, regions) or guards
            rest = body[position + 1 :]
            regions, blocks = self.contexts.by_hand(statement, rest, regions, guards, len(loops))
            for node in blocks:
                event = Event("enter_autocast", node, self.function, guards=guards, loops=loops, regions=regions)
                self.items.append(event)
            if isinstance(statement, ast.Expr) and self.contexts.is_gradient_switch(statement.value):
                switch = self.contexts.region(statement.value, guards, len(loops))
                regions = tuple(r for r in regions if not self.contexts.is_gradient_switch(r.node))
                regions = (*regions, switch) if switch.kind == "no_grad" or switch.switch else regions
            if isinstance(statement, ast.If):
                leaves, leaves_else = leaving(statement, in_loop=bool(loops))
                if len(guards) > MAX_GUARDS:
                    continue
                if leaves and not leaves_else:
                    guards = (*guards, *self.tests.guards(statement.test, is_true=False))
                elif leaves_else and not leaves:
                    guards = (*guards, *self.tests.guards(statement.test, is_true=True))
            elif isinstance(statement, ast.Try) and statement.handlers and leaves_block(statement.body):
                guards = (*guards, Guard(f"except@{statement.handlers[0].lineno}", is_true=True))
        return guards

    def statement(
        self, node: ast.stmt, guards: tuple[Guard, ...], loops: tuple[Loop, ...], regions: tuple[Region, ...]
    ) -> tuple[Guard, ...] | None:
        """Walk a statement; the conditions after a `with` or `try` in which `if skip: continue` leaves."""
        if isinstance(node, ast.If):
            # An elif chain is nested else branches: walk it in a loop, because it can be long.
            branch: ast.If = node
            around = len(guards)
            while True:
                self.expression(branch, guards, loops, regions)
                decided = self.tests.decided(branch.test)
                own = () if decided else self.tests.guards(branch.test, is_true=True)
                if decided is not False and not _is_taken_before(own, guards[around:]):
                    self.block(branch.body, (*guards, *own), loops, regions)
                if decided is None and len(guards) <= MAX_GUARDS:
                    guards = (*guards, *self.tests.guards(branch.test, is_true=False))
                if len(branch.orelse) == 1 and isinstance(branch.orelse[0], ast.If):
                    branch = branch.orelse[0]
                    continue
                if decided is not True:
                    self.block(branch.orelse, guards, loops, regions)
                return None
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            self.expression(node, guards, loops, regions)
            loop = Loop(0, node.lineno, node.col_offset)
            self.block(node.body, guards, (*loops, loop), regions)
            self.block(node.orelse, guards, loops, regions)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            inner = regions
            self.expression(node, guards, loops, regions)
            for item in node.items:
                region = self.contexts.region(item.context_expr, guards, len(loops))
                inner = (*inner, region)
                if region.kind == "autocast":
                    self.items.append(
                        Event("enter_autocast", node, self.function, guards=guards, loops=loops, regions=inner)
                    )
                if region.kind == "scaled_loss" and item.optional_vars is not None:
                    self.scaled[key_of(item.optional_vars)] = _Scaled("maybe", guards)  # by Apex, which also unscales
            return self.block(node.body, guards, loops, inner)
        elif isinstance(node, (ast.Try, ast.TryStar)):
            after = self.block(node.body, guards, loops, regions)
            for handler in node.handlers:
                self.block(handler.body, (*guards, Guard(f"except@{handler.lineno}", is_true=True)), loops, regions)
            self.block(node.orelse, guards, loops, regions)
            self.block(node.finalbody, guards, loops, regions)
            # Otherwise the statements that follow also run after an exception, which may come before the `if`.
            return after if all(leaves_block(handler.body) for handler in node.handlers) else None
        elif isinstance(node, ast.Match):
            self.expression(node, guards, loops, regions)
            for index, case in enumerate(node.cases):
                label = f"case@{node.lineno}:{index}"
                self.block(case.body, (*guards, Guard(label, is_true=True)), loops, regions)
                guards = (*guards, Guard(label, is_true=False))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        elif isinstance(node, ast.ClassDef):
            self.block([s for s in node.body if not isinstance(s, ast.FunctionDef)], guards, loops, regions)
        else:
            self.expression(node, guards, loops, regions)
            self.assignment(node, guards, loops, regions)
        return None

    def expression(
        self, node: ast.AST, guards: tuple[Guard, ...], loops: tuple[Loop, ...], regions: tuple[Region, ...]
    ) -> None:
        for call, choices in self.outline.statement_calls.get(node, ()):
            under = guards
            for choice in choices:
                under = (*under, *self.tests.guards(choice.test, is_true=choice.is_true))
            targets = self.tests.targets(call)
            for target, chosen in targets:
                self.jump(call, target, (*under, *chosen), loops, regions)
            if targets:
                if self.advances_schedule(call, [target for target, _ in targets]):
                    key = key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
                    self.items.append(
                        Event("sched_step", call, self.function, "", "", key, "no", under, loops, regions)
                    )
                continue
            if options := self.outline.chosen_targets(call, self.function):
                for option, tests in options:
                    own = [g for test in tests for g in self.tests.guards(test.test, is_true=test.is_true)]
                    self.jump(call, option, (*under, *own), loops, regions)
                continue
            action = self.recogniser.action_of(call, self.function)
            if action is None and call.args:
                inner = self.outline.passed_target(call, self.function)
                if inner is not None and not _LATER.search(text_of(call.func)):
                    self.jump(call, inner, under, loops, regions)
            if action is not None:
                if action.kind == "opt_step" and (run := self.outline.passed_target(call, self.function)) is not None:
                    self.jump(call, run, under, loops, regions)  # a closure, which the step calls first
                scaled, scaler = action.scaled, action.scaler
                if action.kind in {"backward", "item"} and scaled != "yes" and action.subject in self.scaled:
                    scaled = self.known_scaled(action.subject, under, surely=action.kind == "backward")
                    scaler = scaler or self.scaled[action.subject].scaler
                event = Event(
                    action.kind,
                    call,
                    self.function,
                    scaler,
                    action.optimizer,
                    action.subject,
                    scaled,
                    under,
                    loops,
                    regions,
                )
                self.items.append(event)

    def advances_schedule(self, call: ast.Call, targets: list[Function]) -> bool:
        """Whether a call runs the `step` of a schedule that a class of this file defines: it counts, and steps nothing itself."""
        func = call.func
        if not isinstance(func, ast.Attribute) or func.attr != "step" or len(targets) != 1:
            return False
        if self.recogniser.kind_of(key_of(func.value), self.function) != "scheduler":
            return False
        nodes = list(ast.walk(targets[0].node))
        steps = [n for n in nodes if isinstance(n, ast.Call) and text_of(n.func).endswith(".step")]
        counts = [n for n in nodes if isinstance(n, ast.AugAssign) and isinstance(n.op, ast.Add)]
        return not steps and any(key_of(n.target).startswith("self.") for n in counts)

    def jump(
        self,
        call: ast.Call,
        target: Function,
        guards: tuple[Guard, ...],
        loops: tuple[Loop, ...],
        regions: tuple[Region, ...],
    ) -> None:
        if target is not self.function:
            arguments, literals = self.arguments(call, target), self.literals(call, target)
            self.items.append(Jump(call, target, arguments, literals, guards, loops, regions))

    def arguments(self, call: ast.Call, target: Function) -> dict[str, str]:
        """The parameters of a call, each with the caller's variable or the condition that it counts."""
        params = _positional(target)
        arguments: dict[str, str] = {}
        for name, value in zip(params, call.args, strict=False):
            if isinstance(value, ast.Starred):
                break
            arguments[name] = self.tests.window(value) or key_of(value)
        for keyword in call.keywords:
            if keyword.arg in params:
                arguments[keyword.arg] = self.tests.window(keyword.value) or key_of(keyword.value)
        return arguments

    def literals(self, call: ast.Call, target: Function) -> dict[str, bool]:
        """The parameters of a call whose value is a literal, and its truth value."""
        values: dict[str, ast.expr] = {}
        if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
            return {}
        assert not isinstance(target.node, ast.Module)
        a = target.node.args
        plain = [*a.posonlyargs, *a.args]
        if not is_configured(target):
            values.update(zip((p.arg for p in plain[len(plain) - len(a.defaults) :]), a.defaults, strict=True))
            values.update((p.arg, d) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None)
        values.update(zip(_positional(target), call.args, strict=False))
        values.update((k.arg, k.value) for k in call.keywords if k.arg)
        return {
            name: bool(value.value)
            for name, value in values.items()
            if isinstance(value, ast.Constant)
            and not any(b.function is target for b in self.outline.bindings.get(name, ()))
        }

    def known_scaled(self, subject: str, guards: tuple[Guard, ...], *, surely: bool) -> str:
        """Whether a variable carries the scale under these guards: certainly, or on some path to this point."""
        scaled = self.scaled[subject]
        if set(scaled.guards) <= set(guards):
            return scaled.certainty
        reached = not any((text, not is_true) in guards for text, is_true in scaled.guards)
        return scaled.certainty if reached and not surely else "maybe" if reached else "no"

    def scaled_source(self, value: ast.expr) -> str:
        """Whether a value computed from scaled variables is scaled: yes or maybe; "" if it uses none."""
        if not self.scaled:
            return ""
        passed = {a for call in ast.walk(value) if isinstance(call, ast.Call) for a in arguments_of(call)}
        for part in ast.walk(value):
            key = key_of(part) if isinstance(part, (ast.Name, ast.Attribute)) else ""
            if key in self.scaled and (part not in passed or _ABOUT_LOSS.search(key)):
                return self.scaled[key].certainty if part is numerator(value) else "maybe"
        return ""

    def assignment(
        self, node: ast.stmt, guards: tuple[Guard, ...], loops: tuple[Loop, ...], regions: tuple[Region, ...]
    ) -> None:
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) or node.value is None:
            return
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        is_masked = any(
            isinstance(t, ast.Subscript) and grad_of(t.value) for t in targets
        )  # p.grad[p.grad != p.grad] = 0
        is_added = isinstance(node, ast.AugAssign) and grad_of(node.target) and adds_unscaled(node.value)
        if is_masked or is_added:
            self.items.append(Event("grad_read", node, self.function, "", "", "grad", "no", guards, loops, regions))
        if loops and isinstance(node.value, ast.Constant) and node.value.value is None:
            self.clearing(node, targets, guards, loops, regions)
        scaled = self.recogniser.scaled_by(node.value, self.function) if node in self.outline.scaling else "no"
        for target in targets:
            for element in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                key = key_of(element)
                if not key:
                    continue
                if scaled == "no" and isinstance(node, ast.AugAssign):
                    continue
                if scaled != "no":
                    scaler = self.recogniser.scaler_in(node.value, self.function)
                    self.scaled[key] = _Scaled(scaled, guards, scaler)
                elif source := self.scaled_source(node.value):
                    # `total = scaled_loss.mean()` is still scaled; a new value is not.
                    scaler = self.scaled[key].scaler if key in self.scaled else ""
                    self.scaled[key] = _Scaled(source, guards, scaler)
                elif key in self.scaled and set(self.scaled[key].guards) >= set(guards):
                    del self.scaled[key]
                elif key in self.scaled:
                    self.scaled[key] = _Scaled("maybe", guards)
                self.creation(node, key, guards, loops, regions)

    def clearing(
        self,
        node: ast.stmt,
        targets: Sequence[ast.expr],
        guards: tuple[Guard, ...],
        loops: tuple[Loop, ...],
        regions: tuple[Region, ...],
    ) -> None:
        """Record `for p in model.parameters(): p.grad = None`, which clears the gradients once, not once per iteration."""
        loop = self.outline.parents.get(node)
        source = loop.iter if isinstance(loop, ast.For) else None
        func = source.func if isinstance(source, ast.Call) else None
        if any(grad_of(t) for t in targets) and isinstance(func, ast.Attribute) and func.attr == "parameters":
            key = key_of(func.value)
            self.items.append(Event("zero_grad", node, self.function, "", key, "", "no", guards, loops[:-1], regions))

    def creation(
        self,
        node: ast.Assign | ast.AnnAssign | ast.AugAssign,
        key: str,
        guards: tuple[Guard, ...],
        loops: tuple[Loop, ...],
        regions: tuple[Region, ...],
    ) -> None:
        """Record a new model or optimizer, and a model that is created in 16 bits."""
        value = node.value
        if not isinstance(value, ast.Call):
            return
        start, dtype = unwrap(value)
        last = key.rsplit(".", 1)[-1].lower()
        kind = self.recogniser.kind_of(key, self.function)
        fresh = key_of(start) != key and all(key_of(a) != key for a in value.args)
        is_model = bool(MODEL_NAME.search(last)) and not _ABOUT_MODEL.search(last)
        # `best_model_weights = copy.deepcopy(model.state_dict())` has tensors of the same model.
        is_model = is_model and not any(_is_state(argument) for argument in (value, *value.args))
        is_model = is_model and not _TENSOR.search(self.outline.names.full(value.func))
        is_optimizer = kind == "optimizer" and not _ABOUT_OPTIMIZER.search(last)
        if fresh and (is_optimizer or is_model):
            event = "set_optimizer" if is_optimizer else "set_model"
            self.items.append(Event(event, node, self.function, "", key, key, "no", guards, loops, regions))
        if dtype and key_of(start) != key:
            self.items.append(Event("cast", node, self.function, "", "", key, dtype, guards, loops, regions))


def _is_state(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "state_dict"


def _positional(target: Function) -> list[str]:
    params = list(target.params)
    return params[1:] if target.method and params and params[0] in {"self", "cls"} else params
