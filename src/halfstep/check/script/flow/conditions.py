"""Conditions as guards: what is known inside a branch, and after one that leaves.

A guard is the text of a test and its truth value, written in one way so that two tests of the same thing are equal or
opposite: `x is not None` and `x`, `0 < n` and `n > 0`, a flag and the flag that it copies.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Guard, is_accumulation
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.objects.values import make_scaler, text_of
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Binding, Function, Outline

__all__ = ["Conditions", "holds_without", "is_about", "leaves_block", "leaving"]

_MIRRORED: dict[type[ast.cmpop], str] = {
    ast.Lt: ">",
    ast.LtE: ">=",
    ast.Gt: "<",
    ast.GtE: "<=",
    ast.Eq: "==",
}


_OF_TRAINING = regex(r"finite|nan\b|isinf|loss|norm|grad", re.IGNORECASE)  # what a test during training is about


class Conditions:
    """Reads the tests of one function."""

    def __init__(self, outline: Outline, function: Function) -> None:
        self.outline = outline
        self.function = function
        self._followed: set[str] = set()  # variables whose condition is being read; one may depend on itself

    def guards(self, test: ast.expr, *, is_true: bool) -> tuple[Guard, ...]:
        """The guards that follow from `test` being true (or false)."""
        if isinstance(test, ast.Compare) and key_of(test.left) == "__name__":
            return ()  # `if __name__ == "__main__"` does not restrict what the script does
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.guards(test.operand, is_true=not is_true)
        if isinstance(test, ast.BoolOp):
            if isinstance(test.op, ast.And) == is_true:
                return tuple(g for value in test.values for g in self.guards(value, is_true=is_true))
            return (Guard(self._joined(test), is_true),)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._comparison(test.left, test.ops[0], test.comparators[0], is_true=is_true) or (
                Guard(text_of(test), is_true),
            )
        created = self._created_if(test)
        if created is not None:
            key = key_of(test)
            self._followed.add(key)
            guards = self.guards(created, is_true=is_true)
            self._followed.discard(key)
            return guards
        return (Guard(self._flag(test), is_true),)

    def decided(self, test: ast.expr) -> bool | None:
        """The truth value of a test whether there is a scaler, where the whole file assigns it only None, or only scalers."""
        guards = self.guards(test, is_true=True)
        key = guards[0].text if len(guards) == 1 else ""
        last = key.rsplit(".", 1)[-1]
        if "scaler" not in last.lower() or not key.replace(".", "").isidentifier():
            return None
        bindings = self.outline.lookup(key, self.function)
        if not 0 < len(bindings) <= MAX_BINDINGS or any(last in function.params for function in self.outline.functions):
            return None
        if all(isinstance(b.value, ast.Constant) and b.value.value is None for b in bindings):
            return not guards[0].is_true
        made = (isinstance(b.value, ast.Call) and make_scaler(self.outline, b.value, b.function) for b in bindings)
        return guards[0].is_true if all(made) and not self._has_default(key) else None

    def _has_default(self, key: str) -> bool:
        """Whether a class has a value for an attribute where no object has assigned it: `scaler = None` in its body."""
        own = self.outline.bindings.get(key.rsplit(".", 1)[-1], ()) if "." in key else ()
        return any(isinstance(self.outline.parents.get(b.node), ast.ClassDef) for b in own)

    def _joined(self, test: ast.BoolOp) -> str:
        """The text of `a or b`, its parts written like those of single guards where each of them is one."""
        parts = [self.guards(value, is_true=True) for value in test.values]
        if any(len(part) != 1 for part in parts):
            return text_of(test)
        word = " and " if isinstance(test.op, ast.And) else " or "
        return word.join(part[0].text if part[0].is_true else f"not {part[0].text}" for part in parts)

    def targets(self, call: ast.Call) -> list[tuple[Function, tuple[Guard, ...]]]:
        """The functions of this file that a call may run, each with the guards under which it does."""
        target = self.outline.call_target(call, self.function)
        methods = [target] if target is not None else self.outline.possible_targets(call, self.function)
        methods = [method for method in methods if not _is_abstract(method)]
        if any(map(self._is_optimizer_step, methods)):
            return []  # the step itself is what matters, not how the optimizer computes it
        # Of several classes one at a time, and the same one at every call.
        labels = [Guard(f"class@{method.cls}", is_true=True) for method in methods] if len(methods) > 1 else []
        others = [Guard(label.text, is_true=False) for label in labels]
        choices = [(*others[:i], label) for i, label in enumerate(labels)] or [()]
        return list(zip(methods, choices, strict=False))

    def _is_optimizer_step(self, method: Function) -> bool:
        bases = self.outline.bases.get(method.cls, ()) if method.name in {"step", "zero_grad"} else ()
        return any(text_of(base).endswith("Optimizer") or ".optim." in self.outline.names.full(base) for base in bases)

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr, *, is_true: bool) -> tuple[Guard, ...]:
        """The guards of `left op right`, if they are written differently."""
        if isinstance(right, ast.Constant) and (right.value is None or isinstance(right.value, bool)):
            same = isinstance(op, (ast.Is, ast.Eq))
            wanted = same if right.value is True else not same
            if isinstance(op, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)):
                return self.guards(left, is_true=is_true == wanted)
        if isinstance(op, ast.NotEq):
            return self._comparison(left, ast.Eq(), right, is_true=not is_true) or (
                Guard(f"{text_of(left)} == {text_of(right)}", not is_true),
            )
        if isinstance(op, ast.NotIn):
            return (Guard(f"{text_of(left)} in {text_of(right)}", not is_true),)
        if isinstance(left, ast.Constant) and type(op) in _MIRRORED:
            return (Guard(f"{text_of(right)} {_MIRRORED[type(op)]} {text_of(left)}", is_true),)
        if isinstance(op, (ast.Eq, ast.GtE)) and key_of(right) and self._starts_again(left):
            return (Guard(f"{text_of(left)} % {text_of(right)} == 0", is_true),)
        return ()

    def _starts_again(self, counter: ast.expr) -> bool:
        """Whether a variable counts to the length of a window: `count += 1` before, and `count = 0` in the branch that tests it."""
        key, node = key_of(counter), self.outline.parents.get(counter)
        while node is not None and not isinstance(node, ast.stmt):
            node = self.outline.parents.get(node)
        bindings = self.outline.lookup(key, self.function) if key and isinstance(node, ast.If) else ()
        starts = {b.node for b in bindings if b.value is not None and _is_number(b.value, 0)}
        branch = [part for statement in getattr(node, "body", ()) for part in ast.walk(statement)] if starts else []
        return not starts.isdisjoint(branch) and any(
            isinstance(n, ast.AugAssign)
            and isinstance(n.op, ast.Add)
            and key_of(n.target) == key
            and _is_number(n.value, 1)
            for n in ast.walk(self.function.node)
        )

    def _flag(self, test: ast.expr) -> str:
        """A condition's text; a variable that copies another or counts a window is replaced."""
        key = key_of(test)
        if not key:
            return (self.window(test) if isinstance(test, ast.Call) else "") or text_of(test)
        bindings = self._bindings(key)
        if len(bindings) == 1 and bindings[0].value is not None and bindings[0].index is None:
            value = bindings[0].value
            if key_of(value):
                return key_of(value)
        return self.window(test) or key

    def _created_if(self, test: ast.expr) -> ast.expr | None:
        """The condition that a variable is not None, or that it stores: `amp` for `scaler = GradScaler() if amp else None`.

        Of `has_scaler = scaler is not None`, that comparison.
        """
        key = key_of(test)
        bindings = self._bindings(key) if key and key not in self._followed else ()
        value = bindings[0].value if len(bindings) == 1 and bindings[0].index is None else None
        if isinstance(value, ast.Compare) and len(value.ops) == 1 and isinstance(value.ops[0], (ast.Is, ast.IsNot)):
            is_none = isinstance(value.comparators[0], ast.Constant) and value.comparators[0].value is None
            return value if is_none and key_of(value.left) else None
        if not isinstance(value, ast.IfExp) or not isinstance(value.orelse, ast.Constant):
            return None
        return value.test if value.orelse.value is None else None

    def window(self, node: ast.expr) -> str:
        """The condition `(i + 1) % n == 0` of an expression or of a variable that counts a window; "" for any other."""
        if _counts(node):
            return text_of(node)
        bindings = self._bindings(key_of(node)) if key_of(node) else ()
        value = bindings[0].value if len(bindings) == 1 and bindings[0].index is None else None
        if not bindings:
            value = self._returned(node)
        return text_of(value) if value is not None and _counts(value) else ""

    def _bindings(self, key: str) -> Sequence[Binding]:
        """The assignments to a variable; none to a parameter for which a call passes a literal, whatever others pass."""
        passed = self.outline.passed(key, self.function) if key in self.function.params else ()
        is_literal = any(isinstance(value, ast.Constant) for value, _ in passed)
        return () if is_literal else self.outline.lookup(key, self.function)

    def _returned(self, node: ast.expr) -> ast.expr | None:
        """What a call of a short function, or a property of this class, returns: `self.is_last(i)`.

        Of `if i % n == 0: return True` among other tests, the one that counts.
        """
        name = key_of(node)
        method = self.outline.call_target(node, self.function) if isinstance(node, ast.Call) else None
        if method is None and name.startswith("self."):
            method = self.outline.classes.get(self.function.cls, {}).get(name[len("self.") :])
        body = method.body if method is not None else []
        last = body[-1] if body else None
        tests = [s.test for s in body if isinstance(s, ast.If) and _returns_true(s.body) and _counts(s.test)]
        if tests and isinstance(last, ast.Return) and _is_false(last.value):
            return tests[0]
        return last.value if isinstance(last, ast.Return) else None


