"""One rank of FSDP2 runs that must leave nothing behind: skipped steps, rejected models, checkpoints of other numbers of ranks.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/fsdp_laws_program.py FOLDER [CASE ...]
"""

import logging
import math
import os
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import halfstep
from halfstep.backends import FSDP
from halfstep.errors import SettingError
from halfstep.optim.shards import is_sharded, local
from rank_cases import case, hashed, run_cases, slow_case

NUM_EXAMPLES = 12  # of every window, whatever the number of ranks
LAYOUTS = (
    "fp32",
    "fp16,loss_scale=dynamic(init_scale=64)",
    "bf16-lean",
    "bf16-lean,states=8bit",
    "fp16-lean,master=fp32,loss_scale=dynamic(init_scale=64)",
)


class Block(nn.Module):
    """A residual block with statistics; with 5 features the shards differ, and one rank has nothing of a bias."""

    def __init__(self):
        super().__init__()
        self.norm, self.line = nn.BatchNorm1d(5), nn.Linear(5, 5)

    def forward(self, x):
        return x + torch.tanh(self.line(self.norm(x)))


class Net(nn.Module):
    """Two blocks between two layers, and a scalar."""

    def __init__(self):
        super().__init__()
        self.entry, self.blocks, self.head = nn.Linear(4, 5), nn.ModuleList(Block() for _ in range(2)), nn.Linear(5, 1)
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature.exp()


class Plain(Net):
    """The same without batch norm, whose statistics depend on the number of ranks."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.norm = nn.LayerNorm(5)


def sharded(mesh=None):
    """The model as a user shards it, with replicated batch norms and scalar."""
    model = Net()
    ignored = {p for b in model.blocks for p in b.norm.parameters()} | {model.temperature}
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, ignored_params=ignored)
    return model


def meshes():
    """Ways to place the model: the Engine's, a user's, and HSDP in both shapes."""
    names = ("replicate", "shard")
    yield "engine", Net, {"backend": "fsdp"}
    yield "user", sharded, {}
    yield "1xN", lambda: sharded(init_device_mesh("cpu", (1, WORLD), mesh_dim_names=names)), {}
    yield "Nx1", Net, {"backend": FSDP(mesh=init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=names))}


def build(make, precision, *, seed=0, **options):
    """A model and its Engine."""
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, halfstep.Engine(model, optimizer, precision, **options)


def window(model, engine, number, *, spoil=1.0):
    """One update with this rank's share of a window's examples; `spoil` multiplies its inputs."""
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(NUM_EXAMPLES, 4, generator=generator), torch.randn(NUM_EXAMPLES, 1, generator=generator)
    size, rank = (1, 0) if engine.backend.name == "single" else (WORLD, RANK)
    with engine.forward():
        loss = (model(x[rank::size] * spoil) - y[rank::size]).square().mean()
    engine.backward(loss)
    return engine.step()


def position(param):
    """Which part of a parameter this rank stores: its coordinates along the dimensions that split it."""
    if not is_sharded(param):
        return ()
    places = zip(param.placements, param.device_mesh.get_coordinate(), strict=True)
    return tuple(at for place, at in places if not place.is_replicate())


def trained(engine):
    """A hash of each thing that this rank trains, by what it is: equal keys on two ranks are copies."""
    hashes = {}
    for name, param in engine.params.items():
        states = [o.state[param] for o in engine.optimizers if param in o.state]
        tensors = [local(param), local(engine.ema.averages[name])]
        tensors += [local(t) for state in states for _, t in sorted(state.items()) if torch.is_tensor(t)]
        steps = [str(t) for state in states for _, t in sorted(state.items()) if not torch.is_tensor(t)]
        hashes[f"{name} {position(param)}"] = hashed(*tensors) + str(steps)
    return hashes | {f"buffer {name}": hashed(buffer) for name, buffer in engine.model.named_buffers()}


def copies_differ(hashes):
    """The keys whose hashes are not the same on all ranks that have them."""
    everyone = [None] * WORLD
    dist.all_gather_object(everyone, hashes)
    keys = {key for one in everyone for key in one}
    return sorted(key for key in keys if len({one[key] for one in everyone if key in one}) > 1)


# --- skipped steps ----------------------------------------------------------------------------------------------------


def spoiled(reduce, param, value):
    """A reduction of gradients after which the last number of one is `value`, unless that is None."""

    def function():
        reduce()
        if value is not None and local(param.grad).numel():
            local(param.grad).view(-1)[-1] = value

    return function


@case
def skips_leave_nothing():
    """An input, or a number of a reduced gradient, that is not finite on one random rank, over meshes and presets."""
    generator, trouble, skips = random.Random(3), [], 0
    for name, make, options in meshes():
        for precision in ("fp16", "fp16-lean,states=8bit"):
            scaler = halfstep.LossScaler(init_scale=64.0, hysteresis=1, growth_interval=2)
            model, engine = build(make, precision, scaler=scaler, max_norm=1.0, ema=0.5, **options)
            reduce = engine.backend.reduce_gradients
            for number in range(10):
                where, rank = generator.choice(["input", "gradient"]), generator.randrange(WORLD)
                value, key = generator.choice([math.inf, -math.inf, math.nan]), generator.choice(list(engine.params))
                bad = number % 5 != 0

                spoils = bad and where == "gradient" and rank == RANK
                engine.backend.reduce_gradients = spoiled(reduce, engine.params[key], value if spoils else None)
                present = torch.tensor(float(rank == RANK and local(engine.params[key]).numel() > 0))
                dist.all_reduce(present)
                should = bad and (where == "input" or bool(present))
                before = trained(engine)
                spoil = value if bad and where == "input" and rank == RANK else 1.0
                result = window(model, engine, number, spoil=spoil)
                after = trained(engine)
                outcomes = [None] * WORLD
                dist.all_gather_object(outcomes, (result.skipped, result.scale, engine.scaler.get_scale()))
                if len(set(outcomes)) > 1 or outcomes[0][0] is not should:
                    trouble.append(f"{name} {precision} {number}: {outcomes}, expected {should}")
                changed = sorted(k for k in after if after[k] != before[k])
                if should and changed:
                    trouble.append(f"{name} {precision} {number}: a skip changed {changed}")
                if not should and not changed:
                    trouble.append(f"{name} {precision} {number}: a step changed nothing")
                if differ := copies_differ(after):
                    trouble.append(f"{name} {precision} {number}: the ranks differ in {differ}")
                skips += should
            engine.close()
    return {"trouble": trouble, "skips": skips}


# --- the same start and the same buffers ------------------------------------------------------------------------------


@case
def ranks_start_and_stay_equal():
    """Models of other seeds on every rank become rank 0's where the Engine shards; buffers are those of rank 0."""
    trouble = []
    reference, single = build(Net, "fp32", backend="single")
    weights = {n: p.detach().clone() for n, p in reference.named_parameters()}
    window(reference, single, 0)
    for name, make, options in meshes():
        model, engine = build(make, "fp32", seed=RANK, ema=0.5, **options)
        if differ := copies_differ(trained(engine)):
            trouble.append(f"{name}: other copies at the start, {differ}")
        if name in ("engine", "Nx1"):
            whole = {n: p.full_tensor() if is_sharded(p) else p for n, p in engine.params.items()}
            trouble += [f"{name}: {n} is not rank 0's" for n, p in whole.items() if not torch.equal(p, weights[n])]
        for number in range(3):
            window(model, engine, number)
            if differ := copies_differ(trained(engine)):
                trouble.append(f"{name}: other copies after update {number}, {differ}")
        # Rank 0 has the even examples of the first window, and its statistics are everybody's.
        if int(model.blocks[0].norm.num_batches_tracked) != 3:
            trouble.append(f"{name}: {int(model.blocks[0].norm.num_batches_tracked)} batches tracked")
    return {"trouble": trouble}


