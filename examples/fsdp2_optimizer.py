"""Lean optimizers in your own FSDP2 loop: bf16 shards with exact masters and 8-bit moments, saved by torch itself.

Run it with `torchrun --nproc-per-node 2 examples/fsdp2_optimizer.py`, or with `python` for one rank.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import halfstep

for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).bfloat16()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model, halfstep.optim.AdamW(model.parameters(), lr=1e-2, master="split", states="8bit")


def train(model, optimizer, steps):
    g = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(64, 32, generator=g)
        loss = F.cross_entropy(model(x.bfloat16()).float(), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


model, optimizer = build()
losses = [train(model, optimizer, 20)]

# Save through torch.distributed.checkpoint and continue in new objects.
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
weights, states = get_state_dict(model, optimizer)
dcp.save({"weights": weights, "states": states}, checkpoint_id=folder[0])

model, optimizer = build()
weights, states = get_state_dict(model, optimizer)
dcp.load({"weights": weights, "states": states}, checkpoint_id=folder[0])
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
losses.append(train(model, optimizer, 20))

if dist.get_rank() == 0:
    print(f"loss {losses[0]:.3f}, after the resume {losses[1]:.3f}")
    print(optimizer)
dist.destroy_process_group()
