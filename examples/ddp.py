"""The Engine on several GPUs: the model is not wrapped, and gradients are averaged over ranks once per window.

Run it with `torchrun --nproc-per-node 2 examples/ddp.py`, or with `python` for one rank.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import halfstep

for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(name, value)
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).to(device)
teacher = torch.randn(16, 4).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = halfstep.Engine(model, optimizer, "bf16-lean", max_norm=1.0, accumulate=2, backend="ddp")

torch.manual_seed(dist.get_rank())  # from here on each rank has its own data
for step in range(40):
    x = torch.randn(32 + 16 * dist.get_rank(), 16, device=device)
    y = (x @ teacher).argmax(-1)
    with engine.forward():
        loss = F.cross_entropy(model(x), y)
    engine.backward(loss, weight=len(x))  # the update is the mean over all examples of all ranks
    engine.step(last=step == 39)

if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}, {engine.backend.reductions}")
    print(engine.truth())
engine.close()
dist.destroy_process_group()
