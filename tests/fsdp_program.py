"""One rank of FSDP2 runs under the Engine: every case prints what it measured as one line of JSON.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/fsdp_program.py FOLDER [CASE ...]
"""

import datetime as dt
import hashlib
import itertools
import json
import logging
import math
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import halfstep
from halfstep.backends import FSDP
from halfstep.errors import SettingError
from halfstep.optim.shards import is_sharded, local

CASES, SLOW = {}, set()
REDUCE = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
PRESETS = ("fp32", "bf16", "fp16", "bf16-lean", "fp16-lean")
DIM = 5  # odd: the shards of two ranks have other sizes, and one rank has nothing of the last bias


def case(function):
    """Register a case under its name."""
    CASES[function.__name__] = function
    return function


def slow(function):
    """Register a case that runs only if it is named."""
    SLOW.add(function.__name__)
    return case(function)


class Block(nn.Module):
    """A residual block."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks between two layers."""

    def __init__(self, batch_norm=False):
        super().__init__()
        self.entry = nn.Linear(4, DIM)
        self.norm = nn.BatchNorm1d(DIM) if batch_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x):
        x = self.norm(self.entry(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded_by_user(mesh=None, **settings):
    """The model as a user shards it."""
    model = Net()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, **settings)
    return model


class Custom(torch.optim.SGD):
    """An optimizer that halfstep.optim does not know."""


OPTIMIZERS = {
    "moments": lambda p: halfstep.optim.AdamW(p, lr=1e-3, betas=(0.0, 0.0), weight_decay=0.0),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=3e-2, momentum=0.9),
    "Custom": lambda p: Custom(p, lr=3e-2, momentum=0.9),
}


class Run:
    """A model and its Engine; `how` is "single", "user" or "engine"."""

    def __init__(self, how, precision="fp32", optimizer="SGD", *, model=None, backend=None, **options):
        torch.manual_seed(0)
        self.model = model() if model else sharded_by_user() if how == "user" else Net()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        backend = backend or ("single" if how == "single" else "fsdp")
        self.engine = halfstep.Engine(self.model, self.optimizer, precision, backend=backend, **options)
        self.single = how == "single"
        self.num_windows = 0

    def batches(self, length):
        """The micro-batches of this rank in one window; a single run has those of all ranks."""
        ranks = range(WORLD) if self.single else (RANK,)
        for i, rank in itertools.product(range(length), ranks):
            generator = torch.Generator().manual_seed(10_000 * self.num_windows + 100 * i + rank)
            yield i, rank, torch.randn(3, 4, generator=generator), torch.randn(3, 1, generator=generator)

    def window(self, length=1, weights=None, broken=()):
        """Train one window; `broken` are (micro-batch, rank) whose loss is infinite. Returns its mean loss and result."""
        losses, batches = [], list(self.batches(length))
        for number, (i, rank, x, y) in enumerate(batches):
            with self.engine.forward():
                loss = (self.model(x) - y).square().mean()
            losses.append(loss.detach().float())
            scaled = loss * math.inf if (i, rank) in broken else loss
            self.engine.backward(scaled, None if weights is None else weights[i][rank])
            result = self.engine.step(last=number == len(batches) - 1)
        self.num_windows += 1
        mean = torch.stack(losses).mean()
        if not self.single:
            dist.all_reduce(mean)
            mean /= WORLD
        return float(mean), result

    def masters(self):
        """Whole fp32 weights."""
        return {n: whole(v) for n, v in self.engine.masters().items()}

    def moments(self, name="exp_avg"):
        """Whole moments of the optimizer, by the name of their parameter."""
        params = {id(p): n for n, p in self.engine.params.items()}
        (optimizer,) = self.engine.optimizers
        entries = {params[id(p)]: (p, state[name]) for p, state in optimizer.state.items() if name in state}
        return {n: whole(DTensor.from_local(v, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()) if is_sharded(p) else v)
                for n, (p, v) in entries.items()}  # fmt: skip


def single(*args, accumulate=1, **options):
    """The same run in one process: its windows have the micro-batches of all ranks."""
    return Run("single", *args, accumulate=accumulate * WORLD, **options)


