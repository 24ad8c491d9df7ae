"""Did anything run in 16 bits? A count of the operators of one training step, by the format they computed in.

A precision is a request; autocast decides operator by operator. The census records every operator of one step at torch's
dispatcher: the format of its floating-point inputs, its time, and for matrix products their shape. Views and allocations
are left out because they compute nothing. Recording slows down each operator, so the shares refer to the recorded step,
and the step times of the comparison come from other steps.

The result is a plain dictionary, because it is stored in the run file:

    source      "dispatch" (a CPU: each operator timed) or "profiler" (a GPU: the time of its kernels)
    rows        [{op, format, calls, seconds, why}], the longest first
    share       {format: share of the time}, with "casts" for conversions between formats
    products    {format: share of the time of matrix products and convolutions}
    misaligned  [{op, shape, calls}] 16-bit products with a dimension that is not a multiple of 8, as tensor cores need
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.watching.operators import is_product, operand_format

__all__ = ["ALIGNED", "DispatchCensus", "Entry", "why_fp32", "write_census"]

ALIGNED = 8  # tensor cores work on 16-bit tiles of 8; NVIDIA's guide asks for multiples of 8 in every dimension
MAX_ROWS = 40
_REDUCTIONS = ("softmax", "nll_loss", "cross_entropy", "mse_loss", "loss", "sum", "norm", "logsumexp", "mean", "prod")
_STEP = ("_fused_", "_foreach_", "adam", "sgd", "lerp", "addcmul", "addcdiv", "halfstep")
_SIXTEEN_BIT = ("bf16", "fp16")


@dataclass(frozen=True)
class Entry:
    """One recorded operator call."""

    op: str
    format: str  # of its floating-point inputs, "casts" for a conversion, "other" for integers
    seconds: float
    shape: tuple[int, ...] = ()  # (rows, inner, columns) of a matrix product
    phase: str = ""


class DispatchCensus(TorchDispatchMode):
    """Records every operator inside its block; `phase` is the current phase of the step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        self.phase = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - start
        name = str(func.overloadpacket).removeprefix("aten.")
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach", "_local_scalar")):
            inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.entries.append(
                Entry(name, operand_format(name, inputs, result), seconds, _dimensions(name, inputs), self.phase)
            )
        return result


def _dimensions(name: str, inputs: list[Tensor]) -> tuple[int, ...]:
    matrices = [x for x in inputs if x.dim() >= 2]
    if name not in {"mm", "addmm", "bmm", "baddbmm"} or len(matrices) < 2:
        return ()
    left, right = matrices[-2:]
    return (left.shape[-2], left.shape[-1], right.shape[-1])


def why_fp32(op: str, phase: str = "") -> str:
    """Why an operator ran in fp32, judged by its name and phase."""
    plain = op.removeprefix("aten::")
    if phase == "step" or any(part in plain for part in _STEP):
        return "the update is computed in fp32; in 16 bits, updates below half an ulp of the weight would be lost"
    if is_product(op):
        return "its inputs are fp32: it runs outside the 16-bit region, or keep_fp32 or compute_fp32 names its module"
    if any(part in plain for part in _REDUCTIONS):
        return "losses, softmax, norms and long sums stay in fp32, because 16-bit sums stop growing"
    return "its inputs are fp32, and autocast casts only matrix products and convolutions"


def write_census(steps: Sequence[Sequence[Entry]], source: str, *, requested: str) -> dict[str, Any]:
    """The dictionary described above, of one or several recorded steps; `requested` is the format of the row.

    An operator's time is the minimum over the recorded steps, because disturbances only ever add time.
    """
    seconds = _minimum([_times(entries) for entries in steps])
    calls: dict[tuple[str, str], int] = defaultdict(int)
    phases: dict[tuple[str, str], set[str]] = defaultdict(set)
    misaligned: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    for entry in steps[0]:
        key = (entry.op, entry.format)
        calls[key] += 1
        phases[key].add(entry.phase)
        if entry.format in _SIXTEEN_BIT and entry.shape and any(size % ALIGNED for size in entry.shape):
            misaligned[entry.op, entry.shape] += 1
    total = sum(seconds.values()) or 1.0
    products = {key: value for key, value in seconds.items() if is_product(key[0])}
    rows = [
        {
            "op": op,
            "format": form,
            "calls": calls[op, form],
            "seconds": value,
            "why": _why(op, form, phases[op, form], requested),
        }
        for (op, form), value in sorted(seconds.items(), key=lambda item: -item[1])[:MAX_ROWS]
    ]
    return {
        "source": source,
        "rows": rows,
        "share": _shares(seconds, total),
        "products": _shares(products, sum(products.values()) or 1.0),
        "misaligned": [{"op": op, "shape": list(shape), "calls": count} for (op, shape), count in misaligned.items()],
    }


def _times(entries: Iterable[Entry]) -> dict[tuple[str, str], float]:
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for entry in entries:
        seconds[entry.op, entry.format] += entry.seconds
    return seconds


def _minimum(steps: Sequence[dict[tuple[str, str], float]]) -> dict[tuple[str, str], float]:
    return {key: min(step.get(key, math.inf) for step in steps) for key in steps[0]}


def _why(op: str, form: str, phases: set[str], requested: str) -> str:
    if form != "fp32" or requested not in _SIXTEEN_BIT:
        return ""
    return why_fp32(op, "step" if phases == {"step"} else "")


def _shares(seconds: dict[tuple[str, str], float], total: float) -> dict[str, float]:
    by_format: dict[str, float] = defaultdict(float)
    for (_, form), value in seconds.items():
        by_format[form] += value
    return {form: value / total for form, value in sorted(by_format.items(), key=lambda item: -item[1])}
