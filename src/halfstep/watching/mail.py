"""Autopsies of other ranks on their way to rank 0, which reports for the run.

A step is computed again on the ranks whose own gradients overflowed, each alone, so rank 0 may not be among them. Ranks leave
their autopsies in the store of the process group, where rank 0 looks at later steps: a message between ranks would make all
of them wait at this moment, and outcomes of steps do not arrive on all ranks at the same point of the program.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from typing import Any

import torch.distributed as dist

from halfstep.backends.context import RunContext
from halfstep.watching.autopsy import Autopsy

__all__ = ["AutopsyMail"]

_counter = itertools.count()  # ranks build their watches in the same order
_SECONDS_TO_CLOSE = 5.0  # that the end of a run waits for an autopsy of its last steps
_POLL_SECONDS = 0.05


class AutopsyMail:
    """The mailbox of one rank; with one process it is always empty."""

    def __init__(self, context: RunContext) -> None:
        self._rank = context.rank
        self._expected: set[tuple[int, int]] = set()  # step and rank
        self._store: Any = None
        if context.world_size > 1 and dist.is_initialized():
            first = dist.get_process_group_ranks(context.process_group or dist.group.WORLD)[0]
            default = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - it has no public name
            prefix = f"halfstep/autopsies/{first}/{next(_counter)}"
            self._store = dist.PrefixStore(prefix, default)  # type: ignore[attr-defined]

    def post(self, autopsy: Autopsy) -> None:
        """Leave an autopsy of this rank for rank 0."""
        if self._store is not None and self._rank != 0:
            with contextlib.suppress(RuntimeError):  # the store may be gone with another rank
                self._store.set(f"{autopsy.step}/{self._rank}", json.dumps(autopsy.as_dict()))

    def expect(self, step: int, ranks: tuple[int, ...]) -> None:
        """These ranks examine a step."""
        if self._store is not None and self._rank == 0:
            self._expected |= {(step, rank) for rank in ranks if rank != 0}

    @property
    def is_expecting(self) -> bool:
        """Whether an autopsy is on its way."""
        return bool(self._expected)

    def collect(self, *, wait: bool = False) -> list[Autopsy]:
        """The autopsies that have arrived; with `wait`, some seconds for all that are expected."""
        end = time.monotonic() + (_SECONDS_TO_CLOSE if wait else 0.0)
        arrived: list[Autopsy] = []
        while self._expected:
            for step, rank in sorted(self._expected):
                text = self._take(f"{step}/{rank}")
                if text is not None:
                    self._expected.discard((step, rank))
                    arrived.append(Autopsy.from_dict(json.loads(text)))
            if not self._expected or time.monotonic() >= end:
                break
            time.sleep(_POLL_SECONDS)
        return arrived

    def _take(self, key: str) -> bytes | None:
        try:
            if not self._store.check([key]):
                return None
            text: bytes = self._store.get(key)
            self._store.delete_key(key)
        except RuntimeError:  # the store is gone: nothing arrives any more
            self._expected.clear()
            return None
        return text
