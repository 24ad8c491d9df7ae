"""The Engine on FSDP2: bf16 shards with exact masters, one reduction per window, and a checkpoint that one process can load.

Run it with `torchrun --nproc-per-node 2 examples/fsdp_engine.py`, or with `python` for one rank.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import halfstep

for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")


class Block(nn.Module):
    """A residual block; the Engine finds that it repeats and shards each."""

    def __init__(self, dim=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        """Return `x` and what the block adds to it."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


torch.manual_seed(0)  # the same weights on every rank
model = nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
engine = halfstep.Engine(model, optimizer, "bf16-lean", accumulate=2, max_norm=1.0, scheduler=scheduler, backend="fsdp")

data = torch.Generator().manual_seed(dist.get_rank())  # other data on every rank
for _ in range(40):
    x = torch.randn(16, 8, generator=data)
    with engine.forward():
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
    engine.backward(loss)
    result = engine.step()

folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
path = engine.save(f"{folder[0]}/checkpoint")  # rank 0 writes, the others wait
engine.load(path)

if dist.get_rank() == 0:
    print(
        f"loss {loss.item():.3f}, gradient norm {result.grad_norm:.3f} after {result.step} updates; saved {path.name}"
    )
    print(engine.truth())
engine.close()
dist.destroy_process_group()
