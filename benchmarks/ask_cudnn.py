"""Which algorithm cuDNN would choose for a convolution, queried from cuDNN for thousands of shapes without running them.

    python benchmarks/ask_cudnn.py ask FILE.npz [SECONDS]        on a GPU
    python benchmarks/ask_cudnn.py check FILE.npz                anywhere: compare the rules of `halfstep.planning` with FILE
    python benchmarks/ask_cudnn.py reduce FILE.npz SMALL.npz     anywhere: only what tests/planning/test_convolutions.py reads

How it works. Before a convolution torch builds a graph of one operation, queries cuDNN's heuristics for engines in the
order of their expected time, drops those that its settings forbid (tensor cores for fp32 without TF32), and uses the first
one for which it can build a plan. This program does the same through cuDNN's graph interface and records the workspace of
that plan, which takes about a millisecond and no memory. For convolutions that were also measured (bench_plan_convs.py),
the two agree to the byte.

The columns of FILE are dtype, whether TF32 may be used, batch, input and output channels, side of the image, side of the
filter, stride, the bytes for the output, the input's gradient and the filter's gradient (-1 if no engine fits), and whether
the row is held out when the rules are fitted: a random 40 % of the (channels, image) groups of fp32 3 x 3 filters of
stride 1.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfstep.planning.workspaces import scratch_bytes

# Numerical notes of an engine; torch drops the first for fp32 without TF32, and the second always.
_TENSOR_CORE, _DOWN_CONVERT = 0, 1
# Operation: its descriptor, then its attributes for the convolution, filter, image, output, alpha and beta.
_OPERATIONS = {
    "forward": (10, 702, 703, 704, 705, 700, 701),
    "input": (12, 708, 709, 710, 711, 706, 707),
    "filter": (11, 714, 715, 716, 717, 712, 713),
}
_DTYPES = {"float32": 0, "float16": 2, "bfloat16": 9}
_COLUMNS = ("dtype", "tf32", "n", "c", "k", "image", "side", "stride", "forward", "input", "filter", "held_out")
_TESTED = ("tf32", "n", "c", "k", "image", "side", "stride", "forward", "held_out")
# Bytes: more than any GPU has, and tensors so large that the kernels change.
_LARGEST, _LARGEST_TENSORS = 140 << 30, 6 << 30
_aten = torch.ops.aten


class _Cudnn:
    """The part of cuDNN's graph interface (cudnn_graph.h of 9.x) that a query about one convolution needs."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.library = ctypes.CDLL("libcudnn.so.9")
        self.handle = ctypes.c_void_p()
        self._do("cudnnCreate", ctypes.byref(self.handle))
        self.descriptors: list[ctypes.c_void_p] = []

    def _do(self, name: str, *args: Any) -> None:
        status = getattr(self.library, name)(*args)
        if status:
            raise RuntimeError(f"{name} returned status {status}.")

    def new(self, kind: int, *attributes: tuple[int, int, Any]) -> ctypes.c_void_p:
        """A finished descriptor; attributes are (name, type, value or values)."""
        descriptor = ctypes.c_void_p()
        self._do("cudnnBackendCreateDescriptor", kind, ctypes.byref(descriptor))
        self.descriptors.append(descriptor)
        for name, of, value in attributes:
            values = value if isinstance(value, (list, tuple)) else [value]
            item = {0: ctypes.c_void_p, 3: ctypes.c_int64, 4: ctypes.c_float, 15: ctypes.c_void_p}.get(of, ctypes.c_int)
            array = (item * len(values))(*values)
            self._do("cudnnBackendSetAttribute", descriptor, name, of, ctypes.c_int64(len(values)), array)
        if attributes:
            self._do("cudnnBackendFinalize", descriptor)
        return descriptor

    def read(self, descriptor: Any, name: int, of: int, array: Any) -> int:
        """Fill an array; returns the number of values."""
        count = ctypes.c_int64()
        size = 0 if array is None else len(array)
        self._do("cudnnBackendGetAttribute", descriptor, name, of, ctypes.c_int64(size), ctypes.byref(count), array)
        return count.value

    def workspace(
        self, operation: str, shapes: dict[str, Any], dtype: str, *, tf32: bool, last: bool = False
    ) -> int | None:
        """The workspace of the first engine that torch would use."""
        try:
            return self._workspace(operation, shapes, dtype, tf32=tf32, last=last)
        finally:
            for descriptor in self.descriptors:
                self.library.cudnnBackendDestroyDescriptor(descriptor)
            self.descriptors.clear()

    def _workspace(self, operation: str, shapes: dict[str, Any], dtype: str, *, tf32: bool, last: bool) -> int | None:
        tensors = [
            self.new(17, (901, 1, _DTYPES[dtype]), (902, 3, shape), (903, 3, _strides(shape, last=last)),
                     (906, 3, ord(name)), (900, 3, 16)).value
            for name, shape in ((n, shapes[n]) for n in "wxy")
        ]  # fmt: skip
        spread = len(shapes["stride"])
        conv = self.new(
            1, (100, 1, 0), (101, 7, 1), (106, 3, spread), (105, 3, shapes["padding"]), (104, 3, shapes["padding"]),
            (103, 3, shapes["stride"]), (102, 3, [1] * spread),
        )  # fmt: skip
        kind, of_conv, of_w, of_x, of_y, alpha, beta = _OPERATIONS[operation]
        parts = [(name, 15, tensor) for name, tensor in zip((of_w, of_x, of_y), tensors, strict=True)]
        done = self.new(kind, (of_conv, 15, conv.value), *parts, (alpha, 4, 1.0), (beta, 4, 0.0))
        graph = self.new(15, (800, 0, self.handle.value), (801, 15, done.value))
        heuristics = self.new(4, (201, 15, graph.value), (200, 8, 0))
        count = self.read(heuristics, 202, 15, None)
        configs = (ctypes.c_void_p * count)(*[self.new(3).value for _ in range(count)])
        for index in range(self.read(heuristics, 202, 15, configs)):
            config = ctypes.c_void_p(configs[index])
            engine = (ctypes.c_void_p * 1)(self.new(2).value)
            self.read(config, 300, 15, engine)
            notes = (ctypes.c_int * 10)()
            flags = set(notes[: self.read(ctypes.c_void_p(engine[0]), 1303, 11, notes)])
            if _DOWN_CONVERT in flags or (dtype == "float32" and not tf32 and _TENSOR_CORE in flags):
                continue
            try:
                plan = self.new(5, (400, 0, self.handle.value), (401, 15, config.value))
            except RuntimeError:
                continue
            size = (ctypes.c_int64 * 1)()
            self.read(plan, 402, 3, size)
            return size[0]
        return None


