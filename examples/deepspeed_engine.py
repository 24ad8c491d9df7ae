"""The Engine on DeepSpeed's ZeRO: partitions by DeepSpeed; loss scale, clipping, skips and checkpoints by Halfstep.

Run it with `torchrun --nproc-per-node 2 examples/deepspeed_engine.py`, or with `python` for one rank. It needs
`pip install halfstep[deepspeed]`.
"""

import importlib.util
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.backends import deepspeed_backend

if importlib.util.find_spec("deepspeed") is None:
    print("DeepSpeed is not installed: pip install halfstep[deepspeed]")
    sys.exit(0)

for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")

torch.manual_seed(0)  # the same weights on every rank
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
zero = deepspeed_backend({"zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000}})
engine = halfstep.Engine(model, optimizer, "fp16-lean", accumulate=2, max_norm=1.0, scheduler=scheduler, backend=zero)

data = torch.Generator().manual_seed(dist.get_rank())  # other data on every rank
for _ in range(40):
    x = torch.randn(16, 8, generator=data)
    with engine.forward():
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
    engine.backward(loss)
    result = engine.step()

folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
path = engine.save(f"{folder[0]}/checkpoint")  # every rank calls it; the ranks gather, and rank 0 writes
engine.load(path)

if dist.get_rank() == 0:
    print(
        f"loss {loss.item():.3f}, gradient norm {result.grad_norm:.3f}, scale {result.scale:g} after {result.step} updates"
    )
    print(engine.truth())
engine.close()
dist.destroy_process_group()
