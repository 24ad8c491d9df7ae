"""The workspace of each convolution of well-known networks, measured, next to what `halfstep.planning` predicts.

    python benchmarks/bench_plan_convs.py measure FILE.json      on a GPU, with torchvision if it is installed
    python benchmarks/bench_plan_convs.py check FILE.json        anywhere: compare the rules with FILE

A dispatch mode wraps every convolution, forward and backward, and reads the allocator's requested bytes: the peak during
the call, less what was allocated before and less the results. The same call occurs in many networks; each is recorded
once, with the first network that has it.

The file is compact. `shapes` describes a convolution apart from its batch, `kinds` how it was called (the pass, the dtype,
the layouts of its tensors and which results were requested or whether it has a bias), `origins` the networks; a row is an
index into each of the three, the batch and the bytes of the workspace.
"""

from __future__ import annotations

import gc
import json
import sys
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
    """Records every convolution with the workspace of its kernel."""

    def __init__(self, calls: dict[str, tuple[int, int, str]], origin: str) -> None:
        super().__init__()
        self.calls, self.origin = calls, origin

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in {FORWARD, BACKWARD}:
            return func(*args, **(kwargs or {}))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        out = func(*args, **(kwargs or {}))
        torch.cuda.synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        results = sum(t.nbytes for t in pytree.tree_leaves(out) if isinstance(t, Tensor))
        key = json.dumps(_described(func, args))
        self.calls.setdefault(key, (args[0 if func is FORWARD else 1].shape[0], peak - results, self.origin))
        return out


def _described(func: Any, args: Any) -> list[Any]:
    """Shape, kind and batch of a call; the shape of a gradient follows from the others."""
    forward = func is FORWARD
    x, w = args[:2] if forward else args[1:3]
    rest = args[3:9] if forward else args[4:10]
    tensors = args[:2] if forward else args[:3]
    requested = args[2] is not None if forward else list(args[10])
    shape = [list(x.shape[1:]), list(w.shape), *(list(a) if isinstance(a, (list, tuple)) else a for a in rest)]
    layouts = ["channels_last" if _is_last(t) else "contiguous" for t in tensors]
    dtype = str(x.dtype).removeprefix("torch.")
    return [shape, ["forward" if forward else "backward", dtype, layouts, requested], x.shape[0]]


def _is_last(tensor: Tensor) -> bool:
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return last and not tensor.is_contiguous()


def _called(shape: list[Any], kind: list[Any], batch: int) -> tuple[Any, list[Any], Any]:
    """Operation, arguments and result of a described call, on the meta device."""
    (image, weight, *rest), (name, dtype, layouts, requested) = shape, kind
    of = {"dtype": getattr(torch, dtype), "device": "meta"}
    x, w = torch.empty([batch, *image], **of), torch.empty(weight, **of)
    out = FORWARD(x, w, None, *rest)
    tensors = [t.to(memory_format=getattr(torch, f"{f}_format" if f == "contiguous" else f))
               for t, f in zip([x, w] if name == "forward" else [out, x, w], layouts, strict=True)]  # fmt: skip
    if name == "forward":
        return FORWARD, [*tensors, torch.empty(out.shape[1], **of) if requested else None, *rest], out
    args = [*tensors, [out.shape[1] if requested[2] else 0], *rest, requested]
    return BACKWARD, args, BACKWARD(*args)


def _write(path: Path, calls: dict[str, tuple[int, int, str]]) -> None:
    shapes, kinds, origins = {}, {}, {}
    rows = []
    for key, (batch, scratch, origin) in calls.items():
        shape, kind, _ = json.loads(key)
        indices = [
            table.setdefault(json.dumps(v), len(table))
            for table, v in ((shapes, shape), (kinds, kind), (origins, origin))
        ]
        rows.append([*indices, batch, scratch])
    head = json.dumps({"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()})[:-1]
    tables = (f'"{name}": [\n{",".join(chr(10) + v for v in values).strip()}\n]' for name, values in (
        ("shapes", shapes), ("kinds", kinds), ("origins", origins), ("rows", [json.dumps(r, separators=(",", ":")) for r in rows]),
    ))  # fmt: skip
    path.write_text(f"{head},\n" + ",\n".join(tables) + "}\n", encoding="utf-8")


def networks() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[int, ...], int]]:
    """Name, constructor, batch sizes, image size."""
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
    calls: dict[str, tuple[int, int, str]] = {}
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
                        _Watch(calls, f"{name} {batch}"),
                        torch.autocast("cuda", dtype, enabled=dtype is not torch.float32),
                    ):
                        out = model(x)
                        out.float().square().mean().backward()
                except torch.OutOfMemoryError:
                    print(name, batch, dtype, "out of memory", flush=True)
                model.zero_grad(set_to_none=True)
                out = None
        del model
        print(name, len(calls), flush=True)
        _write(path, calls)


def check(path: Path) -> None:
    """Compare the rules with every row, worst last."""
    record = json.loads(path.read_text(encoding="utf-8"))
    worst, counted = [], Counter()
    for shape, kind, origin, batch, scratch in record["rows"]:
        func, args, out = _called(record["shapes"][shape], record["kinds"][kind], batch)
        off = (scratch_bytes(func, args, {}, out) or 0) - scratch
        tensors = [t for t in pytree.tree_leaves((args, out)) if isinstance(t, Tensor)]
        size = sum(t.nbytes for t in tensors)
        counted["all"] += 1
        counted["within 1 MiB or 2 %"] += abs(off) <= max(1 << 20, 0.02 * max(scratch + off, scratch))
        worst.append((abs(off) / size, off / 2**20, scratch / 2**20, shape, kind, batch, origin))
    print(dict(counted))
    for share, off, workspace, shape, kind, batch, origin in sorted(worst)[-60:]:
        print(
            f"{share:6.2f} of its size: off by {off:9.1f} of {workspace:9.1f} MiB, batch {batch} {record['shapes'][shape]} "
            f"{record['kinds'][kind]} ({record['origins'][origin]})"
        )


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in {"measure", "check"}:
        sys.exit(__doc__)
    {"measure": measure, "check": check}[sys.argv[1]](Path(sys.argv[2]))
