"""One rank of the tests of sharded parameters: prints a JSON line per case, with what was not as it should be.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/sharding_program.py FOLDER [CASE ...]
"""

import datetime as dt
import itertools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import halfstep
from halfstep.optim.fused import FusedStep

OPTIMIZERS = {
    "AdamW": lambda p, **layout: halfstep.optim.AdamW(p, lr=1e-2, **layout),
    "SGD": lambda p, **layout: halfstep.optim.SGD(p, lr=1e-2, momentum=0.9, **layout),
    "Lion": lambda p, **layout: halfstep.optim.Lion(p, lr=1e-3, **layout),
    "NAdam": lambda p, **layout: halfstep.optim.NAdam(p, lr=1e-2, **layout),  # has a scalar, and no kernel
}
LAYOUTS = [
    (dtype, master, states)
    for dtype, master, states in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), ("split", "fp32"), ("fp32", "bf16", "8bit")
    )
    if dtype is not torch.float32 or master == "split"
]
STEPS = 4
CASES = {}


def case(function):
    """Register a case under its name."""
    CASES[function.__name__] = function
    return function


def build(dtype=torch.float32, mesh=None):
    """A sharded model: on two ranks the parts of a layer have other sizes, and one rank has nothing of the last bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 1)).to(dtype)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model


def gradients(model, step):
    """The same gradients on every rank, sharded as the parameters are."""
    g = torch.Generator().manual_seed(step)
    for param in model.parameters():
        whole = torch.randn(param.shape, generator=g).to(param.dtype)
        param.grad = distribute_tensor(whole, param.device_mesh, param.placements)


def alike(one, other):
    """Whether two tensors are bit for bit equal."""
    one, other = (t.to_local() if isinstance(t, DTensor) else t for t in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and one.equal(other)


def differences(ours, reference):
    """Names of the state entries and weights in which two optimizers differ."""
    pairs = list(zip(*([p for g in o.param_groups for p in g["params"]] for o in (ours, reference)), strict=True))
    wrong = [f"weight {i}" for i, (a, b) in enumerate(pairs) if not alike(a.detach(), b.detach())]
    for i, (a, b) in enumerate(pairs):
        left, right = ours.state[a], reference.state[b]
        if left.keys() != right.keys():
            wrong.append(f"{i}: {sorted(left)} and {sorted(right)}")
            continue
        wrong += [
            f"{name} {i}" for name in left if not alike(torch.as_tensor(left[name]), torch.as_tensor(right[name]))
        ]
    return wrong


def stepped_as_parts(names, layouts):
    """Differences between sharded parameters and an optimizer of each rank's plain tensors, skips and divisors included."""
    wrong = []
    for name, (dtype, master, states) in itertools.product(names, layouts):
        model = build(dtype)
        parts = [nn.Parameter(p.to_local().detach().clone()) for p in model.parameters()]
        ours = OPTIMIZERS[name](model.parameters(), master=master, states=states)
        plain = OPTIMIZERS[name](parts, master=master, states=states)
        for step in range(STEPS):
            gradients(model, step)
            for part, param in zip(parts, model.parameters(), strict=True):
                part.grad = param.grad.to_local().clone()
            for optimizer in (ours, plain):
                optimizer.grad_scale = torch.tensor(4.0)
                optimizer.found_inf = torch.tensor(float(step == 2))
                optimizer.step()
        wrong += [f"{name} {dtype} {master} {states}: {d}" for d in differences(ours, plain)]
    return wrong


@case
def steps_are_those_of_the_parts():
    """In every layout."""
    wrong = stepped_as_parts(["AdamW"], LAYOUTS) + stepped_as_parts(OPTIMIZERS, LAYOUTS[1::5])
    return {"wrong": wrong, "sizes": [p.to_local().numel() for p in build().parameters()]}


@case
def kernels_step_the_parts():
    """With Triton's interpreter, the kernels."""
    launches = []
    step = FusedStep.step

    def counted(self, *args):
        launches.append(step(self, *args))
        return launches[-1]

    FusedStep.step = counted
    wrong = stepped_as_parts(["AdamW"], [(torch.bfloat16, "split", "8bit")])
    wrong += stepped_as_parts(["SGD"], [(torch.float16, "fp32", "bf16")])
    wrong += stepped_as_parts(["Lion"], [(torch.float32, "split", "fp32")])
    FusedStep.step = step
    return {"wrong": wrong, "launched": sum(launches), "stepped": len(launches)}


@case
def training_is_that_of_one_process():
    """FSDP2's own forward, backward and reduction, on another half of the batch on each rank."""
    far = {}
    for name, make in OPTIMIZERS.items():
        sharded = build()
        whole = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 1))
        whole.load_state_dict({k: v.full_tensor() for k, v in sharded.state_dict().items()})
        optimizers = [make(m.parameters()) for m in (sharded, whole)]
        for step in range(5):
            batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            own = batch.chunk(dist.get_world_size())[dist.get_rank()]
            for model, optimizer, x in zip((sharded, whole), optimizers, (own, batch), strict=True):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        pairs = zip(sharded.parameters(), whole.parameters(), strict=True)
        far[name] = max(float((a.full_tensor() - b).abs().max()) for a, b in pairs)
    return {"far": far}


