"""Memory: what autocast makes smaller, and what it does not."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.engine.engine import Engine
from halfstep.learning.experiment import Outcome, Reading

__all__ = ["activation_memory", "bytes_per_parameter", "saved_bytes"]


def saved_bytes(model: nn.Module, x: Tensor, dtype: torch.dtype | None, *, grad: bool = True) -> int:
    """Bytes of the tensors that a forward pass saves for backward, without the parameters themselves."""
    own = {p.data_ptr() for p in model.parameters()} | {x.data_ptr()}
    storages: dict[int, int] = {}
    alive = []  # storages must not be freed and reused while they are counted

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    region = contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
    with torch.set_grad_enabled(grad), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), region:
        model(x)
    return sum(storages.values())


class _Block(nn.Module):
    """Attention and an MLP, as in a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.out(torch.softmax(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5, dim=-1) @ value)
        result: Tensor = x + self.mlp(self.norms[1](x))
        return result


def activation_memory() -> Outcome:
    """What the forward pass of a small transformer block saves for backward, in fp32 and under autocast."""
    model, x = _Block(32), torch.randn(8, 32, 32)
    full, mixed = saved_bytes(model, x, None), saved_bytes(model, x, torch.bfloat16)
    share = mixed / full
    readings = (
        Reading("saved for backward, fp32", full, f"{full / 1024:.0f} KiB"),
        Reading("saved for backward, autocast bf16", mixed, f"{mixed / 1024:.0f} KiB"),
        Reading("autocast / fp32", share, f"{share:.2f}"),
    )
    return Outcome(
        readings,
        0.4 < share < 0.8,
        "Activations are most of the memory at large batches, and autocast stores most of them in 2 bytes instead of 4. Not quite "
        "half: some stay in fp32, and the 16-bit copies of the weights are saved too.",
    )


def bytes_per_parameter() -> Outcome:
    """Weights, gradients, masters and Adam's moments after one step, read from the tensors."""
    sizes = {}
    for precision in ("fp32", "bf16", "bf16-lean", "bf16-lean,states=8bit"):
        model = nn.Linear(64, 64, bias=False)
        engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), precision)
        with engine.forward():
            loss = F.mse_loss(model(torch.randn(2, 64)).float(), torch.zeros(2, 64))
        engine.backward(loss)
        engine.step()
        sizes[precision] = engine.truth().bytes_per_parameter
    readings = tuple(Reading(f"bytes per parameter, {name}", size, f"{size:.2f}") for name, size in sizes.items())
    return Outcome(
        readings,
        sizes["fp32"] == sizes["bf16"] == 16 and sizes["bf16-lean"] == 14 and sizes["bf16-lean,states=8bit"] < 8.5,
        "4 bytes each for the weight, its gradient and Adam's two moments: autocast changes none of them, so it does not help a model whose state "
        "fills the GPU. Lean presets store 16-bit weights and gradients with an exact master.",
    )