def whole(tensor):
    """A tensor without its placements."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor.detach().clone()


def distance(ours, theirs):
    """The largest difference of two sets of tensors, relative to the largest number in them."""
    assert ours.keys() == theirs.keys()
    largest = max(float(t.abs().max()) for t in theirs.values())
    return max(float((ours[n].float() - theirs[n].float()).abs().max()) for n in ours) / largest


def digest(engine):
    """A hash of what this rank has of the weights and masters, and of the scale."""
    parts = [local(p).detach() for p in engine.params.values()]
    states = [o.state[p] for p in engine.params.values() for o in engine.optimizers if p in o.state]
    parts += [local(t) for state in states for _, t in sorted(state.items()) if torch.is_tensor(t)]
    data = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in parts if t.dim())
    return hashlib.sha256(data + str(engine.scaler.get_scale()).encode()).hexdigest()


# --- the same numbers as one process --------------------------------------------------------------------------------


@case
def gradients_are_those_of_one_process():
    """With both betas 0 the first moment is the gradient that reached the optimizer."""
    far = {}
    weights = [[3.0, 1.0], [0.0, 7.0], [2.0, 5.0]]
    for precision, accumulate, weighted in [
        *((p, 3, True) for p in PRESETS),
        ("fp32", 1, False),
        ("bf16-lean", 1, False),
    ]:
        scale = ",loss_scale=1024" if precision.startswith("fp16") else ""
        settings = {"precision": precision + scale, "optimizer": "moments", "accumulate": accumulate}
        reference = single(**settings)
        runs = [Run(how, **settings) for how in ("user", "engine")]
        for run in (reference, *runs):
            run.window(accumulate, weights if weighted else None)
        far[f"{precision} {accumulate} {weighted}"] = max(distance(r.moments(), reference.moments()) for r in runs)
    return {"far": far}


@case
def losses_stay_together():
    """50 updates in fp32, clipped."""
    reference, ours = single("fp32", "AdamW", max_norm=0.5), Run("engine", "fp32", "AdamW", max_norm=0.5)
    pairs = [(reference.window(), ours.window()) for _ in range(50)]
    return {
        "losses": max(abs(a - b) / abs(a) for (a, _), (b, _) in pairs),
        "norms": max(abs(a.grad_norm - b.grad_norm) / a.grad_norm for (_, a), (_, b) in pairs),
    }


@slow
def every_optimizer_in_every_preset():
    """Stock ones, and one that only the host can decide for."""
    far = {}
    for precision, optimizer in itertools.product(PRESETS, ("SGD", "AdamW", "Custom")):
        scaled = precision + (",loss_scale=1024" if precision.startswith("fp16") else "")
        reference = single(scaled, optimizer, accumulate=2, max_norm=1.0)
        ours = Run("engine", scaled, optimizer, accumulate=2, max_norm=1.0)
        for _ in range(3):
            for run in (reference, ours):
                run.window(2)
        far[f"{precision} {optimizer}"] = distance(ours.masters(), reference.masters())
    return {"far": far}


@case
def overflows_are_those_of_one_process():
    """Scales and skips, with infinite losses on one rank or another."""
    trace = {1: [(0, 0)], 4: [(1, 1)], 5: [(0, 1), (1, 0)], 9: [(1, 0)]}
    scaler = {"init_scale": 1024.0, "growth_interval": 3, "hysteresis": 2}
    outcomes = {}
    for how, precision in itertools.product(("single", "engine"), ("fp16", "fp16-lean")):
        settings = {"scaler": halfstep.LossScaler(**scaler), "max_norm": 1.0}
        run = (single if how == "single" else lambda *a, h=how, **k: Run(h, *a, **k))(
            precision, accumulate=2, **settings
        )
        results = [run.window(2, broken=trace.get(step, ()))[1] for step in range(12)]
        outcomes.setdefault(precision, {})[how] = [(r.skipped, r.scale) for r in results]
    return {"outcomes": outcomes}


# --- windows --------------------------------------------------------------------------------------------------------


class Counter:
    """Counts the reductions of gradients and the small messages."""

    def __enter__(self):
        self.reductions, self.messages = 0, 0
        self.stock = getattr(dist, REDUCE), dist.all_reduce

        def reduce(*args, **kwargs):
            self.reductions += 1
            return self.stock[0](*args, **kwargs)

        def message(*args, **kwargs):
            self.messages += 1
            return self.stock[1](*args, **kwargs)

        dist.all_reduce = message
        setattr(dist, REDUCE, reduce)
        return self

    def __exit__(self, *_):
        dist.all_reduce = self.stock[1]
        setattr(dist, REDUCE, self.stock[0])


@case
def one_reduction_per_window():
    """For each of the three units, in full and short windows; of several losses from the second window on."""
    run = Run("engine", "bf16-lean", accumulate=3)
    counts = []
    for length in (3, 2, 1, 3):
        with Counter() as counter:
            for i, _, x, y in run.batches(length):
                with run.engine.forward():
                    loss = (run.model(x) - y).square().mean()
                run.engine.backward(loss)
                run.engine.step(last=i == length - 1)
        counts.append((counter.reductions, counter.messages))
    several = []
    for _ in range(3):
        with Counter() as counter:
            for _, _, x, y in run.batches(3):
                with run.engine.forward():
                    out = run.model(x)
                    losses = (out - y).square().mean(), out.abs().mean()
                run.engine.backward(losses[0], retain_graph=True)
                run.engine.backward(losses[1])
                run.engine.step()
        several.append(counter.reductions)
    return {"counts": counts, "several": several}


@case
def short_windows_and_two_losses_are_the_mean():
    """Compared with one process, micro-batch by micro-batch."""
    far = {}
    for precision in ("fp32", "bf16-lean"):
        reference, ours = single(precision, accumulate=3), Run("engine", precision, accumulate=3)
        for length in (3, 1, 2, 3):
            reference.window(length, [[1.0, 5.0]] * 3)
            ours.window(length, [[1.0, 5.0]] * 3)
        far[precision] = distance(ours.masters(), reference.masters())
    return {"far": far}


@case
def gradients_can_be_edited_after_unscale():
    """`unscale()` reduces, divides and agrees; an edit on one rank that is not finite skips on all."""
    reference, ours = single("fp16,loss_scale=1024"), Run("engine", "fp16,loss_scale=1024")
    skips = []
    for step in range(3):
        for run in (reference, ours):
            for number, (_, _, x, y) in enumerate(run.batches(1)):
                with run.engine.forward():
                    loss = (run.model(x) - y).square().mean()
                run.engine.backward(loss)
                if run.single and number < WORLD - 1:
                    run.engine.step()
            run.engine.unscale()
            for param in run.engine.params.values():
                local(param.grad).mul_(0.5)
            if step == 1 and (run.single or RANK == 1):
                grad = local(run.engine.params["blocks.0.up.weight"].grad)
                grad[0] = math.nan
            run.num_windows += 1
            result = run.engine.step()
        skips.append(result.skipped)
    return {"skips": skips, "far": distance(ours.masters(), reference.masters())}


@slow
def dropped_windows_leave_nothing():
    """`reset_window` drops the whole gradients that ranks keep."""
    first, second = (Run("engine", "bf16-lean", accumulate=2) for _ in range(2))
    (_, _, x, y), *_ = first.batches(1)
    with first.engine.forward():
        loss = (first.model(x) * 100 - y).square().mean()
    first.engine.backward(loss)
    first.engine.step()
    first.engine.reset_window()
    for run in (first, second):
        run.window(2)
    return {"far": distance(first.masters(), second.masters())}


# --- evaluation, EMA, compile, recompute ----------------------------------------------------------------------------


@case
def evaluation_uses_its_weights_and_training_its_own():
    """The root's gathered weights would stay from one forward to the next."""
    x = torch.ones(2, 4)
    outputs = {}
    for how in ("single", "engine"):
        run = (single if how == "single" else lambda *a, **k: Run("engine", *a, **k))("bf16-lean", "AdamW", ema=0.5)
        for _ in range(3):
            run.window()
        values = []
        for ema in (True, False, True):
            with run.engine.evaluate(ema=ema):
                values.append(run.model(x).float().sum().item())
        run.window()
        with run.engine.evaluate():
            values.append(run.model(x).float().sum().item())
        outputs[how] = values
    return {"outputs": outputs}