# --- rejected before anything is changed -------------------------------------------------------------------------------


def huge():
    """A model that one rank cannot store in fp16."""
    model = Net()
    with torch.no_grad():
        model.head.weight[0, 0] = 1e6 if RANK == WORLD - 1 else 1.0
    return model


def half():
    """A model whose weights are rounded already."""
    return Net().half()


def scattered():
    """A model with a weight that is not contiguous."""
    model = Net()
    model.entry.weight = nn.Parameter(torch.randn(4, 5).t())
    return model


REJECTED = {
    "recompute": (lambda: nn.Sequential(nn.Linear(4, 1)), "bf16", {"recompute": "cheap"}, "repeated blocks"),
    "ema": (Net, "bf16", {"ema": 2.0}, "ema=2.0"),
    "fp8": (Net, "fp8", {}, "fp8"),
    "pattern": (Net, "bf16-lean,keep_fp32=tail", {}, "tail"),
    "half": (half, "bf16", {}, "float16"),
    "half lean": (half, "bf16-lean", {}, "float16"),
    "huge": (huge, "fp16-lean", {}, "1e+06"),
    "residual": (nn.Sequential, "bf16-lean", {}, "optimizer"),
    "container": (Net, "fp32", {"backend": lambda: FSDP(shard="blocks")}, "blocks"),
    "scattered": (scattered, "fp32", {"backend": FSDP}, "entry.weight"),
    "mesh": (Net, "fp32", {"backend": lambda: FSDP(mesh=init_device_mesh("cpu", (1, 1, WORLD)))}, "3 dimensions"),
}