def resumed(folder, name, layout, make, *, saves=True):
    """Differences between a run and one that was saved by DCP in the middle, here or before, and loaded into new objects."""
    dtype, master, states = layout
    model = make(dtype)
    optimizer = OPTIMIZERS[name](model.parameters(), master=master, states=states)
    for step in range(STEPS):
        if step == STEPS // 2 and saves:
            saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.save(saved, checkpoint_id=folder)
        gradients(model, step)
        optimizer.step()
    other = make(dtype)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    again = OPTIMIZERS[name](other.parameters(), master=master, states=states)
    saved = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, again)}
    dcp.load(saved, checkpoint_id=folder)
    other.load_state_dict(saved["model"])
    set_optimizer_state_dict(other, again, saved["optimizer"])
    for step in range(STEPS // 2, STEPS):
        gradients(other, step)
        again.step()
    return [f"{name} {layout}: {d}" for d in differences(again, optimizer)]


@case
def a_checkpoint_of_torch_continues_bit_for_bit():
    """`get_optimizer_state_dict`, DCP and `set_optimizer_state_dict`, in every layout."""
    wrong = []
    others = [(name, (torch.bfloat16, "split", "8bit")) for name in ("SGD", "NAdam")]
    for number, (name, layout) in enumerate([*itertools.product(["AdamW"], LAYOUTS), *others]):
        wrong += resumed(FOLDER / f"{number}", name, layout, build)
    return {"wrong": wrong}


@case
def a_checkpoint_of_two_ranks_continues():
    """Wherever the case above has saved it, in the layouts whose numbers do not depend on how they are sharded."""
    numbers = [number for number, layout in enumerate(LAYOUTS) if layout[-1] != "8bit"]
    wrong = [resumed(FOLDER / f"{n}", "AdamW", LAYOUTS[n], build, saves=False) for n in numbers]
    return {"wrong": list(itertools.chain(*wrong)), "loaded": len(wrong)}


@case
def a_mesh_that_replicates_and_shards():
    """HSDP's placements, on a mesh of two dimensions."""
    wrong = []
    for number, shape in enumerate([(1, dist.get_world_size()), (dist.get_world_size(), 1)]):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for name, states in itertools.product(("AdamW", "SGD"), ("fp32", "8bit")):
            layout = (torch.bfloat16, "split", states)
            wrong += resumed(FOLDER / f"mesh-{number}-{name}-{states}", name, layout, lambda d, m=mesh: build(d, m))
    return {"wrong": wrong}


@case
def a_full_state_dict_has_whole_tensors():
    """What rank 0 writes to one file loads into an optimizer of a model that is not sharded, and back into shards."""
    wrong = []
    for name, (dtype, master, states) in itertools.product(("AdamW", "NAdam"), LAYOUTS[2::4]):
        model = build(dtype)
        optimizer = OPTIMIZERS[name](model.parameters(), master=master, states=states)
        for step in range(2):
            gradients(model, step)
            optimizer.step()
        options = StateDictOptions(full_state_dict=True)
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        whole = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 1)).to(dtype)
        whole.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
        single = OPTIMIZERS[name](whole.parameters(), master=master, states="fp32" if states == "8bit" else states)
        set_optimizer_state_dict(whole, single, saved, options=options)
        for param, other in zip(model.parameters(), whole.parameters(), strict=True):
            if not optimizer.master_of(param).full_tensor().equal(single.master_of(other)):
                wrong.append(f"{name} {dtype} {master} {states}: masters")
        again = build(dtype)
        with torch.no_grad():
            for param, other in zip(again.parameters(), model.parameters(), strict=True):
                param.copy_(other)
        back = OPTIMIZERS[name](again.parameters(), master=master, states=states)
        set_optimizer_state_dict(again, back, saved, options=options)
        wrong += [f"{name} {dtype} {master} {states}, back: {d}" for d in differences(back, optimizer)]
    return {"wrong": wrong}


@case
def unreduced_gradients_are_reduced():
    """Tensor parallelism can leave the gradient of a replicated parameter as a sum that is still to be taken."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.ones(5), mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.full((5,), 1.0 + dist.get_rank()), mesh, [Partial()])
    halfstep.optim.SGD([param], lr=0.1).step()
    return {"weights": param.to_local().tolist()}


@case
def masters_are_read_and_set_as_wholes():
    """`master_of` returns a tensor with the parameter's placements, and `set_master` takes one, or a whole tensor."""
    wrong = []
    for master in ("split", "fp32"):
        model = build(torch.bfloat16)
        optimizer = OPTIMIZERS["AdamW"](model.parameters(), master=master)
        gradients(model, 0)
        optimizer.step()
        for param in model.parameters():
            value = torch.linspace(0.1, 1, param.numel()).view(param.shape)
            for given in (value, distribute_tensor(value, param.device_mesh, param.placements)):
                optimizer.set_master(param, given)
                now = optimizer.master_of(param)
                if now.placements != param.placements or not now.full_tensor().equal(value):
                    wrong.append(f"{master}: master")
                if not param.full_tensor().equal(value.bfloat16()):
                    wrong.append(f"{master}: weight")
    return {"wrong": wrong}


def main():
    """Run every case."""
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=120))
    for name, function in CASES.items():
        if CHOSEN and name not in CHOSEN:
            continue
        print(json.dumps({"case": name, "rank": dist.get_rank(), **function()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    FOLDER, CHOSEN = Path(sys.argv[1]), sys.argv[2:]
    main()
