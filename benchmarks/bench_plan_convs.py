"""What cuDNN takes for each convolution of well-known networks, beside what `halfstep.planning` predicts for it.

    python benchmarks/bench_plan_convs.py measure FILE.json      on a GPU, with torchvision where it is installed
    python benchmarks/bench_plan_convs.py check FILE.json        anywhere: the rules against what FILE holds
    python benchmarks/bench_plan_convs.py ask FILE.json [SECONDS]    on a GPU: cuDNN's choice for many shapes, none of them run

A dispatch mode stands around every convolution, forwards and backwards, and reads the allocator's requested bytes: the
peak during the call, less what was there before and less the results. The same shapes come back in many networks; each
is kept once.

`ask` puts the question that torch puts to cuDNN before a convolution, through cuDNN's graph interface, and takes the
first answer that torch would take. It costs about a millisecond and no memory, so that tens of thousands of shapes can be
asked about, and what it returns is the workspace itself.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
from plan_models import UNet, convnext_tiny, resnet50

from halfstep.planning.workspaces import scratch_bytes

_aten = torch.ops.aten
FORWARD, BACKWARD = _aten.convolution.default, _aten.convolution_backward.default


class _Watch(TorchDispatchMode):
    """Writes down every convolution with the bytes its kernel took on the side."""

    def __init__(self, found: dict[str, dict[str, Any]], origin: str) -> None:
        super().__init__()
        self.found, self.origin = found, origin

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in {FORWARD, BACKWARD}:
            return func(*args, **(kwargs or {}))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        out = func(*args, **(kwargs or {}))
        torch.cuda.synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        results = sum(t.numel() * t.element_size() for t in pytree.tree_leaves(out) if isinstance(t, Tensor))
        row = {"pass": "forward" if func is FORWARD else "backward", "args": [_plain(a) for a in args]}
        key = json.dumps(row)
        self.found.setdefault(key, {**row, "scratch": peak - results, "results": results, "origin": self.origin})
        return out


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
        kind = "channels_last" if last and not value.is_contiguous() else "contiguous"
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch."), "format": kind}
    return list(value) if isinstance(value, (list, tuple)) else value


def networks() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[int, ...], int]]:
    """Name, maker, batch sizes, image size."""
    for width in (32, 64, 96):
        yield f"unet{width}", lambda w=width: UNet(w), (1, 2, 4, 8, 12, 16, 24, 32), 256
    yield "unet64 at 512", UNet, (2, 8), 512
    yield "unet64 at 128", UNet, (16, 64), 128
    yield "resnet50", resnet50, (8, 32, 64, 128, 256), 224
    yield "convnext_tiny", convnext_tiny, (32, 96), 224
    try:
        import torchvision
    except ImportError:
        return
    for name in ("resnet18", "resnext50_32x4d", "wide_resnet50_2", "vgg16_bn", "densenet121", "mobilenet_v3_large",
                 "efficientnet_b0", "regnet_y_1_6gf", "googlenet", "inception_v3", "squeezenet1_1", "alexnet"):  # fmt: skip
        options = {"aux_logits": False, "init_weights": False} if name in {"googlenet", "inception_v3"} else {}
        make = getattr(torchvision.models, name)
        yield (
            name,
            lambda m=make, o=options: m(weights=None, **o),
            (16, 64, 128),
            299 if name == "inception_v3" else 224,
        )


def measure(path: Path) -> None:
    """One forward and backward pass of every network, batch and dtype."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    found: dict[str, dict[str, Any]] = {}
    for name, make, batches, size in networks():
        with torch.device("cuda"):
            model = make()
        for batch in batches:
            for dtype, last in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
                gc.collect()
                torch.cuda.empty_cache()
                form = torch.channels_last if last else torch.contiguous_format
                model.to(memory_format=form)
                x = torch.randn(batch, 3, size, size, device="cuda").to(memory_format=form)
                try:
                    with (
                        _Watch(found, f"{name} {batch}"),
                        torch.autocast("cuda", dtype, enabled=dtype is not torch.float32),
                    ):
                        out = model(x)
                        out.float().square().mean().backward()
                except torch.OutOfMemoryError:
                    print(name, batch, dtype, "out of memory", flush=True)
                model.zero_grad(set_to_none=True)
                out = None
        del model
        print(name, len(found), flush=True)
        head = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
        path.write_text(json.dumps({**head, "rows": list(found.values())}), encoding="utf-8")


