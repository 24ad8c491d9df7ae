"""Which module's code is running: a stack of modules, also by number of the autograd node.

Every autograd node has a sequence number in the order of creation, so the module in which a node was created, and with it
the module to which a step of the backward pass belongs, follows from the numbers at which modules were entered and left.
The call of every module is observed, hooks of the user's included, so that what a hook does counts as its module's.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Places", "next_sequence_nr"]


def next_sequence_nr() -> int:
    """The number that the next autograd node of this thread will have."""
    return int(torch._C._autograd._get_sequence_nr())  # noqa: SLF001 - no public name


@dataclass
class _Thread:
    """The calls of one thread. Backward passes of a GPU, with what checkpoints compute again, run in a thread of their own."""

    stack: list[str | None] = field(default_factory=lambda: [None])
    outsiders: list[str] = field(default_factory=lambda: [""])
    numbers: list[int] = field(default_factory=lambda: [0])
    at: list[str | None] = field(default_factory=lambda: [None])


class Places:
    """The names of the modules whose calls are in progress; None outside the model, "" in the model's own forward.

    A module that is no part of the model, such as a loss that the forward creates, counts as the code that calls it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            self._names.setdefault(module, name)
        self._threads: dict[int, _Thread] = {}

    @property
    def current(self) -> str | None:
        """The innermost module in progress."""
        return self._thread().stack[-1]

    @property
    def outsider(self) -> str:
        """The class of the innermost module in progress if it is no part of the model; otherwise empty."""
        return self._thread().outsiders[-1]

    def of_node(self, sequence_nr: int, thread: int | None = None) -> str | None:
        """The module in which the node with this number was created, by this thread or the one with that number."""
        calls = self._thread(thread)
        return calls.at[bisect.bisect_right(calls.numbers, sequence_nr) - 1]

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the calls of modules in this block."""
        call: Any = nn.Module.__call__

        def followed_call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            calls = self._thread()
            name = self._names.get(module, calls.stack[-1])
            calls.outsiders.append("" if module in self._names else type(module).__name__)
            _move(calls, [*calls.stack, name])
            try:
                return call(module, *args, **kwargs)
            finally:
                calls.outsiders.pop()
                _move(calls, calls.stack[:-1])

        nn.Module.__call__ = followed_call  # type: ignore[method-assign] # as torch.fx does: it covers every module and all hooks
        try:
            yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    def _thread(self, thread: int | None = None) -> _Thread:
        return self._threads.setdefault(threading.get_ident() if thread is None else thread, _Thread())


def _move(calls: _Thread, stack: list[str | None]) -> None:
    calls.stack = stack
    calls.numbers.append(next_sequence_nr())
    calls.at.append(stack[-1])