@slow
def forwards_between_training_steps():
    """A forward without backward leaves the root gathered; the next update, save and load must reach it."""
    first, second = Run("engine", "fp32"), Run("engine", "fp32")
    for number in range(20):  # more than the guards need to compare the model's tables
        with first.engine.forward():
            first.model(torch.ones(2, 4))
        if number == 10:
            state = first.engine.state_dict()
            with first.engine.forward():
                first.model(torch.ones(2, 4))
            first.engine.load_state_dict(state)
        for run in (first, second):
            run.window()
    return {"far": distance(first.masters(), second.masters())}


@slow
def recomputed_blocks():
    """`recompute="cheap"`, and torch's own checkpoint around a block."""
    far = {}
    for precision in ("bf16", "bf16-lean"):
        reference, ours = Run("engine", precision), Run("engine", precision, recompute="cheap")
        for run in (reference, ours):
            for _ in range(2):
                run.window()
        far[f"{precision} cheap"] = distance(ours.masters(), reference.masters())

        class Checkpointed(Net):
            def forward(self, x):
                x = self.entry(x)
                for block in self.blocks:
                    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                return self.head(x)

        reference, ours = Run("engine", precision), Run("engine", precision, model=Checkpointed)
        for run in (reference, ours):
            for _ in range(2):
                run.window()
        far[f"{precision} checkpoint"] = distance(ours.masters(), reference.masters())
    return {"far": far}


