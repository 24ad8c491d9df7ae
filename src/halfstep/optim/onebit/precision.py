"""Where the compressed optimizers may run: convergence is verified in fp16 only.

The papers' runs and DeepSpeed's are fp16, with a dynamic loss scale, and DeepSpeed warned in every other precision. Here another
precision is rejected unless `allow_unverified=True`; then rank 0 logs it once, and the truth table shows it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from halfstep.errors import SettingError
from halfstep.precision.formats import format_name

__all__ = ["check_compute", "unverified_precision"]

_COMPUTE = ("fp16", "bf16", "fp32")


def check_compute(compute: str | None) -> None:
    """Raise for another format than those that a loop computes in."""
    if compute is not None and compute not in _COMPUTE:
        raise SettingError(
            f"compute={compute!r} is not a format that a loop computes in; write one of {', '.join(_COMPUTE)}, or leave it out for the "
            "dtype of the weights."
        )


def unverified_precision(params: Iterable[Tensor], compute: str | None, name: str, *, allowed: bool) -> str:
    """What is unverified about training these parameters, or "" if nothing is; raises unless it is allowed."""
    formats = {format_name(p.dtype) for p in params}
    if compute == "fp16" or "fp16" in formats:
        formats -= {"fp16", "fp32"}  # fp16 autocast over fp32 weights, or fp16 weights with some layers left in fp32
    if compute in {"bf16", "fp32"}:
        formats = {compute}
    if not formats:
        return ""
    place = f"{' and '.join(sorted(formats))} {'compute' if compute else 'weights'}"
    if not allowed:
        raise SettingError(
            f"{name} with {place}: its convergence is verified in fp16 only. Train in fp16 (fp16 weights, or compute='fp16' where "
            "autocast computes in fp16 over fp32 weights and the loss is scaled), use AdamW, or pass allow_unverified=True."
        )
    return f"convergence of {name} is unverified with {place}"
