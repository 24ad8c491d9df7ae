"""One rank of the tests of `planning.ranks`: takes real steps and prints what it stores and sends, as JSON lines.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/planning_ranks_program.py
"""

import datetime as dt
import json
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.backends.buckets import bucket_bytes
from halfstep.engine.casting import sum_gradients_in_fp32
from halfstep.planning.optimizers import states_after_step
from halfstep.planning.ranks.communication import traffic
from halfstep.planning.ranks.parts import find_units, model_parts
from halfstep.planning.ranks.shards import count_parts, fsdp_bytes, whole_bytes
from halfstep.planning.sharding import layout_of, retained_bytes
from halfstep.precision.formats import COMPUTE_DTYPES
from halfstep.precision.policy import Policy

SHARD = (nn.Linear,)  # the units; the norm stays at the root
LAYOUTS = ("fp32", "bf16-lean", "bf16-lean,states=8bit", "bf16-lean,master=fp32,states=bf16")
COLLECTIVES = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce"}


class Sent(TorchDispatchMode):
    """Bytes that a ring makes each rank send, by collective."""

    def __init__(self):
        super().__init__()
        self.bytes = dict.fromkeys(COLLECTIVES.values(), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count the larger side of a collective, which is the whole."""
        name = COLLECTIVES.get(func.__name__.split(".")[0]) if func.namespace == "c10d" else None
        if name is not None:
            tensors = [t for arg in args[:2] for t in (arg if isinstance(arg, list) else [arg]) if torch.is_tensor(t)]
            whole = max(t.nbytes for t in tensors)
            if name == "all_reduce":
                boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg))
                ranks, rounds = dist.ProcessGroup.unbox(boxed).size(), 2
            else:
                ranks, rounds = whole // min(t.nbytes for t in tensors), 1
            self.bytes[name] += rounds * whole * (ranks - 1) // ranks
        return func(*args, **(kwargs or {}))


def build(policy):
    """Layers whose rows no number of ranks divides, and a last one with a single row: other ranks have nothing of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.LayerNorm(33), nn.Linear(33, 17), nn.Linear(17, 1))
    return model.to(torch.float32 if policy.params == "fp32" else torch.bfloat16)


def sharded(policy, mesh=None):
    """The same by FSDP2, with gradients reduced in the policy's dtype."""
    model = build(policy)
    reduce_in = MixedPrecisionPolicy(
        reduce_dtype=getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[policy.reduce])
    )
    for module in [m for m in model.modules() if isinstance(m, SHARD)] + [model]:
        fully_shard(module, mesh=mesh, mp_policy=reduce_in)
    return model


def optimizer_of(model, policy, *, stock=False):
    """halfstep.optim in the policy's layout, or torch's AdamW."""
    if stock:
        return torch.optim.AdamW(model.parameters())
    layout = {"states": policy.states} | ({} if policy.master == "weights" else {"master": policy.master})
    return halfstep.optim.AdamW(model.parameters(), **layout)


def predicted(policy, accumulate=1, *, stock=False, model=None, shard=SHARD, sizes=None):
    """The planner's layout, from the model that is not sharded; `sizes` are those of ddp's buckets."""
    model = build(policy) if model is None else model
    states = states_after_step(optimizer_of(model, policy, stock=stock), "fused" if stock else "lean")
    # The tables of the kernels exist on a GPU only.
    parts = [part for state in states for part in state.parts if len(state.parts) == 1]
    parts += model_parts(model, shard, policy, accumulate)
    if policy.widens_grads(accumulate):
        sum_gradients_in_fp32(model.parameters(), policy)
    buckets = bucket_bytes(
        dict(model.named_parameters()), COMPUTE_DTYPES.get(policy.reduce, torch.float32), **(sizes or {})
    )
    return layout_of(policy, count_parts(parts), find_units(model, shard, policy), buckets, accumulate)


