"""What single operations allocate on a GPU besides their inputs and outputs: the data behind `halfstep.planning`.

    python benchmarks/bench_plan_parts.py FILE.json

For each operation: the bytes requested from torch's allocator that are still allocated after its forward pass, at the peak
of the forward pass and at the peak of the backward pass, less what was allocated before; and the bytes of its output.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CUDA = torch.device("cuda")


def _now(kind: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"]


def probe(build: Callable[[], tuple[Callable[[], Tensor], Any]]) -> dict[str, Any]:
    """The memory of one operation; `build` returns the call and anything else worth recording."""
    gc.collect()
    torch.cuda.empty_cache()
    call, note = build()
    out = call()  # once for lazily created workspaces and plans
    out.backward(torch.ones_like(out))
    del out
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = _now("current")
    out = call()
    torch.cuda.synchronize()
    forward, saved = _now("peak") - before, _now("current") - before
    size = out.numel() * out.element_size()
    grad = torch.ones_like(out)
    torch.cuda.reset_peak_memory_stats()
    before_backward = _now("current")
    out.backward(grad)
    torch.cuda.synchronize()
    backward = _now("peak") - before_backward
    row = {"note": note, "out": size, "saved": saved, "forward_peak": forward, "backward_peak": backward}
    return row | {"after": _now("current") - before_backward}


def _leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=CUDA, dtype=dtype).requires_grad_()


def attention(dtype: str, b: int, h: int, s: int, d: int, kind: str) -> Callable[[], tuple[Callable[[], Tensor], Any]]:
    """Attention of one shape and dtype; `kind` is plain, causal, dropout, or the dtype of a mask."""

    def build() -> tuple[Callable[[], Tensor], Any]:
        kind_of = DTYPES[dtype]
        qkv = [_leaf(b, s, h, d, dtype=kind_of) for _ in range(3)]
        mask = None
        if kind == "bool":
            mask = torch.ones(b, 1, s, s, device=CUDA, dtype=torch.bool).tril()
        elif kind == "float":
            mask = torch.zeros(b, 1, s, s, device=CUDA, dtype=kind_of)
        settings = {"is_causal": kind == "causal", "dropout_p": 0.1 if kind == "dropout" else 0.0}
        q, k, v = (t.transpose(1, 2) for t in qkv)
        choice = int(torch._fused_sdp_choice(q, k, v, mask, **settings))  # noqa: SLF001 - no public function returns it

        def call() -> Tensor:
            return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in qkv), mask, **settings)

        return call, {"backend": choice}

    return build


def layer(make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: str, *, last: bool = False) -> Any:
    """A module in one dtype on an input of `shape`; `last` for channels-last."""

    def build() -> tuple[Callable[[], Tensor], Any]:
        module = make().to(CUDA, DTYPES[dtype])
        x = _leaf(*shape, dtype=DTYPES[dtype])
        if last:
            module = module.to(memory_format=torch.channels_last)
            x = x.detach().to(memory_format=torch.channels_last).requires_grad_()

        def call() -> Tensor:
            out = module(x)
            return out[0] if isinstance(out, tuple) else out

        return call, {"weights": sum(p.numel() * p.element_size() for p in module.parameters())}

    return build


def amp_lstm(dtype: str) -> Any:
    """An fp32 LSTM under autocast."""

    def build() -> tuple[Callable[[], Tensor], Any]:
        module = nn.LSTM(512, 512, 2, batch_first=True).to(CUDA)
        x = _leaf(32, 128, 512, dtype=torch.float32)

        def call() -> Tensor:
            with torch.autocast("cuda", DTYPES[dtype]):
                return module(x)[0]

        return call, {"weights": sum(p.numel() * 4 for p in module.parameters())}

    return build


def function(call: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: str) -> Any:
    """A function of one tensor."""

    def build() -> tuple[Callable[[], Tensor], Any]:
        x = _leaf(*shape, dtype=DTYPES[dtype])
        return lambda: call(x), {}

    return build


def cases() -> Iterator[tuple[str, Any]]:
    """Every probe with its name."""
    for dtype in DTYPES:
        for args in (
            (512, 512, 1, False),
            (512, 512, 2, False),
            (512, 512, 2, True),
            (256, 512, 3, False),
            (256, 512, 3, True),
        ):
            yield f"lstm {dtype} {args} 32x128", layer(lambda a=args: _lstm(*a), (32, 128, args[0]), dtype)
        yield (
            f"lstm {dtype} (512, 512, 1, False) 64x256",
            layer(lambda: _lstm(512, 512, 1, False), (64, 256, 512), dtype),
        )
        yield (
            f"gru {dtype} (512, 512, 2, False) 32x128",
            layer(lambda: nn.GRU(512, 512, 2, batch_first=True), (32, 128, 512), dtype),
        )
        yield (
            f"rnn_tanh {dtype} (512, 512, 2, False) 32x128",
            layer(lambda: nn.RNN(512, 512, 2, batch_first=True), (32, 128, 512), dtype),
        )
    for dtype in ("bf16", "fp16"):
        yield f"lstm autocast {dtype} (512, 512, 2, False) 32x128", amp_lstm(dtype)
    shapes = [
        (8, 16, 197, 64),
        (4, 12, 1024, 64),
        (4, 16, 257, 80),
        (4, 16, 1024, 128),
        (4, 8, 512, 36),
        (2, 8, 1024, 256),
    ]
    for dtype in ("bf16", "fp32"):
        for b, h, s, d in shapes:
            for kind in ("plain", "causal", "bool", "float", "dropout"):
                if kind in {"plain", "causal"} or (d == 64 and s == 1024):
                    yield f"attention {dtype} {b},{h},{s},{d} {kind}", attention(dtype, b, h, s, d, kind)
    labels = torch.randint(50257, (4096,), device=CUDA)
    pixels = torch.randint(21, (8, 256, 256), device=CUDA)
    ids = torch.randint(50257, (16, 1024), device=CUDA)
    for dtype in ("bf16", "fp32"):
        yield f"groupnorm {dtype}", layer(lambda: nn.GroupNorm(8, 64), (8, 64, 256, 256), dtype)
        yield f"layernorm {dtype}", layer(lambda: nn.LayerNorm(1024), (64, 197, 1024), dtype)
        yield f"rmsnorm {dtype}", layer(lambda: nn.RMSNorm(1024), (64, 197, 1024), dtype)
        yield f"dropout {dtype}", layer(lambda: nn.Dropout(0.1), (64, 197, 1024), dtype)
        yield f"gelu {dtype}", layer(nn.GELU, (64, 197, 1024), dtype)
        yield f"maxpool {dtype}", layer(lambda: nn.MaxPool2d(3, 2, 1), (32, 64, 112, 112), dtype)
        yield f"linear {dtype}", layer(lambda: nn.Linear(1024, 4096), (64, 197, 1024), dtype)
        yield f"cross_entropy {dtype}", function(lambda x: F.cross_entropy(x, labels), (4096, 50257), dtype)
        yield (
            f"log_softmax fp32 {dtype}",
            function(lambda x: x.log_softmax(-1, dtype=torch.float32), (4096, 50257), dtype),
        )
        yield f"cross_entropy2d {dtype}", function(lambda x: F.cross_entropy(x, pixels), (8, 21, 256, 256), dtype)
        yield f"embedding {dtype}", layer(lambda: _Embed(ids), (1,), dtype)
        yield f"batchnorm {dtype}", layer(lambda: nn.BatchNorm2d(256), (32, 256, 56, 56), dtype)
        yield (
            f"batchnorm {dtype} channels_last",
            layer(lambda: nn.BatchNorm2d(256), (32, 256, 56, 56), dtype, last=True),
        )
    convs = {
        "3x3 unet 16": (lambda: nn.Conv2d(64, 64, 3, padding=1), (16, 64, 256, 256)),
        "3x3 unet128 16": (lambda: nn.Conv2d(128, 64, 3, padding=1), (16, 128, 256, 256)),
        "3x3 unet 4": (lambda: nn.Conv2d(64, 64, 3, padding=1), (4, 64, 256, 256)),
        "3x3 unet128 4": (lambda: nn.Conv2d(128, 64, 3, padding=1), (4, 128, 256, 256)),
        "3x3 3-64 16": (lambda: nn.Conv2d(3, 64, 3, padding=1), (16, 3, 256, 256)),
        "3x3 64-128 16": (lambda: nn.Conv2d(64, 128, 3, padding=1), (16, 64, 128, 128)),
        "7x7s2": (lambda: nn.Conv2d(3, 64, 7, 2, 3), (128, 3, 224, 224)),
        "3x3 64": (lambda: nn.Conv2d(64, 64, 3, padding=1), (128, 64, 56, 56)),
        "3x3s2 128": (lambda: nn.Conv2d(128, 128, 3, 2, 1), (64, 128, 56, 56)),
        "3x3 256": (lambda: nn.Conv2d(256, 256, 3, padding=1), (64, 256, 14, 14)),
        "3x3 512": (lambda: nn.Conv2d(512, 512, 3, padding=1), (64, 512, 7, 7)),
        "1x1 64-256": (lambda: nn.Conv2d(64, 256, 1), (64, 64, 56, 56)),
        "1x1 1024-256": (lambda: nn.Conv2d(1024, 256, 1), (64, 1024, 14, 14)),
        "16x16 patches": (lambda: nn.Conv2d(3, 768, 16, 16), (64, 3, 224, 224)),
        "transpose 2x2": (lambda: nn.ConvTranspose2d(128, 64, 2, 2), (16, 128, 128, 128)),
        "2x2s2": (lambda: nn.Conv2d(96, 192, 2, 2), (32, 96, 56, 56)),
        "1d 3": (lambda: nn.Conv1d(256, 256, 3, padding=1), (32, 256, 1024)),
        "3d 3x3x3": (lambda: nn.Conv3d(32, 32, 3, padding=1), (2, 32, 32, 64, 64)),
        "depthwise 7x7": (lambda: nn.Conv2d(96, 96, 7, padding=3, groups=96), (32, 96, 56, 56)),
        "grouped 3x3": (lambda: nn.Conv2d(256, 256, 3, padding=1, groups=32), (32, 256, 28, 28)),
    }
    for dtype in ("fp32", "bf16"):
        for name, (make, shape) in convs.items():
            yield f"conv {dtype} {name}", layer(make, shape, dtype)
            if name in {"3x3 64", "3x3 unet 4", "1x1 64-256"}:
                yield f"conv {dtype} {name} channels_last", layer(make, shape, dtype, last=True)


def _lstm(width: int, hidden: int, layers: int, both: bool) -> nn.Module:
    return nn.LSTM(width, hidden, layers, batch_first=True, bidirectional=both, dropout=0.2 if layers == 3 else 0)


class _Embed(nn.Module):
    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids, self.embed = ids, nn.Embedding(50257, 768)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(self.ids) + 0 * x


def main(path: Path) -> None:
    """Run every probe."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    rows: dict[str, Any] = {}
    for name, build in cases():
        try:
            rows[name] = probe(build)
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
        path.write_text(json.dumps(rows), encoding="utf-8")
    rows["cudnn"] = torch.backends.cudnn.version()
    path.write_text(json.dumps(rows), encoding="utf-8")
    print(len(rows), "probes", sum("error" in v for v in rows.values() if isinstance(v, dict)), "errors")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
