"""`halfstep.inspect`: the truth table of any loop, without an Engine.

As a value it is what is stored now, and as a context manager also what one step computes in:

    print(halfstep.inspect(model, optimizer))

    with halfstep.inspect(model, optimizer, scaler) as step:
        loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    step.expect(master="fp32", states="fp32", loss="fp32", compute="bf16", grads="fp32")
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from halfstep.backends.deepspeed.partition import numel_of
from halfstep.errors import SettingError
from halfstep.inspection.expectations import KEYS
from halfstep.inspection.masters import trained_params
from halfstep.inspection.observed import observed_facts
from halfstep.inspection.observer import Observer
from halfstep.inspection.result import Inspection
from halfstep.inspection.stored import scale_of, stored_facts
from halfstep.inspection.wrappers import Parts, parts_of
from halfstep.optim.shards import local

__all__ = ["Inspector", "inspect"]


def inspect(model: Any, optimizer: Any = None, scaler: Any = None, *, ema: Any = None) -> Inspector:
    """Read what a training loop stores; as a context manager around one step, also observe what it computes in.

    `model` is a module, in any wrapper of torch, Accelerate, Lightning or DeepSpeed, or a halfstep.Engine. `optimizer` is one
    optimizer or a list, `scaler` the loss scaler, `ema` the EMA or its tensors.
    """
    return Inspector(parts_of(model, optimizer, scaler, ema))


class Inspector:
    """An inspection of a loop: `result` is what is known so far, and entering it observes one step."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._observer: Observer | None = None
        self._stack: ExitStack | None = None
        self.result: Inspection = _inspection(parts, None)

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise SettingError(
                "This inspection is observing a step already; call halfstep.inspect() again for another."
            )
        self._observer = Observer(self._parts)
        with ExitStack() as stack:
            stack.enter_context(self._observer.observed())
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        assert stack is not None
        stack.__exit__(kind, error, trace)
        if kind is None:
            self.result = _inspection(self._parts, self._observer)

    def expect(self, **formats: str) -> None:
        """Raise `ExpectationError` unless everything named has one of the formats given for it; see `Inspection.expect`."""
        self.result.expect(**formats)

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """The table."""
        return self.result.rows

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return self.result.as_dict()

    def __str__(self) -> str:
        return str(self.result)

    def _repr_html_(self) -> str:
        return self.result._repr_html_()


def _inspection(parts: Parts, observer: Observer | None) -> Inspection:
    trained = trained_params(parts)
    stepped = observer is not None and observer.num_applied > 0
    facts = {fact.key: fact for fact in (*stored_facts(parts, stepped=stepped), *observed_facts(parts, observer))}
    return Inspection(
        facts={key: facts[key] for key in KEYS},
        num_parameters=sum(map(numel_of, trained.values())),
        num_local=sum(local(param).numel() for param in trained.values()),
        wrappers=parts.wrappers,
        scale=None if parts.scaler is None else scale_of(parts.scaler),
    )
