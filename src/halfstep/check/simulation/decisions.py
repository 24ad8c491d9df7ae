"""The answers of a run to what the script tests and the text does not decide."""

from __future__ import annotations

import operator
from typing import Any

from halfstep.check.regex import regex
from halfstep.check.simulation.run import Run
from halfstep.check.simulation.values import Negated, Tensor, Test, Unknown, is_plain

__all__ = ["HAS_CUDA", "Decisions"]

# A model with a `backward` of its own is an engine of DeepSpeed.
_RARE = regex(
    r"(^|[._])(no|disable|without|skip)_|resume|debug|ckpt|checkpoint|profil|isnan|isinf|is None|dry_run|eval_only|test_only|load_|"
    r"^hasattr\(.*'backward'\)$"
)
_SUM = regex(r"\((\w[\w.]*) ([+-]) (\d{1,9})\)$")  # what `operators` calls `steps + 1`
_NOT_FINITE = regex(r"finite|isnan|isinf")
_COUNT = regex(
    r"(^|[._(])(num|max|total|n)_\w*(steps|iters?|iterations|batches|epochs)|(^|\.)(steps|iters|iterations|epochs)$|^\(?len\("
)
HAS_CUDA = "torch.cuda.is_available()"
WINDOWS = (2, 1)  # micro-batches of a window, where the text does not decide it


class Decisions(Run):
    """Decides."""

    def truth(self, value: Any, default: int = 0, *, is_firm: bool = False) -> bool:
        """Whether a value is true; a decision if that is not known, whose default counts whatever is asked if it is firm."""
        value = self.resolved(value)
        if isinstance(value, Negated):
            return not self.truth(value.value, 1 - default, is_firm=is_firm)
        if isinstance(value, Test):
            return self._decide_test(value, default, is_firm=is_firm)
        if isinstance(value, Unknown | Tensor):
            key = value.key if isinstance(value, Unknown) else self.key_of(value)
            if self.path.answers.get(f"{key} is None") == 0:
                return False
            expected = 0 if key == HAS_CUDA else 1 if _RARE.search(key) and not is_firm else default
            holds = self.path.choose(key, 2, expected) == 0
            if _NOT_FINITE.search(key) and holds == (expected == 1):
                self.gradients.skips += 1  # what the script does after an overflow
            if holds:
                self.path.settle(f"{key} is None", 1)
            self._note_absent(key, absent=not holds)
            return holds
        if isinstance(value, dict | list | tuple | str | int | float | bool | bytes | type(None)):
            return bool(value)
        return True

    def key_of(self, value: Tensor) -> str:
        """The question about a tensor, the same one for the same object: what another file's function gave may be a flag."""
        if id(value) not in self.asked:
            self.asked[id(value)] = (value, self.path.fresh("tensor"))
        return self.asked[id(value)][1]

    def _decide_test(self, test: Test, default: int, *, is_firm: bool) -> bool:
        question = test.question
        if question not in self.path.answers:
            implied = self.bounds.implied(test)
            if implied is not None:
                return implied
            if test.operator == "is" and test.other is None and self.path.answers.get(test.key) == 0:
                return False
        is_rare = not is_firm and (_RARE.search(question) or _is_last(test))
        holds = self.path.choose(question, 2, 1 if is_rare else default) == 0
        self.bounds.learn(test, holds=holds)
        if holds and test.operator in {"==", "is"}:
            self.bindings[test.key] = test.other
            self._note_absent(test.key, absent=test.other is None)
        return holds

    def _note_absent(self, key: str, *, absent: bool) -> None:
        """A caller that passes no scaler may train in float32, which the region of this run does not show."""
        if absent and "scaler" in key:
            self.gradients.may_lack_scaler = True

    def resolved(self, value: Any) -> Any:
        """The value that this run has decided on."""
        kind = type(value)
        if kind is Unknown:
            if value.key in self.bindings:
                return self.bindings[value.key]
            sum_ = _SUM.match(value.key) if value.key[:1] == "(" else None
            if sum_ is not None and isinstance(self.bindings.get(sum_[1]), int):
                number = int(sum_[3])
                return self.bindings[sum_[1]] + (number if sum_[2] == "+" else -number)
        elif kind is Test and value.key in self.bindings and is_plain(self.bindings[value.key]):
            return _compare(value.operator, self.bindings[value.key], value.other)
        return value

    def window(self, value: Unknown) -> int:
        """The number of micro-batches that this run assumes for an unknown window."""
        allowed = [n for n in WINDOWS if self.bounds.allows(value.key, n)] or [WINDOWS[0]]
        chosen = allowed[min(self.path.choose(f"{value.key} % window", len(allowed)), len(allowed) - 1)]
        self.bindings[value.key] = chosen
        return chosen

    def counter(self, value: Any) -> Any:
        """A count of steps that the text does not decide, such as one from a checkpoint, starts at 0."""
        if isinstance(value, Unknown) and value.key.replace(".", "_").replace("#", "_").isidentifier():
            self.bindings[value.key] = 0
            return 0
        return value


def _is_last(test: Test) -> bool:
    """Whether a test asks if a count of steps or batches ends at a number, which the first iterations of a loop do not."""
    return test.operator == "==" and type(test.other) is int and bool(_COUNT.search(test.key))


def _compare(sign: str, left: Any, right: Any) -> bool:
    try:
        if sign == "is":
            return left is right
        return bool(
            {"==": operator.eq, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}[sign](
                left, right
            )
        )
    except TypeError:
        return False
