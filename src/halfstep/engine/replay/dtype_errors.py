"""Errors about two dtypes, with the module and both dtypes named.

torch raises "expected scalar type BFloat16 but found Float" from deep inside an operation. The frames of the traceback still
have the module whose forward ran and the tensors it was called with, so the note costs nothing until there is an error.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["dtype_errors_named"]

_DTYPE = r"(?:c10::)?(?:BFloat16|Half|Float|Double|float|double|Float8_\w+)"
_MISMATCH = re.compile(
    rf"expected (?:scalar type|m1 and m2|dtype|.*data type).*{_DTYPE}|same dtype|{_DTYPE}.*but (?:found|got).*{_DTYPE}|"
    rf"[Ii]nput type \(.*should be the same|mixed dtype|[Ee]xpected .*to have (?:the same )?dtype|but found {_DTYPE}"
)


@contextlib.contextmanager
def dtype_errors_named(model: nn.Module) -> Iterator[None]:
    """Add a note that names the module and the dtypes to an error about dtypes that leaves this block."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if _MISMATCH.search(str(error)):
            note = _note(error.__traceback__, model)
            if note and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


def _note(traceback: TracebackType | None, model: nn.Module) -> str:
    """A sentence about the innermost module in a traceback; empty if no module is in it."""
    innermost: nn.Module | None = None
    passed: dict[str, Tensor] = {}
    while traceback is not None:
        values = traceback.tb_frame.f_locals
        module = values.get("self")
        if isinstance(module, nn.Module):
            if module is not innermost:
                innermost, passed = module, {}
            passed.update(_floats(values))
        traceback = traceback.tb_next
    if innermost is None:
        return ""
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    name = names.get(id(innermost)) or "the model itself"
    own = {key: value for key, value in innermost.named_parameters(recurse=False) if value.is_floating_point()}
    lists = [", ".join(f"{key} {_short(value.dtype)}" for key, value in group.items()) for group in (own, passed)]
    parts = [f"{label} {text}" for label, text in zip(("its parameters:", "its inputs:"), lists, strict=True) if text]
    place = (
        f"{type(innermost).__name__} {name!r}"
        if id(innermost) in names and names[id(innermost)]
        else type(innermost).__name__
    )
    return (
        f"halfstep: the dtypes differ in {place} ({name}): {'; '.join(parts) or 'no tensors of its own'}. Cast the input to the dtype "
        "of the parameters, remove a .float() / .half() / .to(dtype) in the model, or list the module in the policy's fp32 modules."
    )


def _floats(values: dict[str, Any]) -> dict[str, Tensor]:
    """The floating-point tensors among the arguments and variables of a frame, those in *args included."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    args = values.get("args")
    if isinstance(args, tuple):
        tensors |= {f"argument {index}": value for index, value in enumerate(args) if isinstance(value, Tensor)}
    return {name: t for name, t in tensors.items() if t.is_floating_point() and not isinstance(t, nn.Parameter)}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