@case
def rejections_change_nothing():
    """Parameters, groups, hooks and values are as before, and every rank raises: also for what only one of them has."""
    trouble = []
    for name, (make, precision, options, words) in REJECTED.items():
        for backend in ("fsdp", "ddp") if "backend" not in options else (options["backend"](),):
            torch.manual_seed(0)
            model = make()
            params = list(model.parameters())
            optimizer = torch.optim.AdamW(params or [nn.Parameter(torch.ones(1))], lr=1e-2)
            groups = [id(p) for p in optimizer.param_groups[0]["params"]]
            before = hashed(*params, *model.buffers()) if params else ""
            message = None
            try:
                halfstep.Engine(model, optimizer, precision, **(options | {"backend": backend}))
            except SettingError as error:
                message = str(error)
            where = f"{name} {getattr(backend, 'name', backend)}"
            if message is None or words not in message:
                trouble.append(f"{where}: {message}")
            after = list(model.parameters())
            same = [id(p) for p in after] == [id(p) for p in params]
            same = same and groups == [id(p) for p in optimizer.param_groups[0]["params"]]
            hooks = [m for m in model.modules() if m._forward_pre_hooks or m._forward_hooks or "forward" in vars(m)]
            hooks += [p for p in after if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]
            if not same or hooks or (params and before != hashed(*after, *model.buffers())):
                trouble.append(f"{where}: the model was changed")
    return {"trouble": trouble}


# --- checkpoints of other numbers of ranks ----------------------------------------------------------------------------


def whole_values(engine):
    """Masters, moments and averages as whole fp32 tensors."""
    values = {f"master {n}": v for n, v in engine.masters().items()}
    values |= {f"average {n}": v for n, v in engine.ema.averages.items()}
    names = {id(p): n for n, p in engine.params.items()}
    for optimizer in engine.optimizers:
        stock = getattr(optimizer, "torch_state_dict", optimizer.state_dict)  # with fp32 moments in every layout
        order = [p for group in optimizer.param_groups for p in group["params"]]
        for index, state in stock()["state"].items():
            values |= {f"{key} {names[id(order[index])]}": state[key] for key in ("exp_avg", "exp_avg_sq")}
    return {n: (v.full_tensor() if is_sharded(v) else v).detach().float().clone() for n, v in values.items()}


def moving(precision):
    """A run whose checkpoints move; one process is not sharded."""
    return build(Plain, precision, ema=0.5, max_norm=1.0, backend="single" if WORLD == 1 else "fsdp")


@slow_case
def save_for_other_ranks():
    """Three updates, a checkpoint, and what a run of another number of ranks must find and continue to."""
    for number, precision in enumerate(LAYOUTS):
        model, engine = moving(precision)
        for step in range(3):
            window(model, engine, step)
        engine.save(FOLDER / f"moved-{WORLD}-{number}")
        saved = {
            "values": whole_values(engine),
            "scaler": engine.scaler.state_dict(),
            "attempts": engine.progress.attempts,
        }
        results = [window(model, engine, step) for step in range(3, 6)]
        saved |= {"later": whole_values(engine), "norms": [r.grad_norm for r in results]}
        if RANK == 0:
            torch.save(saved, FOLDER / f"expected-{WORLD}-{number}.pt")
    return {"world": WORLD}


@slow_case
def load_from_other_ranks():
    """What SAVED_BY ranks have saved is found, in equal bits except 8-bit moments, and the run continues as the first did."""
    trouble, far, source = [], {}, os.environ["SAVED_BY"]
    for number, precision in enumerate(LAYOUTS):
        saved = torch.load(FOLDER / f"expected-{source}-{number}.pt", weights_only=True)
        model, engine = moving(precision)
        engine.load(FOLDER / f"moved-{source}-{number}")
        values = whole_values(engine)
        if values.keys() != saved["values"].keys():
            trouble.append(f"{precision}: {sorted(values.keys() ^ saved['values'].keys())}")
        loose = [n for n, v in values.items() if not torch.equal(v, saved["values"][n])]
        allowed = {n for n in loose if "8bit" in precision and n.startswith("exp_avg")}
        trouble += [f"{precision}: {n} is another after loading" for n in loose if n not in allowed]
        gaps = [float((values[n] - saved["values"][n]).abs().max() / saved["values"][n].abs().max()) for n in allowed]
        if engine.scaler.state_dict() != saved["scaler"] or engine.progress.attempts != saved["attempts"]:
            trouble.append(f"{precision}: scaler {engine.scaler.state_dict()}, {engine.progress.attempts} updates")
        results = [window(model, engine, step) for step in range(3, 6)]
        later = whole_values(engine)
        masters = [n for n in later if n.startswith("master")]
        far[precision] = {
            "moments": max(gaps, default=0.0),
            "masters": max(float((later[n] - saved["later"][n]).abs().max()) for n in masters),
            "norms": max(abs(r.grad_norm / n - 1) for r, n in zip(results, saved["norms"], strict=True)),
        }
    return {"trouble": trouble, "far": far}


if __name__ == "__main__":
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    FOLDER = Path(sys.argv[1])
    RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run_cases(sys.argv[2:])
