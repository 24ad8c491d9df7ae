"""The census of a GPU: the time of its kernels, read from a profiler trace.

On a GPU an operator returns before its work is done, so timing calls is meaningless. The profiler records the time of
each kernel and, by a shared id, the operator that launched it, with the types and shapes of its inputs. Kernels without a
recorded operator (common with `torch.compile` and Triton) are classified by their name.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from halfstep.comparison.census import Entry
from halfstep.watching.operators import CASTS, is_product

__all__ = ["read_trace", "trace_step"]

_TYPES = {
    "float": "fp32", "double": "fp64", "c10::BFloat16": "bf16", "c10::Half": "fp16",
    "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8",
}  # fmt: skip
_WIDTH = ("fp8", "fp16", "bf16", "fp32", "fp64")
# Parts of kernel names, in order of precedence; cuBLAS and CUTLASS spell formats in several ways.
_NAMES = (
    ("bf16", re.compile(r"bf16|bfloat16|nv_bfloat", re.IGNORECASE)),
    ("tf32", re.compile(r"tf32", re.IGNORECASE)),
    ("fp16", re.compile(r"fp16|half|f16f16|h16|hgemm|s16816", re.IGNORECASE)),
    ("fp8", re.compile(r"e4m3|e5m2|fp8", re.IGNORECASE)),
    ("fp32", re.compile(r"fp32|float|sgemm|f32f32", re.IGNORECASE)),
)
_COPY = re.compile(r"copy_kernel|direct_copy|_to_copy", re.IGNORECASE)


def trace_step(step: Callable[[], Any]) -> list[Entry]:
    """Run one step under the profiler and return its kernels."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True, acc_events=True
    ) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return list(read_trace(trace))


def read_trace(trace: dict[str, Any]) -> Iterator[Entry]:
    """The kernels of a profiler trace, each with its operator and format."""
    events = [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]
    launchers = {
        event["args"]["External id"]: event
        for event in events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    for event in events:
        if event.get("cat") != "kernel":
            continue
        args = event.get("args", {})
        launcher = launchers.get(args.get("External id"), {})
        name = str(launcher.get("name", "")) or _plain(str(event.get("name", "")))
        inputs = launcher.get("args", {})
        yield Entry(
            name.removeprefix("aten::"),
            _format(name, inputs, str(event.get("name", ""))),
            float(event.get("dur", 0)) / 1e6,
            _dimensions(name, inputs),
        )


def _format(op: str, inputs: dict[str, Any], kernel: str) -> str:
    by_name = next((form for form, pattern in _NAMES if pattern.search(kernel)), "other")
    types = {_TYPES[t] for t in inputs.get("Input type", ()) if t in _TYPES}
    if op in {"aten::copy_", "aten::_to_copy"} or (not types and _COPY.search(kernel)):
        return CASTS if len(types) > 1 else max(types, default=by_name)
    widest = max(types, key=_WIDTH.index, default=None)
    if widest == "fp32" and by_name == "tf32" and is_product(op):
        return "tf32"
    return widest or by_name


def _dimensions(op: str, inputs: dict[str, Any]) -> tuple[int, ...]:
    if op not in {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}:
        return ()
    matrices = [dims for dims in inputs.get("Input Dims", ()) if isinstance(dims, list) and len(dims) >= 2]
    if len(matrices) < 2:
        return ()
    left, right = matrices[-2:]
    return (int(left[-2]), int(left[-1]), int(right[-1]))


def _plain(kernel: str) -> str:
    """A kernel's name without its template arguments."""
    return re.sub(r"^void\s+", "", kernel).partition("<")[0].partition("(")[0][:60] or "kernel"