def check(path: Path) -> None:
    """The rules against every row, worst last."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    worst, counted = [], Counter()
    for row in rows:
        args = [_meta(a) for a in row["args"]]
        func = FORWARD if row["pass"] == "forward" else BACKWARD
        said = scratch_bytes(func, args, {}, func(*args)) or 0
        off = said - row["scratch"]
        size = row["results"] + sum(a.numel() * a.element_size() for a in args if isinstance(a, Tensor))
        counted["all"] += 1
        counted["within 1 MiB or 2 %"] += abs(off) <= max(1 << 20, 0.02 * max(said, row["scratch"]))
        worst.append((abs(off) / size, off / 2**20, row["scratch"] / 2**20, row))
    print(dict(counted))
    for share, off, seen, row in sorted(worst, key=lambda w: w[0])[-60:]:
        tensors = " ".join(f"{a['shape']}{a['dtype'][0]}{a['format'][1]}" for a in row["args"] if isinstance(a, dict))
        rest = [a for a in row["args"] if not isinstance(a, dict)]
        print(
            f"{share:6.2f} of its size: off {off:9.1f} MiB, took {seen:9.1f}  {row['pass']} {tensors} {rest} ({row['origin']})"
        )


def _meta(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    made = torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]), device="meta")
    return made.to(memory_format=torch.channels_last) if value["format"] == "channels_last" else made


# --- asking cuDNN ---------------------------------------------------------------------------------------------------

_TENSOR_CORE, _DOWN_CONVERT = (
    0,
    1,
)  # numerical notes; torch drops such engines for fp32 without TF32, and the second always
# Operation: its descriptor, then its attributes for the convolution, filter, image, result, alpha and beta.
_OPERATIONS = {
    "forward": (10, 702, 703, 704, 705, 700, 701),
    "input": (12, 708, 709, 710, 711, 706, 707),
    "filter": (11, 714, 715, 716, 717, 712, 713),
}
_DTYPES = {"float32": 0, "float16": 2, "bfloat16": 9}


class _Cudnn:
    """As much of cuDNN's graph interface (cudnn_graph.h of 9.x) as a question about one convolution needs."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.library = ctypes.CDLL("libcudnn.so.9")
        self.handle = ctypes.c_void_p()
        self._do("cudnnCreate", ctypes.byref(self.handle))
        self.made: list[ctypes.c_void_p] = []

    def _do(self, name: str, *args: Any) -> None:
        status = getattr(self.library, name)(*args)
        if status:
            raise RuntimeError(f"{name} answered {status}.")

    def new(self, kind: int, *attributes: tuple[int, int, Any]) -> ctypes.c_void_p:
        """A finished descriptor; attributes are (name, type, value or values)."""
        made = ctypes.c_void_p()
        self._do("cudnnBackendCreateDescriptor", kind, ctypes.byref(made))
        self.made.append(made)
        for name, of, value in attributes:
            values = value if isinstance(value, (list, tuple)) else [value]
            item = {0: ctypes.c_void_p, 3: ctypes.c_int64, 4: ctypes.c_float, 15: ctypes.c_void_p}.get(of, ctypes.c_int)
            array = (item * len(values))(*values)
            self._do("cudnnBackendSetAttribute", made, name, of, ctypes.c_int64(len(values)), array)
        if attributes:
            self._do("cudnnBackendFinalize", made)
        return made

    def read(self, descriptor: Any, name: int, of: int, array: Any) -> int:
        """Fill an array; how many there are."""
        found = ctypes.c_int64()
        size = 0 if array is None else len(array)
        self._do("cudnnBackendGetAttribute", descriptor, name, of, ctypes.c_int64(size), ctypes.byref(found), array)
        return found.value

    def workspace(
        self, operation: str, shapes: dict[str, Any], dtype: str, *, tf32: bool, last: bool = False
    ) -> int | None:
        """The workspace of the first engine that torch would take."""
        try:
            return self._workspace(operation, shapes, dtype, tf32=tf32, last=last)
        finally:
            for descriptor in self.made:
                self.library.cudnnBackendDestroyDescriptor(descriptor)
            self.made.clear()

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
            seen = set(notes[: self.read(ctypes.c_void_p(engine[0]), 1303, 11, notes)])
            if _DOWN_CONVERT in seen or (dtype == "float32" and not tf32 and _TENSOR_CORE in seen):
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


def _questions() -> Iterator[tuple[str, bool, int, int, int, int, int, int]]:
    """Dtype, whether TF32 may be used, batch, channels in and out, image, filter, stride; first a few that were measured, then at random."""
    for (channels, image), batch in itertools.product(
        ((256, 64), (512, 32), (768, 32), (192, 128), (384, 64)), (1, 2, 4, 8, 12, 16, 24, 32)
    ):
        yield "float32", False, batch, channels, channels, image, 3, 1
    rng = random.Random(0)
    while True:
        inside = rng.choice(_CHANNELS)
        outside = rng.choices((inside, 2 * inside, inside // 2, rng.choice(_CHANNELS)), (8, 3, 3, 2))[0]
        side, stride = rng.choices(((3, 1), (1, 1), (5, 1), (3, 2), (1, 2)), (16, 2, 1, 1, 1))[0]
        dtype, tf32 = rng.choices((("float32", False), ("float32", True), ("bfloat16", False)), (16, 2, 1))[0]
        yield dtype, tf32, rng.choice(_BATCHES), inside, outside, rng.choice(_IMAGES), side, stride


def ask(path: Path, seconds: float = 50) -> None:
    """Ask about shapes until the time is over."""
    cudnn = _Cudnn()
    rows, start = [], time.perf_counter()
    for dtype, tf32, batch, inside, outside, image, side, stride in _questions():
        if time.perf_counter() - start > seconds:
            break
        result = (image + 2 * (side // 2) - side) // stride + 1
        shapes = {
            "x": [batch, inside, image, image], "w": [outside, inside, side, side], "y": [batch, outside, result, result],
            "stride": [stride] * 2, "padding": [side // 2] * 2,
        }  # fmt: skip
        said = []
        for operation in _OPERATIONS:
            try:
                said.append(cudnn.workspace(operation, shapes, dtype, tf32=tf32))
            except RuntimeError as error:
                said.append(str(error))
        rows.append([dtype, tf32, batch, inside, outside, image, side, stride, *said])
    head = {
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "columns": "dtype tf32 n c k image side stride forward input filter",
    }
    path.write_text(json.dumps({**head, "rows": rows}), encoding="utf-8")
    print(len(rows), "shapes in", round(time.perf_counter() - start, 1), "s")


if __name__ == "__main__":
    {"measure": measure, "check": check, "ask": ask}[sys.argv[1]](Path(sys.argv[2]), *map(float, sys.argv[3:]))
