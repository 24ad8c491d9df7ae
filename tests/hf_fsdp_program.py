"""One rank of Hugging Face's Accelerate with FSDP2 and an optimizer of halfstep.optim: prints what it measured as JSON.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/hf_fsdp_program.py
"""

import json
import os

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

import halfstep

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ |= {"LOCAL_RANK": os.environ["RANK"], "ACCELERATE_USE_CPU": "true"}


def build():
    """A model of two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))


def batch(step, rank):
    """The examples of a rank."""
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def main():
    """Train sharded, and the same in one process."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True)
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    # Accelerate chooses FSDP on GPUs only; what it then does with the model and the optimizer also runs on gloo ranks.
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model = build()
    optimizer = halfstep.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(5):
        loss = model(batch(step, RANK)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    whole = build()
    single = halfstep.optim.AdamW(whole.parameters(), lr=1e-2)
    for step in range(5):
        sum(whole(batch(step, rank)).square().mean() for rank in range(WORLD)).div(WORLD).backward()
        single.step()
        single.zero_grad()
    pairs = list(zip(model.parameters(), whole.parameters(), strict=True))
    far = max(float((a.full_tensor() - b).detach().abs().max()) for a, b in pairs)
    print(json.dumps({"sharded": all(hasattr(a, "full_tensor") for a, _ in pairs), "far": far}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