def holds_without(outline: Outline, function: Function, guard: Guard, flag: Guard) -> bool:
    """Whether a condition also holds without a flag: it tests the same variable, or only one part of what the flag is.

    `precision in ("fp16", "bf16")` for `precision == "fp16"`, and `args.amp` for `use_amp = args.amp and torch.cuda.is_available()`.
    """
    if _is_part(outline, function, guard, flag):
        return True
    bindings = outline.lookup(guard.text, function)
    value = bindings[0].value if len(bindings) == 1 and bindings[0].index is None else None
    tests = Conditions(outline, function).guards(value, is_true=guard.is_true) if value is not None else ()
    subject = flag.text.partition(" ")[0]
    parts = tests or (guard,)
    if " " not in flag.text or not all(is_about(part, flag) and part.text != subject for part in parts):
        return False
    # `x != "fp32"` holds for another value than that of the flag only if the file names one.
    values = [Guard(f"{subject} == {value!r}", is_true=True) for value in _compared(outline, subject)]
    return any(possible((v,), parts) and possible((v,), (flag.opposite,)) for v in values)


def _is_part(outline: Outline, function: Function, guard: Guard, flag: Guard) -> bool:
    """Whether a flag is computed as `a and b`, and a condition is `a` alone."""
    values = outline.values(flag.text, function) if flag.is_true else []
    value = values[0] if len(values) == 1 else None
    while isinstance(value, ast.Call) and key_of(value.func) == "bool" and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, ast.BoolOp) or not isinstance(value.op, ast.And):
        return False
    parts = Conditions(outline, function).guards(value, is_true=True)
    return guard in parts and len(set(parts)) > 1


