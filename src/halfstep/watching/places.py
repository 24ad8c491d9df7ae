"""Which module's code is running: a stack of modules, also by number of the autograd node.

Every autograd node has a sequence number in the order of creation, so the module in which a node was created, and with it
the module to which a step of the backward pass belongs, follows from the numbers at which modules were entered and left.
The call of every module is observed, hooks of the user's included, so that what a hook does counts as its module's.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["Places", "next_sequence_nr"]


def next_sequence_nr() -> int:
    """The number that the next autograd node of this thread will have."""
    return int(torch._C._autograd._get_sequence_nr())  # noqa: SLF001 - no public name


class Places:
    """The names of the modules whose calls are in progress; None outside the model, "" in the model's own forward."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            self._names.setdefault(module, name)
        self._stack: list[str | None] = [None]
        self._numbers: list[int] = [0]
        self._at: list[str | None] = [None]

    @property
    def current(self) -> str | None:
        """The innermost module in progress."""
        return self._stack[-1]

    def of_node(self, sequence_nr: int) -> str | None:
        """The module in which the node with this number was created."""
        return self._at[bisect.bisect_right(self._numbers, sequence_nr) - 1]

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the calls of modules in this block."""
        call: Any = nn.Module.__call__

        def followed_call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            self._move(self._names.get(module, type(module).__name__), push=True)
            try:
                return call(module, *args, **kwargs)
            finally:
                self._move(None, push=False)

        nn.Module.__call__ = followed_call  # type: ignore[method-assign] # as torch.fx does: it covers every module and all hooks
        try:
            yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    def _move(self, name: str | None, *, push: bool) -> None:
        if push:
            self._stack.append(name)
        else:
            self._stack.pop()
        self._numbers.append(next_sequence_nr())
        self._at.append(self._stack[-1])
