"""One rank of the tests of `planning.ranks` with the Engine's own backends: prints what it stores and sends, as JSON lines.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/planning_engine_program.py [all]
"""

import datetime as dt
import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import halfstep
from halfstep.backends.ddp import DataParallel
from halfstep.backends.fsdp import FSDP
from halfstep.planning.ranks.communication import traffic
from halfstep.planning.ranks.shards import fsdp_bytes, whole_bytes
from halfstep.planning.sharding import retained_bytes
from halfstep.precision.formats import COMPUTE_DTYPES
from halfstep.precision.policy import Policy
from planning_ranks_program import Sent, predicted, storages, stored

SMALL = {"first_bucket_bytes": 512, "bucket_bytes": 2048}  # so that this model has several buckets
# (precision, micro-batches): what is stored and reduced in fp32, in 16 bits, and in both.
QUICK = (("fp32", 1), ("bf16-lean,states=8bit", 3), ("bf16-lean,grads=bf16,reduce=bf16", 2))
MORE = (
    ("bf16-lean", 1), ("bf16-lean,reduce=bf16", 1), ("bf16-lean,reduce=bf16", 2), ("bf16,reduce=bf16", 2),
    ("bf16-lean,master=fp32,states=bf16", 1), ("bf16-lean,keep_fp32=2,reduce=bf16", 1), ("fp16-lean,loss_scale=1024,reduce=bf16,grads=fp16", 2),
)  # fmt: skip


class Block(nn.Module):
    """A unit whose rows no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(17), nn.Linear(17, 33), nn.Linear(33, 17)

    def forward(self, x):
        """With a residual."""
        return x + self.down(self.up(self.norm(x)))


def build(policy=None):
    """Two repeated blocks, which are the default units, and a head with a single row: other ranks have nothing of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 17), nn.Sequential(Block(), Block()), nn.Linear(17, 1))
    if policy is not None and policy.params != "fp32":
        model.to(COMPUTE_DTYPES[policy.params])
        for name, module in model.named_modules():
            if policy.keeps_fp32(name):
                module.float()
    return model


def window(engine, model, accumulate):
    """Train one window; returns what is retained after each backward, and what is stored before the update."""
    retained, before = [], {}
    for number in range(accumulate):
        with engine.forward():
            loss = model(torch.ones(4, 8)).float().square().mean()
        engine.backward(loss)
        retained.append(storages(getattr(engine.backend, "retained_gradients", list)()))
        if number == accumulate - 1:
            before = stored(model, engine.optimizers[0])
        engine.step()
    return retained, before


def trained(backend, name, accumulate):
    """The second window of an Engine, in which nothing is new any more."""
    model = build()
    engine = halfstep.Engine(
        model, torch.optim.AdamW(model.parameters()), precision=name, accumulate=accumulate, backend=backend
    )
    window(engine, model, accumulate)
    reduced = getattr(engine.backend, "reductions", None)
    with Sent() as sent:
        retained, measured = window(engine, model, accumulate)
    return engine, measured, retained, sent.bytes, reduced


def planned(name, accumulate, backend):
    """The planner's layout for an optimizer that the Engine adopts."""
    policy = Policy.parse(name)
    stock = policy.params == "fp32" and backend == "ddp"
    sizes = SMALL if accumulate > 1 else None
    return predicted(policy, accumulate, stock=stock, model=build(policy), shard=(), sizes=sizes)


def ddp(name, accumulate):
    """Stored bytes, and those of each bucket and of the messages."""
    engine, measured, _, sent, before = trained(DataParallel(**SMALL) if accumulate > 1 else "ddp", name, accumulate)
    layout = planned(name, accumulate, "ddp")
    sizes = {"master": 0} | whole_bytes(layout.parts)
    sizes["gradients"] = sum(bucket.gradients for bucket in layout.buckets)
    volume = traffic(layout.communicated, "ddp", dist.get_world_size())
    reductions = engine.backend.reductions
    return {
        "measured": measured, "planned": sizes, "sent": sent, "traffic": vars(volume),
        "count": reductions.count - before.count,
        "messages": [reductions.message_bytes - before.message_bytes, layout.communicated.message_bytes],
        "buckets": [[b.message_bytes for b in engine.backend._reducer._buckets], [b.message for b in layout.buckets]],
    }  # fmt: skip


def fsdp(name, accumulate, mesh=None):
    """Stored bytes, retained gradients and traffic."""
    backend = "fsdp" if mesh is None else FSDP(mesh=mesh)
    _, measured, retained, sent, _ = trained(backend, name, accumulate)
    layout = planned(name, accumulate, "fsdp")
    shards = dist.get_world_size() if mesh is None else mesh.size(1)
    rank = dist.get_rank() if mesh is None else mesh.get_local_rank(1)
    strategy = "fsdp" if mesh is None else "hsdp"
    volume = traffic(layout.communicated, strategy, dist.get_world_size(), accumulate=accumulate, group=shards)
    return {
        "measured": measured, "planned": {"master": 0} | fsdp_bytes(layout.parts, shards, rank),
        "sent": sent, "traffic": vars(volume),
        "retained": retained, "retained_planned": [retained_bytes(layout)] * (accumulate - 1) + [0],
    }  # fmt: skip


def main(arguments):
    """Run the quick cases, or all."""
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=120))
    chosen = QUICK + MORE if arguments == ["all"] else QUICK
    cases = {f"{f.__name__} {name} {k}": lambda f=f, n=name, k=k: f(n, k) for name, k in chosen for f in (ddp, fsdp)}
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        cases |= {f"hsdp {name} {k}": lambda n=name, k=k: fsdp(n, k, mesh) for name, k in chosen}
    for name, function in cases.items():
        print(json.dumps({"case": name, "rank": dist.get_rank(), **function()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