@slow
def compiled_models():
    """`compile=True` and `compile="blocks"`, with accumulation."""
    far = {}
    for precision, compiled in itertools.product(("bf16", "bf16-lean"), (True, "blocks")):
        reference = Run("engine", precision, accumulate=2)
        ours = Run("engine", precision, accumulate=2, compile=compiled)
        for run in (reference, ours):
            for _ in range(2):
                run.window(2)
        far[f"{precision} {compiled}"] = distance(ours.masters(), reference.masters())
    return {"far": far}


# --- placements -----------------------------------------------------------------------------------------------------


class Placed(nn.Module):
    """Weights of any placements: the gradient of each is its own slope."""

    def __init__(self, kinds):
        super().__init__()
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("all",))
        pair = init_device_mesh("cpu", (WORLD, 1) if WORLD == 2 else (2, WORLD // 2), mesh_dim_names=("a", "b"))
        makers = {
            "plain": lambda t: t,
            "replicate": lambda t: distribute_tensor(t, mesh, [Replicate()]),
            "shard": lambda t: distribute_tensor(t, mesh, [Shard(0)]),
            "shard1": lambda t: distribute_tensor(t, mesh, [Shard(1)]),
            "hsdp": lambda t: distribute_tensor(t, pair, [Replicate(), Shard(0)]),
            "both": lambda t: distribute_tensor(t, pair, [Shard(0), Shard(1)]),
            "sub": lambda t: distribute_tensor(t, pair["b"], [Shard(0)]),
            "empty": lambda t: distribute_tensor(t[:1], mesh, [Shard(0)]),
        }
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterDict()
        for number, kind in enumerate(kinds):
            self.weights[f"{number}_{kind}"] = nn.Parameter(makers[kind](torch.randn(3, 4, generator=generator)))

    def forward(self, factor):
        return sum(local(w.to_local() if is_sharded(w) else w).square().sum() for w in self.weights.values()) * factor


MIXES = (
    ("replicate", "shard"), ("shard", "replicate"), ("plain", "shard", "replicate"), ("hsdp", "shard", "empty"),
    ("empty", "shard1", "both"), ("sub", "replicate", "hsdp", "plain"),
)  # fmt: skip


@case
def norms_count_every_value_once():
    """Whatever the placements and meshes."""
    wrong = {}
    for kinds in MIXES:
        torch.manual_seed(0)
        model = Placed(kinds)
        expected = math.sqrt(sum(float((2 * whole(w)).detach().square().sum()) for w in model.weights.values()))
        engine = halfstep.Engine(model, halfstep.optim.SGD(model.parameters(), lr=0.0), "fp32", max_norm=1.0)
        engine.backward(model(1.0))
        wrong["+".join(kinds)] = engine.step().grad_norm / expected - 1
    return {"wrong": wrong, "backend": engine.backend.name}


def poisoned(reduce, param, value, *, there):
    """A reduction of gradients after which one number is `value`, if that is to happen on this rank."""

    def function():
        reduce()
        grad = local(param.grad)
        if there and grad.numel():
            grad.view(-1)[-1] = value

    return function


@case
def one_bad_number_skips_everywhere():
    """On a random rank and parameter, after the reduction, 50 times; the ranks' decisions and scales, and what changed."""
    generator = random.Random(7)
    trouble, skipped = [], 0
    for mix, precision in itertools.product(MIXES, ("fp16", "fp16-lean")):
        torch.manual_seed(0)
        model = Placed(mix)
        engine = halfstep.Engine(model, OPTIMIZERS["AdamW"](model.parameters()), precision, max_norm=1.0,
                                 scaler=halfstep.LossScaler(init_scale=4.0, hysteresis=1))  # fmt: skip
        reduce = engine.backend.reduce_gradients
        for attempt in range(5):
            name, rank = generator.choice(list(engine.params)), generator.randrange(WORLD)
            value = generator.choice([math.inf, -math.inf, math.nan])

            engine.backend.reduce_gradients = poisoned(
                reduce, engine.params[name], value, there=attempt and rank == RANK
            )
            before = digest(engine) if attempt else None
            with engine.forward():
                loss = model(0.01)
            engine.backward(loss)
            result = engine.step()
            changed = digest(engine) != before
            present = torch.tensor(float(local(engine.params[name]).numel() > 0 and rank == RANK))
            dist.all_reduce(present)
            agreed = [None] * WORLD
            dist.all_gather_object(agreed, (result.skipped, result.scale, float(engine.scaler.get_scale())))
            should = bool(attempt) and bool(present)
            if any(a != (should, *agreed[0][1:]) for a in agreed):
                trouble.append(f"{mix} {precision} {name}: {agreed}, expected {should}")
            weights = [local(p).detach().isfinite().all() for p in engine.params.values()]
            if not all(weights) or (not should and not changed):
                trouble.append(f"{mix} {precision} {name}: weights")
            skipped += should
        engine.close()
    return {"trouble": trouble, "skipped": skipped}


@case
def stock_scaler_looks_at_the_first_placement():
    """F4: torch's GradScaler on Replicate, then Shard, with an inf on one rank's shard only."""
    scales = {}
    for kinds in (("replicate", "shard"), ("shard", "replicate")):
        model = Placed(kinds)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(model(0.01)).backward()
        if RANK == 1:
            sharded = next(p for n, p in model.weights.items() if n.endswith("_shard"))
            local(sharded.grad).view(-1)[-1] = math.inf
        scaler.step(optimizer)
        scaler.update()
        gathered = [None] * WORLD
        dist.all_gather_object(gathered, scaler.get_scale())
        scales[kinds[0]] = gathered
    return {"scales": scales}


@slow
def meshes_of_fully_shard():
    """HSDP in both shapes, and a part of the model that is not sharded at all."""
    far, norms = {}, {}
    reference = single("bf16-lean", accumulate=2, max_norm=1.0)
    results = [reference.window(2)[1] for _ in range(3)]

    def hsdp(shape):
        return sharded_by_user(init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))

    def partly():
        model = Net()
        for block in model.blocks:
            fully_shard(block)
        return model

    def ignoring():
        model = Net()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model, ignored_params={*model.head.parameters()})
        return model

    makers = {"1xN": lambda: hsdp((1, WORLD)), "Nx1": lambda: hsdp((WORLD, 1)), "partly": partly, "ignoring": ignoring}
    if WORLD == 4:
        makers["2x2"] = lambda: hsdp((2, 2))
    for name, make in makers.items():
        run = Run("user", "bf16-lean", model=make, accumulate=2, max_norm=1.0)
        own = [run.window(2)[1] for _ in range(3)]
        far[name] = distance(run.masters(), reference.masters())
        norms[name] = max(abs(a.grad_norm / b.grad_norm - 1) for a, b in zip(own, results, strict=True))
    return {"far": far, "norms": norms}


