"""One rank of loops that a Monitor watches: a model under DDP and one that FSDP2 sharded; one JSON line per case.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/monitor_program.py
"""

import json
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from halfstep.integrations.monitor import Monitor


class Net(nn.Module):
    """Returns its loss, as models of transformers do; the second layer overflows where it is told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.overflows = False

    def forward(self, x):
        out = self.second(self.first(x))
        return {"loss": (out * 1e30 * 1e30 if self.overflows else out).square().mean()}


def run(kind):
    """Four steps, of which rank 1 overflows in the second."""
    net = Net()
    model = nn.parallel.DistributedDataParallel(net) if kind == "ddp" else fully_shard(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(net, [optimizer])
    monitor.follow(net)
    norms = []
    for step in range(4):
        net.overflows = step == 1 and dist.get_rank() == 1
        before = [whole(p).clone() for p in model.parameters()]
        model(torch.randn(2, 4, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank())))[
            "loss"
        ].backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.end_step()
        norms.append(sum(float((whole(p) - b).norm()) for p, b in zip(model.parameters(), before, strict=True)))
    monitor.close()
    autopsies = [(a.step, a.cause, a.module) for a in monitor.watch.autopsies]
    show(case=kind, moved=[n > 0 for n in norms], finite=all(n == n for n in norms), autopsies=autopsies)  # noqa: PLR0124 - NaN


def whole(param):
    """The whole of a parameter that may be sharded."""
    return (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()


def show(**values):
    """Print a case."""
    print(json.dumps(values), flush=True)


logging.getLogger("halfstep").setLevel(logging.ERROR)
dist.init_process_group("gloo")
for each in ("ddp", "fsdp"):
    run(each)
dist.destroy_process_group()
