"""Live bytes and formats of matrix products, seen at the dispatcher.

On a CPU torch counts no memory. Here each storage that an operation returns counts from its first tensor until it is freed, which is
what `torch.cuda.max_memory_allocated` reports on a GPU, without the allocator's rounding.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["FORMATS", "Operators"]

FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear", "mv", "addmv", "dot", "convolution")
_PRODUCT_PARTS = ("convolution", "linear", "attention", "_thnn", "lstm", "gru", "rnn")


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live bytes and notes the formats of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.products: set[str] = set()
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def reset_peak(self) -> None:
        """Start the peak again from what is live now."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _PRODUCTS or any(part in name for part in _PRODUCT_PARTS):
            self.products |= {
                FORMATS[leaf.dtype]
                for leaf in tree_leaves((args, result))
                if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.dtype in FORMATS
            }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors have none
            return
        if storage in self._known:
            return
        num_bytes = storage.nbytes()
        self._known.add(storage)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, num_bytes)

    def _free(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes
