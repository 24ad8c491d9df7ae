"""1-bit Adam in a loop of your own: gradients stay local, and after the freeze step one bit per element is sent.

Run it with `torchrun --nproc-per-node 2 examples/onebit_adam.py`, or with `python` for one rank.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import halfstep

for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")

torch.manual_seed(0)  # the same weights on every rank; the model is not wrapped
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
teacher = torch.randn(32, 4)
optimizer = halfstep.optim.OneBitAdam(model.parameters(), lr=3e-3, betas=(0.9, 0.99), freeze_step=20, compute="fp16")
scaler = halfstep.GradScaler("cpu", init_scale=2.0**12)

torch.manual_seed(1 + dist.get_rank())  # from here on each rank has its own data
sent = []
for _ in range(80):
    x = torch.randn(64, 32)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), (x @ teacher).argmax(-1))
    scaler.scale(loss).backward()  # no DDP: the gradients are those of this rank (with DDP: inside model.no_sync())
    before = optimizer.wire.sent_bytes
    scaler.step(optimizer)  # averages densely or compressed; an overflow on any rank skips it on all
    scaler.update()
    optimizer.zero_grad()
    sent.append(optimizer.wire.sent_bytes - before)

# Every rank has the same weights, bit for bit.
weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
reference = weights.clone()
dist.broadcast(reference, 0)
assert torch.equal(weights, reference)
if dist.get_rank() == 0:
    print(
        f"loss {loss.item():.3f}; bytes sent by rank 0: {sent[10]:,} in a dense step, {sent[-1]:,} in a compressed one"
    )
    print(optimizer.truth_rows()["communication"])
dist.destroy_process_group()
