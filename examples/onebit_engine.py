"""1-bit Adam in the Engine: the backend averages gradients up to the freeze step, and then only one bit per element is sent.

Run it with `torchrun --nproc-per-node 2 examples/onebit_engine.py`, or with `python` for one rank.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import halfstep

for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
teacher = torch.randn(32, 4)
optimizer = halfstep.optim.OneBitAdam(model.parameters(), lr=3e-3, betas=(0.9, 0.99), freeze_step=20)
engine = halfstep.Engine(model, optimizer, "fp16", backend="ddp", max_norm=1.0)

torch.manual_seed(1 + dist.get_rank())  # from here on each rank has its own data
for _ in range(60):
    x = torch.randn(64, 32)
    with engine.forward():
        loss = F.cross_entropy(model(x), (x @ teacher).argmax(-1))
    engine.backward(loss)
    engine.step()

if dist.get_rank() == 0:
    rows = dict(engine.truth().rows)
    print(f"loss {loss.item():.3f}; {engine.backend.reductions.count} dense reductions")
    print(
        *(f"{name}: {rows[name]}" for name in ("communication", "wire bytes", "clipping norm") if name in rows),
        sep="\n",
    )
engine.close()
dist.destroy_process_group()
