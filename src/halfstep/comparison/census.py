"""Did anything run in 16 bits? A count of the operators of one training step, by the format they computed in.

A precision is a wish; autocast decides operator by operator. The census watches one step at torch's dispatcher and notes
for every operator the format of its floating-point inputs, its time, and for matrix products their shape. Views and
allocations are left out: they compute nothing. Watching costs time in each operator, so the shares are of the watched
step, and the step times of the comparison come from other, unwatched steps.

The result is a plain dictionary, because it goes into the run file:

    source      "dispatch" (a CPU: each operator timed) or "profiler" (a GPU: its kernels' own time)
    rows        [{op, format, calls, seconds, why}], the longest first
    share       {format: share of the time}, with "casts" for conversions between formats
    products    {format: share of the time of matrix products and convolutions}
    misaligned  [{op, shape, calls}] 16-bit products with a side that is no multiple of 8, which tensor cores want
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

from halfstep.precision.formats import format_name

__all__ = ["ALIGNED", "CASTS", "DispatchCensus", "Entry", "is_product", "why_fp32", "write_census"]

ALIGNED = 8  # tensor cores take 16-bit matrices in tiles of 8; NVIDIA's guide asks for multiples of it in every side
MOST_ROWS = 40
CASTS = "casts"
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "convolution", "attention", "einsum", "mkldnn_rnn")
_REDUCTIONS = ("softmax", "nll_loss", "cross_entropy", "mse_loss", "loss", "sum", "norm", "logsumexp", "mean", "prod")
_STEP = ("_fused_", "_foreach_", "adam", "sgd", "lerp", "addcmul", "addcdiv", "halfstep")
_SIXTEEN = ("bf16", "fp16")


@dataclass(frozen=True)
class Entry:
    """One operator call as it was seen."""

    op: str
    format: str  # of its floating-point inputs, "casts" for a conversion, "other" for integers
    seconds: float
    shape: tuple[int, ...] = ()  # (rows, inner, columns) of a matrix product
    phase: str = ""


class DispatchCensus(TorchDispatchMode):
    """Watches every operator inside its block; `phase` names what is going on."""

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
            self.entries.append(Entry(name, _format(name, inputs, result), seconds, _sides(name, inputs), self.phase))
        return result


def _format(name: str, inputs: list[Tensor], result: Any) -> str:
    floats = [x for x in inputs if x.is_floating_point()]
    if name in {"_to_copy", "copy_", "copy"}:
        target = result if isinstance(result, Tensor) else None
        source = inputs[-1].dtype if inputs else None
        if target is not None and source is not None and target.dtype != source and target.is_floating_point():
            return CASTS
    if not floats:
        return "other"
    if is_product(name):  # attention also takes a few fp32 statistics; its largest input is what it multiplies
        return format_name(max(floats, key=lambda x: x.numel()).dtype)
    # The format of the widest input: a sum of a 16-bit and a 32-bit tensor computes in 32 bits.
    return format_name(max((x.dtype for x in floats), key=lambda dtype: dtype.itemsize))


def _sides(name: str, inputs: list[Tensor]) -> tuple[int, ...]:
    matrices = [x for x in inputs if x.dim() >= 2]
    if name not in {"mm", "addmm", "bmm", "baddbmm"} or len(matrices) < 2:
        return ()
    left, right = matrices[-2:]
    return (left.shape[-2], left.shape[-1], right.shape[-1])


def is_product(op: str) -> bool:
    """Whether an operator is a matrix product or convolution, which is where the arithmetic is."""
    plain = op.removeprefix("aten::")
    return any(part in plain for part in _PRODUCTS) and not plain.startswith("_foreach")


def why_fp32(op: str, phase: str = "") -> str:
    """Why an operator stayed in fp32, as far as its name and place tell."""
    plain = op.removeprefix("aten::")
    if phase == "step" or any(part in plain for part in _STEP):
        return "the update is made on fp32 values, or updates below half a unit of a 16-bit weight would vanish"
    if is_product(op):
        return "its inputs are fp32: it runs outside the 16-bit region, or this module is kept in fp32"
    if any(part in plain for part in _REDUCTIONS):
        return "losses, softmax, norms and long sums are kept in fp32: 16-bit sums stop growing"
    return "its inputs are fp32, and autocast casts only matrix products and convolutions"


def write_census(steps: Sequence[Sequence[Entry]], source: str, *, wanted: str) -> dict[str, Any]:
    """The dictionary described above, of one or several watched steps; `wanted` is the format that was asked for.

    An operator's time is the least of the watched steps: whatever else the machine did only ever adds to it.
    """
    seconds = _least([_times(entries) for entries in steps])
    calls: dict[tuple[str, str], int] = defaultdict(int)
    phases: dict[tuple[str, str], set[str]] = defaultdict(set)
    odd: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    for entry in steps[0]:
        key = (entry.op, entry.format)
        calls[key] += 1
        phases[key].add(entry.phase)
        if entry.format in _SIXTEEN and entry.shape and any(side % ALIGNED for side in entry.shape):
            odd[entry.op, entry.shape] += 1
    total = sum(seconds.values()) or 1.0
    products = {key: value for key, value in seconds.items() if is_product(key[0])}
    rows = [
        {
            "op": op,
            "format": form,
            "calls": calls[op, form],
            "seconds": value,
            "why": _why(op, form, phases[op, form], wanted),
        }
        for (op, form), value in sorted(seconds.items(), key=lambda item: -item[1])[:MOST_ROWS]
    ]
    return {
        "source": source,
        "rows": rows,
        "share": _shares(seconds, total),
        "products": _shares(products, sum(products.values()) or 1.0),
        "misaligned": [{"op": op, "shape": list(shape), "calls": count} for (op, shape), count in odd.items()],
    }


def _times(entries: Iterable[Entry]) -> dict[tuple[str, str], float]:
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for entry in entries:
        seconds[entry.op, entry.format] += entry.seconds
    return seconds


def _least(steps: Sequence[dict[tuple[str, str], float]]) -> dict[tuple[str, str], float]:
    return {key: min(step.get(key, math.inf) for step in steps) for key in steps[0]}


def _why(op: str, form: str, phases: set[str], wanted: str) -> str:
    if form != "fp32" or wanted not in _SIXTEEN:
        return ""
    return why_fp32(op, "step" if phases == {"step"} else "")


def _shares(seconds: dict[tuple[str, str], float], total: float) -> dict[str, float]:
    by_format: dict[str, float] = defaultdict(float)
    for (_, form), value in seconds.items():
        by_format[form] += value
    return {form: value / total for form, value in sorted(by_format.items(), key=lambda item: -item[1])}