@slow
def tensor_parallel_and_sharded():
    """FSDP2 over a model of which tensor parallelism has split two layers; the other weights are on the first mesh only."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
    ranks = mesh["dp"].size()

    def make():
        model = Net()
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["dp"])
        return model

    far, norms = {}, {}
    for precision in ("fp32", "bf16-lean"):
        torch.manual_seed(0)
        runs = [
            Run("single", precision, accumulate=ranks, max_norm=1.0),
            Run("user", precision, model=make, max_norm=1.0),
        ]
        results = []
        for run in runs:
            for step in range(3):
                mine = range(ranks) if run.single else (mesh["dp"].get_local_rank(),)
                for rank in mine:
                    generator = torch.Generator().manual_seed(100 * step + rank)
                    x, y = torch.randn(3, 4, generator=generator), torch.randn(3, 1, generator=generator)
                    with run.engine.forward():
                        loss = (run.model(x) - y).square().mean()
                    run.engine.backward(loss)
                    result = run.engine.step()
            results.append(result.grad_norm)
        far[precision] = distance(runs[1].masters(), runs[0].masters())
        norms[precision] = abs(results[1] / results[0] - 1)
    return {"far": far, "norms": norms}


# --- models and options ---------------------------------------------------------------------------------------------


@slow
def modules_in_fp32():
    """Batch norms stay replicated, and a module of `keep_fp32` is a unit; only the normalisation differs from one process."""
    run = Run("engine", "bf16-lean,keep_fp32=head", model=lambda: Net(batch_norm=True), accumulate=2)
    for _ in range(3):
        run.window(2)
    kinds = {n: (str(p.dtype), is_sharded(p)) for n, p in run.engine.params.items()}
    sums = [None] * WORLD
    dist.all_gather_object(
        sums, [float(local(run.engine.params[n]).detach().sum()) for n in ("norm.weight", "norm.bias")]
    )
    return {"kinds": kinds, "sums": sums, "head": run.engine.params["head.weight"].dtype is torch.float32}


@slow
def sixteen_bit_reductions():
    """`reduce=bf16` and `reduce=fp16`: the message has 16 bits, the sums over micro-batches 32."""
    far, sent = {}, {}
    for precision in (
        "bf16,reduce=bf16",
        "bf16-lean,reduce=bf16",
        "fp16,reduce=fp16,loss_scale=256",
        "fp16-lean,reduce=fp16,loss_scale=256",
    ):
        for accumulate in (1, 2):
            reference = single(precision, "moments", accumulate=accumulate)
            ours = Run("engine", precision, "moments", accumulate=accumulate)
            stock, dtypes = getattr(dist, REDUCE), set()

            def observed(*args, stock=stock, dtypes=dtypes, **kwargs):
                dtypes.add(str(kwargs["input"].dtype))
                return stock(*args, **kwargs)

            for run in (reference, ours):
                setattr(dist, REDUCE, observed)
                run.window(accumulate)
                setattr(dist, REDUCE, stock)
            far[f"{precision} {accumulate}"] = distance(ours.moments(), reference.moments())
            sent[f"{precision} {accumulate}"] = sorted(dtypes)
    return {"far": far, "sent": sent}


@case
def replicas_are_summed_as_the_truth_table_shows():
    """HSDP with `reduce=bf16`: the dtypes of the all-reduces of gradients, and the row of the truth table."""
    rows, sent, stock = {}, {}, dist.all_reduce
    shapes = ((WORLD, 1), (2, WORLD // 2)) if WORLD > 2 else ((WORLD, 1),)
    for shape in shapes:
        for accumulate in (1, 2):
            mesh, dtypes = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")), set()

            def observed(tensor, *args, dtypes=dtypes, **kwargs):
                if tensor.numel() > 10:  # of gradients
                    dtypes.add(str(tensor.dtype))
                return stock(tensor, *args, **kwargs)

            run = Run(
                "user", "bf16-lean,reduce=bf16", model=lambda mesh=mesh: sharded_by_user(mesh), accumulate=accumulate
            )
            dist.all_reduce = observed
            run.window(accumulate)
            dist.all_reduce = stock
            name = f"{shape[0]}x{shape[1]} {accumulate}"
            rows[name], sent[name] = dict(run.engine.truth().rows)["reduction"], sorted(dtypes)
    return {"rows": rows, "sent": sent}


@case
def units_and_optimizers():
    """Which modules are units, that groups and schedulers are rebound, and several parameter groups."""
    torch.manual_seed(0)
    model = Net()
    groups = [
        {"params": list(model.blocks.parameters()), "lr": 0.2},
        {"params": [*model.entry.parameters(), *model.head.parameters()]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = halfstep.Engine(model, optimizer, "bf16-lean", backend=FSDP(shard=["blocks.*"]), scheduler=scheduler)
    units = [unit.name for unit in engine.backend._groups.units]
    for _ in range(2):
        with engine.forward():
            loss = model(torch.ones(2, 4)).sum()
        engine.backward(loss)
        engine.step()
    by_class = Run("engine", backend=FSDP(shard=Block)).engine.backend._groups.units
    return {
        "units": units,
        "by_class": [unit.name for unit in by_class],
        "lr": [group["lr"] for group in optimizer.param_groups],
        "rebound": all(is_sharded(p) for group in optimizer.param_groups for p in group["params"]),
    }


@slow
def several_modules():
    """A dict of modules: each is a root, and a loose parameter stays on every rank."""
    far = {}
    masters = []
    for how in ("single", "engine"):
        torch.manual_seed(0)
        members = {"one": Net(), "two": Net(), "shift": nn.Parameter(torch.zeros(()))}
        params = [*members["one"].parameters(), *members["two"].parameters(), members["shift"]]
        backend = "single" if how == "single" else "fsdp"
        engine = halfstep.Engine(
            members,
            torch.optim.SGD(params, lr=0.1),
            "bf16",
            accumulate=WORLD if how == "single" else 1,
            backend=backend,
        )
        for step in range(3):
            for rank in range(WORLD) if how == "single" else (RANK,):
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
                with engine.forward():
                    loss = (members["one"](x) - members["two"](x) + members["shift"] - 1).square().mean()
                engine.backward(loss)
                engine.step()
        masters.append({n: whole(v) for n, v in engine.masters().items()})
    far["members"] = distance(masters[1], masters[0])
    return {"far": far}


@slow
def shared_weights():
    """Two layers that share a weight belong to one unit."""

    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.blocks[1].up.weight = self.blocks[0].up.weight

    reference, ours = single(model=Tied), Run("engine", model=Tied)
    for run in (reference, ours):
        for _ in range(3):
            run.window()
    return {"far": distance(ours.masters(), reference.masters())}


class TiedNet(Net):
    """The last layer has the weight of the first."""

    def __init__(self):
        super().__init__()
        self.exit = nn.Linear(4, DIM, bias=False)
        self.exit.weight = self.entry.weight

    def forward(self, x):
        return self.exit(x) * super().forward(x)


class Outer(nn.Module):
    """A module around the units."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)