def is_about(guard: Guard, flag: Guard) -> bool:
    """Whether two conditions test the same variable: `precision == "fp16"` and `precision != "fp32"`."""
    return guard.text.partition(" ")[0] == flag.text.partition(" ")[0]


def _compared(outline: Outline, subject: str) -> set[str]:
    """The strings that a file compares a variable with."""
    tests = [n for n in ast.walk(outline.module.node) if isinstance(n, ast.Compare) and text_of(n.left) == subject]
    parts = (part for test in tests for comparator in test.comparators for part in ast.walk(comparator))
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def _is_number(value: ast.expr, number: int) -> bool:
    return isinstance(value, ast.Constant) and value.value is not False and value.value == number


def _returns_true(body: list[ast.stmt]) -> bool:
    result = body[-1].value if isinstance(body[-1], ast.Return) else None
    return isinstance(result, ast.Constant) and result.value is True


def _is_false(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and not value.value)


def _counts(value: ast.expr) -> bool:
    """Whether a value counts to the end of a window: `(i + 1) % n == 0` or `count >= accumulate`, alone or combined with other tests."""
    return isinstance(value, (ast.Compare, ast.BoolOp)) and any(
        (isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod)) or _reaches(part) for part in ast.walk(value)
    )


def _reaches(test: ast.AST) -> bool:
    """Whether a test is that a counter has reached the length of a window."""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], (ast.Eq, ast.GtE)):
        return False
    length = key_of(test.comparators[0])
    return bool(length and key_of(test.left)) and is_accumulation(Guard(length, is_true=True))


def leaving(statement: ast.If, *, in_loop: bool) -> tuple[bool, bool]:
    """Whether the body of an `if`, and its `else`, leave the rest of the block.

    A branch that raises during training (`if not torch.isfinite(loss): raise`) ends the run: what follows is then no
    path of its own, and has no condition. Before the training, and wherever it is about a setting, `raise` tells which settings there are.
    """
    ends_run = (in_loop and not _is_setting(statement.test)) or bool(_OF_TRAINING.search(text_of(statement.test)))
    branches = (statement.body, statement.orelse)
    first, second = (leaves_block(b) and not (ends_run and isinstance(b[-1], ast.Raise)) for b in branches)
    return first, second


def _is_setting(test: ast.expr) -> bool:
    """Whether a test asks for settings alone: `scaler is None`, `not args.amp and backend == "ddp"`."""
    if isinstance(test, ast.BoolOp):
        return all(map(_is_setting, test.values))
    if isinstance(test, ast.UnaryOp):
        return _is_setting(test.operand)
    if isinstance(test, ast.Compare):
        return _is_setting(test.left) and all(isinstance(c, ast.Constant) for c in test.comparators)
    return isinstance(test, (ast.Name, ast.Attribute))


def leaves_block(body: list[ast.stmt]) -> bool:
    """Whether nothing after a block runs: it returns, raises, or goes to the next iteration."""
    last = body[-1] if body else None
    if isinstance(last, ast.If):
        return leaves_block(last.body) and leaves_block(last.orelse)
    return isinstance(last, (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _is_abstract(method: Function) -> bool:
    """Whether a method only declares what the subclasses of other files do: `...`, `pass` or `raise NotImplementedError`."""
    if not method.method or len(method.body) > 2:
        return False
    rest = [s for s in method.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return all(isinstance(s, ast.Pass) or (isinstance(s, ast.Raise) and "NotImpl" in text_of(s.exc)) for s in rest)