def storages(tensors):
    """Bytes of the distinct storages of tensors, local ones where they are sharded."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local) if s.nbytes()}.values())


def stored(model, optimizer):
    """Bytes of weights, gradients, masters and states on this rank, as allocated."""
    entries = [item for state in optimizer.state.values() for item in state.items() if item[0] != "step"]
    masters = [t for name, t in entries if name in ("master", "low")]
    return {
        "weights": storages([p.detach() for p in model.parameters()]),
        "gradients": storages([p.grad for p in model.parameters()]),
        "master": storages(masters),
        "states": storages([t for name, t in entries if name not in ("master", "low")]),
    }


def backward(model, policy):
    """One micro-batch."""
    x = torch.ones(4, 8, dtype=next(model.parameters()).dtype)
    model(x).float().square().mean().backward()


def fsdp(name, *, stock=False, mesh=None):
    """A step of FSDP2: stored bytes, measured and predicted, and traffic."""
    policy = Policy.parse(name)
    model = sharded(policy, mesh)
    optimizer = optimizer_of(model, policy, stock=stock)
    with Sent() as sent:
        backward(model, policy)
    optimizer.step()
    layout = predicted(policy, stock=stock)
    shards = dist.get_world_size() if mesh is None else mesh.size(1)
    rank = dist.get_rank() if mesh is None else mesh.get_local_rank(1)
    plan = {"master": 0} | fsdp_bytes(layout.parts, shards, rank)
    strategy, group = ("fsdp", 8) if mesh is None else ("hsdp", shards)
    volume = traffic(layout.communicated, strategy, dist.get_world_size(), group=group)
    return {"measured": stored(model, optimizer), "planned": plan, "sent": sent.bytes, "traffic": vars(volume)}


def accumulated(name, accumulate=3):
    """What FSDP2 retains of the gradients between micro-batches, and sends for the whole window."""
    policy = Policy.parse(name)
    model = sharded(policy)
    retained = []
    with Sent() as sent:
        for number in range(accumulate):
            model.set_requires_gradient_sync(number == accumulate - 1)
            backward(model, policy)
            retained.append(storages(unsharded_gradients(model)))
    layout = predicted(policy, accumulate)
    volume = traffic(layout.communicated, "fsdp", dist.get_world_size(), accumulate=accumulate)
    return {
        "retained": retained, "planned": retained_bytes(layout), "sent": sent.bytes, "traffic": vars(volume),
        "shards": storages([p.grad for p in model.parameters()]),
    }  # fmt: skip


def unsharded_gradients(model):
    """The whole gradients that FSDP2 keeps, in either of its two places."""
    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    params = [p for group in groups if group is not None for p in group.fsdp_params]
    gradients = [p.unsharded_accumulated_grad for p in params] + [p._unsharded_param.grad for p in params]
    return [g for g in gradients if g is not None]


def ddp(name, *, views):
    """A step of DistributedDataParallel: stored bytes, its buckets, and traffic."""
    policy = Policy.parse(name)
    module = build(policy)
    model = DistributedDataParallel(module, gradient_as_bucket_view=views)
    optimizer = optimizer_of(module, policy)
    buckets = {}

    def hook(_, bucket):
        storage = bucket.buffer().untyped_storage()
        buckets[storage.data_ptr()] = storage.nbytes()
        sent = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return sent.then(lambda future: future.value()[0] / dist.get_world_size())

    model.register_comm_hook(None, hook)
    backward(model, policy)
    optimizer.step()
    gradients = {p.grad.untyped_storage().data_ptr() for p in module.parameters()}
    layout = predicted(policy)
    return {
        "measured": stored(module, optimizer), "planned": {"master": 0} | whole_bytes(layout.parts),
        "buckets": sum(buckets.values()), "extra": sum(size for where, size in buckets.items() if where not in gradients),
    }  # fmt: skip


def autocast():
    """Bytes of 16-bit copies of weights that backward keeps, with FSDP2 under torch's autocast."""
    policy = Policy.parse("bf16")
    model = sharded(policy)
    weights = {tuple(p.shape): p.numel() for p in model.parameters() if p.dim() == 2}
    copies = {}

    def pack(tensor):
        shape = tuple(tensor.shape) if tuple(tensor.shape) in weights else tuple(tensor.shape[::-1])
        if tensor.dtype is torch.bfloat16 and shape in weights:
            copies[shape] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.ones(4, 8, requires_grad=True)).float().square().mean()
    allocated = sum(storage.nbytes() for storage in copies.values())  # after every unit has been resharded
    del loss
    return {"copies": allocated, "planned": 2 * sum(weights.values())}


def main():
    """Run every case."""
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=120))
    world = dist.get_world_size()
    cases = {f"fsdp {name}": lambda name=name: fsdp(name) for name in LAYOUTS}
    cases["fsdp torch AdamW"] = lambda: fsdp("fp32", stock=True)
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        cases |= {f"hsdp {name}": lambda name=name: fsdp(name, mesh=mesh) for name in LAYOUTS}
    cases["autocast"] = autocast
    for name in ("fp32", "bf16-lean", "bf16-lean,grads=bf16,reduce=bf16"):
        cases[f"accumulated {name}"] = lambda name=name: accumulated(name)
    cases |= {
        f"ddp {name} {views}": lambda n=name, v=views: ddp(n, views=v)
        for name in ("fp32", "bf16-lean")
        for views in (False, True)
    }
    for name, function in cases.items():
        print(json.dumps({"case": name, "rank": dist.get_rank(), **function()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