@slow
def fp32_on_16_bit_weights():
    """`compute_fp32` on a part of the root, a unit, a tied weight, and a module with units inside; and on shards of the user."""
    far, formats, dtypes = {}, {}, {}
    for how, pattern, model, inner in (
        ("engine", "head", Net, "head"),
        ("user", "head", None, "head"),
        ("engine", "blocks.0", Net, "blocks.0.up"),
        ("engine", "exit", TiedNet, "exit"),
        ("engine", "net", Outer, "net.blocks.1.down"),
    ):
        settings = {"precision": f"bf16-lean,compute_fp32={pattern}", "optimizer": "moments", "accumulate": 2}
        reference, ours = single(**settings, model=model), Run(how, **settings, model=model)
        seen = []
        hook = ours.model.get_submodule(inner).register_forward_hook(
            lambda m, _, out, seen=seen: seen.append((m.weight.dtype, out.dtype))
        )
        for run in (reference, ours):
            run.window(2)
        hook.remove()
        name = f"{how} {pattern}"
        formats[name] = sorted({str(out) for _, out in seen})
        dtypes[name] = sorted(
            {str(p.dtype) for p in ours.engine.params.values()}
            | {str(weight) for weight, _ in seen if pattern == inner}
        )
        far[name] = distance(ours.moments(), reference.moments())
    return {"far": far, "formats": formats, "dtypes": dtypes}


