"""The one place where TF32 is switched and read.

How it works. Torch has two records of the same setting. The older one is two flags, `allow_tf32` of cuBLAS
(which is also `set_float32_matmul_precision`) and of cuDNN. The newer one, `fp32_precision`, is a tree: matmul,
conv and rnn, each of which falls back to its back end's value and then to the process-wide one. Writing
the newer record does not write the older, and torch then raises when the older is read ("mix of the legacy and new
APIs"). That matters because `torch.compile` reads the older one.

Measured on torch 2.11 and 2.13: the older *setters* write both records, so after them every getter works.
They have one gap: switching cuDNN off leaves "none", which a process-wide "tf32" fills in again. So Halfstep
writes the older record first, then the newer one where that is still needed, and writes nothing that is already
set. mkldnn, which `set_float32_matmul_precision` also changes (and with it the results on CPU), is left alone.

One limit of restoring: in torch 2.13 the default for cuDNN is a "tf32" that a process-wide setting overrides.
Once anything is written there, torch cannot return to it; the restored "tf32" is an explicit one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from halfstep.events import log_warning
from halfstep.hardware.torch_build import require_torch

__all__ = ["Tf32State", "set_tf32", "tf32", "tf32_state"]


@dataclass(frozen=True)
class Tf32State:
    """Whether fp32 operations on CUDA devices run in TF32, and which other settings affect or hide that."""

    matmul: bool
    conv: bool
    rnn: bool
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = ", ".join(f"{name} {'on' if getattr(self, name) else 'off'}" for name in ("matmul", "conv", "rnn"))
        return "; ".join((f"TF32: {words}", *self.notes))


@dataclass(frozen=True)
class _Record:
    """Both records as they are now; the `own` values restore this state when written."""

    matmul: str
    conv: str
    rnn: str
    own: tuple[str, str, str]  # matmul, conv, rnn; "none" where the value is inherited from the back end
    precision: str  # the older matmul record: highest, high or medium
    cudnn: bool  # the older cuDNN record
    mkldnn: str  # because restoring "medium" changes it


def set_tf32(enabled: bool) -> Tf32State:
    """Switch TF32 on or off for CUDA matrix products, convolutions and RNNs, and return the state that results.

    The switch is process-wide. It has no effect on a CPU or on GPUs without TF32.
    """
    torch = require_torch("set_tf32()")
    before = _unreadable(torch)
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    with _quiet():
        if _value(lambda: matmul.allow_tf32) is not enabled:
            matmul.allow_tf32 = enabled
        if _value(lambda: cudnn.allow_tf32) is not enabled:
            cudnn.allow_tf32 = enabled
    if _has_tree(torch):
        for node in (matmul, cudnn.conv, cudnn.rnn):
            if (node.fp32_precision == "tf32") is not enabled:
                node.fp32_precision = "tf32" if enabled else "ieee"
    state = tf32_state()
    for note in _unreadable(torch):
        if note not in before:
            log_warning(f"TF32 is {'on' if enabled else 'off'} as requested, but {note}")
    return state


def tf32_state() -> Tf32State:
    """Whether TF32 is on; no mix of torch's two APIs can make this raise."""
    torch = require_torch("tf32_state()")
    notes = _unreadable(torch)
    override = os.environ.get("NVIDIA_TF32_OVERRIDE")
    if override is not None:
        notes = (
            *notes,
            f"NVIDIA_TF32_OVERRIDE={override} is set, and NVIDIA's libraries use it instead of torch's switches.",
        )
    if _has_tree(torch):
        nodes = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
        matmul, conv, rnn = (node.fp32_precision == "tf32" for node in nodes)
    else:
        matmul, conv = bool(torch.backends.cuda.matmul.allow_tf32), bool(torch.backends.cudnn.allow_tf32)
        rnn = conv
    return Tf32State(matmul, conv, rnn, notes)


@contextmanager
def tf32(enabled: bool) -> Iterator[Tf32State]:
    """Switch TF32 for a `with` block and restore both of torch's records afterwards."""
    torch = require_torch("tf32()")
    before = _record(torch)
    try:
        yield set_tf32(enabled)
    finally:
        _restore(torch, before)


def _has_tree(torch: Any) -> bool:
    """Whether this torch has the newer record (2.9 and later)."""
    return hasattr(torch.backends.cuda.matmul, "fp32_precision")


def _value(read: Callable[[], Any]) -> Any:
    """The value of a getter of the older record, or None if torch raises because the records disagree."""
    try:
        with _quiet():
            return read()
    except RuntimeError:
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress deprecation warnings of the older API: the user did not make the call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings")
        yield


def _unreadable(torch: Any) -> tuple[str, ...]:
    """One sentence for each getter of the older record that raises now."""
    readers: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("torch.backends.cuda.matmul.allow_tf32", lambda: torch.backends.cuda.matmul.allow_tf32),
        ("torch.backends.cudnn.allow_tf32", lambda: torch.backends.cudnn.allow_tf32),
        ("torch.get_float32_matmul_precision()", torch.get_float32_matmul_precision),
    )
    return tuple(
        f"reading {name} raises: this process set precision both by fp32_precision or "
        "set_float32_matmul_precision('medium') and by the older flags, and they disagree. Use one of the two ways."
        for name, read in readers
        if _value(read) is None
    )


def _record(torch: Any) -> _Record:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    allowed, cudnn_allowed = _value(lambda: matmul.allow_tf32), _value(lambda: cudnn.allow_tf32)
    if not _has_tree(torch):
        return _Record("", "", "", ("", "", ""), torch.get_float32_matmul_precision(), bool(cudnn_allowed), "")
    values = [str(node.fp32_precision) for node in (matmul, cudnn.conv, cudnn.rnn)]
    # Torch reports a node's value, not whether it is the node's own. A value equal to the back end's counts as inherited.
    own = ["none" if value == cudnn.fp32_precision else value for value in values]
    precision = _value(torch.get_float32_matmul_precision)
    if precision is None:
        # The older flag is hidden, but torch raises only if it contradicts the newer record.
        older = values[0] != "tf32" if allowed is None else allowed
        precision = "high" if older else "highest"
    if cudnn_allowed is None:
        cudnn_allowed = values[1] != "tf32"
    mkldnn = str(torch.backends.mkldnn.matmul.fp32_precision)
    return _Record(values[0], values[1], values[2], (own[0], own[1], own[2]), precision, cudnn_allowed, mkldnn)


def _restore(torch: Any, before: _Record) -> None:
    now = _record(torch)
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    with _quiet():
        if (now.precision, now.matmul) != (before.precision, before.matmul):
            if before.precision == "medium":
                torch.set_float32_matmul_precision("medium")
                if before.mkldnn:
                    torch.backends.mkldnn.matmul.fp32_precision = before.mkldnn
            else:
                matmul.allow_tf32 = before.precision == "high"
            if before.matmul:
                matmul.fp32_precision = before.own[0]
        if (now.cudnn, now.conv, now.rnn) != (before.cudnn, before.conv, before.rnn):
            cudnn.allow_tf32 = before.cudnn
            if before.matmul:
                cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = before.own[1], before.own[2]