def _strides(shape: list[int], *, last: bool) -> list[int]:
    order = [0, *range(2, len(shape)), 1] if last else range(len(shape))
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    return strides


# fmt: off
_CHANNELS = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 960, 1024, 1280, 1920, 2048)
_IMAGES = (7, 8, 13, 14, 16, 17, 20, 24, 28, 32, 35, 40, 48, 56, 60, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 512)
_BATCHES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 192, 256)
# fmt: on


def _queries() -> Iterator[tuple[str, bool, int, int, int, int, int, int]]:
    """Dtype, whether TF32 may be used, batch, channels in and out, image, filter, stride: a few that were measured, then random ones."""
    for (channels, image), batch in itertools.product(
        ((256, 64), (512, 32), (768, 32), (192, 128), (384, 64)), (1, 2, 4, 8, 12, 16, 24, 32)
    ):
        yield "float32", False, batch, channels, channels, image, 3, 1
    rng = random.Random(0)
    while True:
        c = rng.choice(_CHANNELS)
        k = rng.choices((c, 2 * c, c // 2, rng.choice(_CHANNELS)), (8, 3, 3, 2))[0]
        side, stride = rng.choices(((3, 1), (1, 1), (5, 1), (3, 2), (1, 2)), (16, 2, 1, 1, 1))[0]
        dtype, tf32 = rng.choices((("float32", False), ("float32", True), ("bfloat16", False)), (16, 2, 1))[0]
        yield dtype, tf32, rng.choice(_BATCHES), c, k, rng.choice(_IMAGES), side, stride


def ask(path: Path, seconds: float = 50) -> None:
    """Query shapes until the time is up."""
    cudnn = _Cudnn()
    rows: dict[tuple[Any, ...], list[Any]] = {}
    start = time.perf_counter()
    for dtype, tf32, n, c, k, image, side, stride in _queries():
        if time.perf_counter() - start > seconds:
            break
        output = _output(image, side, stride)
        shapes = {
            "x": [n, c, image, image], "w": [k, c, side, side], "y": [n, k, output, output],
            "stride": [stride] * 2, "padding": [side // 2] * 2,
        }  # fmt: skip
        sizes = []
        for operation in _OPERATIONS:
            try:
                size = cudnn.workspace(operation, shapes, dtype, tf32=tf32)
            except RuntimeError as error:
                print(operation, shapes, dtype, error)
                size = None
            sizes.append(-1 if size is None else size)
        rows[dtype, tf32, n, c, k, image, side, stride] = sizes
    groups = {(c, k, image) for _, _, _, c, k, image, _, _ in rows}
    rng = random.Random(1)
    held_out = {group for group in sorted(groups) if rng.random() >= 0.6}
    fitted = ("float32", False, 3, 1)
    table = [
        (*query, *sizes, (query[0], query[1], *query[6:]) == fitted and query[3:6] in held_out)
        for query, sizes in rows.items()
    ]
    np.savez_compressed(path, **dict(zip(_COLUMNS, map(np.array, zip(*table, strict=True)), strict=True)))
    versions = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    print(len(rows), "shapes in", round(time.perf_counter() - start, 1), "s;", versions)


def reduce(path: Path, small: Path) -> None:
    """Write only the rows and columns that the tests read."""
    columns = dict(np.load(path))
    rows = columns["tf32"] | columns["held_out"]
    types = {"forward": np.int64, "tf32": bool, "held_out": bool}
    np.savez_compressed(small, **{name: columns[name][rows].astype(types.get(name, np.int16)) for name in _TESTED})


def _output(image: int, side: int, stride: int) -> int:
    return (image + 2 * (side // 2) - side) // stride + 1


def check(path: Path) -> None:
    """Compare the rules with every row of a realistic size, by dtype, filter and pass."""
    sums: dict[str, list[float]] = {}
    columns = np.load(path)
    for row in zip(*(columns[name].tolist() for name in _COLUMNS), strict=True):
        dtype, tf32, n, c, k, image, side, stride, *sizes, held_out = row
        realistic = min(c, k) >= 32 and max(c, k) <= 1024 and image <= 256 and n <= 128
        if min(sizes) < 0 or not realistic:
            continue
        of = {"dtype": getattr(torch, dtype), "device": "meta"}
        output = _output(image, side, stride)
        x, w = torch.empty(n, c, image, image, **of), torch.empty(k, c, side, side, **of)
        y = torch.empty(n, k, output, output, **of)
        if max(sizes) > _LARGEST or sum(t.nbytes for t in (x, w, y)) > _LARGEST_TENSORS:
            continue
        rest = ([stride] * 2, [side // 2] * 2, [1, 1], False, [0, 0], 1)
        forward = scratch_bytes(_aten.convolution.default, (x, w, None, *rest), {}, y, tf32=tf32)
        args = (y, x, w, None, *rest, [True, True, False])
        backward = scratch_bytes(_aten.convolution_backward.default, args, {}, None, tf32=tf32)
        both = max(sizes[1] - w.nbytes, sizes[2], 0)
        name = f"{'tf32' if tf32 else dtype} {side} x {side} stride {stride}"
        for part, predicted, true in ((" forward", forward, sizes[0]), (" backward", backward, both)):
            total = sums.setdefault(name + part + (" (held out)" if held_out else ""), [0] * 4)
            off = abs((predicted or 0) - true)
            for index, value in enumerate((1, off <= max(1 << 20, 0.02 * true), off / 2**30, true / 2**30)):
                total[index] += value
    for name, (count, right, wrong, all_of) in sorted(sums.items()):
        print(
            f"{name:45} {count:5} rows, within 1 MiB or 2 %: {right / count:6.1%}, wrong by {wrong:7.1f} of {all_of:7.1f} GiB"
        )


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in {"ask", "check", "reduce"}:
        sys.exit(__doc__)
    if sys.argv[1] == "reduce":
        reduce(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        {"ask": ask, "check": check}[sys.argv[1]](Path(sys.argv[2]), *map(float, sys.argv[3:]))