def message_of(function):
    """The text of the SettingError that a function raises."""
    try:
        function()
    except SettingError as error:
        return str(error)
    return None


@case
def rejections():
    """What contradicts the policy or is not supported, by name."""

    def user(precision="bf16", **settings):
        return lambda: Run("user", precision, model=lambda: sharded_by_user(**settings))

    def with_state():
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        halfstep.Engine(model, optimizer, "fp32", backend="fsdp")

    def mixed():
        model = Net(batch_norm=True)
        fully_shard(model)
        halfstep.Engine(model, torch.optim.SGD(model.parameters()), "bf16-lean")

    def divided():
        model = sharded_by_user()
        model.set_gradient_divide_factor(2.0)
        halfstep.Engine(model, torch.optim.SGD(model.parameters()), "bf16")

    def run_before():
        model = sharded_by_user()
        model(torch.ones(1, 4)).sum().backward()
        halfstep.Engine(model, torch.optim.SGD(model.parameters()), "bf16-lean")

    def adafactor():
        run = Run("user", "fp32")
        model = sharded_by_user()
        run.engine.close()
        engine = halfstep.Engine(model, torch.optim.Adafactor(model.parameters()), "fp32")
        with engine.forward():
            loss = model(torch.ones(2, 4)).sum()
        engine.backward(loss)
        engine.step()

    return {
        "messages": {
            "param_dtype": message_of(user(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))),
            "reduce_dtype": message_of(user(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))),
            "lean_dtype": message_of(user("fp16-lean", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))),
            "output_dtype": message_of(user(mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32))),
            "offload": message_of(user(offload_policy=CPUOffloadPolicy(pin_memory=False))),
            "state": message_of(with_state),
            "mixed": message_of(mixed),
            "divide": message_of(divided),
            "run": message_of(run_before),
            "shard": message_of(lambda: Run("user", model=sharded_by_user, backend=FSDP(shard=[Block]))),
            "unknown": message_of(lambda: Run("engine", backend=FSDP(shard=["layers.*"]))),
            "mp_policy": message_of(lambda: FSDP(mp_policy=None)),
            "release": message_of(lambda: Run("engine", "bf16-lean", gradient_release=True)),
            "graphs": message_of(lambda: Run("engine", compile="reduce-overhead")),
            "single": message_of(lambda: Run("user", backend="single")),
            "adafactor": message_of(adafactor),
        }
    }


