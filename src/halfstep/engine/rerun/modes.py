"""Two dispatch modes for a block whose forward runs twice: one records results, the other returns them.

The second run stops at the last tensor that backward needs, so results recorded after it would never be read: they are
dropped when the first run ends. (Of a transformer block that is the last product, whose sum with the residual is the next
block's input.) A result that was changed in place after it was recorded is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.engine.rerun.expensive import draws_random_numbers, is_saved

__all__ = ["Record", "Reusing", "Saving"]


@dataclass
class _Entry:
    """The results of one operation in the first run."""

    operation: Any
    results: Any
    versions: list[int]
    random_state: tuple[torch.device, Tensor] | None


@dataclass
class Record:
    """What the first run of a block leaves for the second."""

    entries: list[_Entry] = field(default_factory=list)
    num_needed: int = 0


class Saving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the results of expensive operations, and how many of them precede the last tensor that backward needs."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions inside a block run as they are."""
        return True

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __enter__(self) -> Any:
        # Those of torch's checkpoint, which was entered just before; ours count and pass on.
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001

        record = self._record  # not self, which has the hooks: a cycle would free the results only when gc runs

        def count(tensor: Tensor) -> Any:
            record.num_needed = len(record.entries)
            return pack(tensor)

        self._hooks = torch.autograd.graph.saved_tensors_hooks(count, unpack)
        self._hooks.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(*exc)
        del self._record.entries[self._record.num_needed :]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if is_saved(func):
            state = _random_state(args) if draws_random_numbers(func, args, kwargs) else None
            versions = [t._version for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]  # noqa: SLF001
            self._record.entries.append(_Entry(func, _detached(results), versions, state))
        return results


class Reusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns the recorded results instead of running their operations."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions inside a block run as they are."""
        return True

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record, self._index = record, 0

    def __enter__(self) -> Any:
        self._index = 0  # of this backward; with retain_graph there may be another
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_saved(func):
            return func(*args, **(kwargs or {}))
        index, self._index = self._index, self._index + 1
        if index >= len(self._record.entries):
            return func(*args, **(kwargs or {}))
        entry = self._record.entries[index]
        if entry.operation is not func:
            raise RuntimeError(
                f"recompute: the second run of a block called {func} where the first called {entry.operation}. A forward must do the "
                "same both times; it may depend on neither a Python counter nor a random number of Python's."
            )
        versions = [t._version for t in pytree.tree_leaves(entry.results) if isinstance(t, Tensor)]  # noqa: SLF001
        if versions != entry.versions:  # changed in place since: the value is gone
            return func(*args, **(kwargs or {}))
        if entry.random_state is not None:
            _set_random_state(*entry.random_state)
        return _detached(entry.results)


def _detached(results: Any) -> Any:
    """Aliases that autograd knows nothing of, which share their version counters with the results."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: SLF001
        if isinstance(results, Tensor):
            return results.detach()
        return pytree.tree_map_only(Tensor, lambda t: t.detach(), results)


def _random_state(args: Any) -> tuple[torch.device, Tensor]:
    device = next(a.device for a in pytree.tree_leaves(args) if isinstance(a, Tensor))
    return device, torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