# --- checkpoints ----------------------------------------------------------------------------------------------------


@slow
def checkpoints_move_between_one_process_and_shards():
    """Saved by one, continued by the other: the state is the same, and so is the next window."""
    far, equal = {}, {}
    layouts = (
        "fp32",
        "bf16",
        "fp16,loss_scale=dynamic(init_scale=64)",
        "bf16-lean",
        "fp16-lean,master=fp32",
        "bf16-lean,states=8bit",
    )
    for number, (precision, optimizer) in enumerate(
        [*((p, "AdamW") for p in layouts), ("bf16-lean", "Custom"), ("fp32", "Custom")]
    ):
        settings = {"ema": 0.5, "accumulate": 2}
        runs = {
            "single": single(precision, optimizer, **settings),
            "engine": Run("engine", precision, optimizer, **settings),
        }
        for how, run in runs.items():
            for _ in range(2):
                run.window(2)
            path = FOLDER / f"{number}-{how}-{RANK if how == 'single' else 'all'}"
            run.engine.save(path, note=how)
            other = (
                Run("engine", precision, optimizer, **settings)
                if how == "single"
                else single(precision, optimizer, **settings)
            )
            note = other.engine.load(path)["note"]
            same = all(torch.equal(a, b) for a, b in zip(run.masters().values(), other.masters().values(), strict=True))
            averages = zip(run.engine.ema.averages.values(), other.engine.ema.averages.values(), strict=True)
            same = same and all(torch.equal(whole(a), whole(b)) for a, b in averages)
            equal[f"{precision} {optimizer} {how}"] = (
                same and note == how and other.engine.progress == run.engine.progress
            )
            run.window(2)
            other.num_windows = 2
            other.window(2)
            far[f"{precision} {optimizer} {how}"] = distance(other.masters(), run.masters())
    return {"far": far, "equal": equal}


@case
def resume_is_exact():
    """At the same number of ranks a resumed run is the uninterrupted one, bit for bit; the scale is not advanced by saving."""
    equal = {}
    for precision in ("fp16", "bf16-lean,states=8bit"):
        settings = {"accumulate": 2, "max_norm": 1.0}
        run = Run("engine", precision, "AdamW", **settings)
        for _ in range(2):
            run.window(2)
        state = run.engine.scaler.state_dict()
        path = run.engine.save(FOLDER / f"exact-{precision}")
        kept = state == run.engine.scaler.state_dict()
        run.window(2)
        again = Run("engine", precision, "AdamW", **settings)
        again.engine.load(path)
        kept = kept and again.engine.scaler.state_dict() == state
        again.num_windows = 2
        again.window(2)
        equal[precision] = kept and digest(run.engine) == digest(again.engine)
    return {"equal": equal}


@case
def a_save_that_fails_raises_on_every_rank():
    """Where the folder cannot be written."""
    run = Run("engine")
    (FOLDER / "file").write_text("not a folder")
    try:
        run.engine.save(FOLDER / "file" / "checkpoint")
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": None}


def main():
    """Run every case, or those that are named."""
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=120))
    for name, function in CASES.items():
        if name in CHOSEN if CHOSEN else name not in SLOW:
            start = time.perf_counter()
            line = {"case": name, "rank": RANK, **function()}
            print(json.dumps(line | {"seconds": round(time.perf_counter() - start, 2)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import os

    FOLDER, CHOSEN = Path(sys.argv[1]), sys.argv[2:]
    RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    main()
