"""Cases of `Engine(backend="ddp")` on ranks: options of the Engine, models of several kinds, and what is rejected."""

import math
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from data_parallel_laws import examples, small_model
from data_parallel_windows import SMALL
from halfstep.backends import DataParallel
from rank_cases import case, everything, hashed, same, slow_case


def build(model, precision="fp32", backend="ddp", optimizer=torch.optim.AdamW, **options):
    """An Engine over a model."""
    return halfstep.Engine(model, optimizer(model.parameters(), lr=1e-2), precision, backend=backend, **options)


def train(engine, model, windows=3, accumulate=1, first=0, loss=F.cross_entropy):
    """Some windows on this rank's examples; returns the last result."""
    for number in range(first, first + windows):
        for i in range(accumulate):
            x, y = examples(number, i, dist.get_rank())
            with engine.forward():
                value = loss(model(x), y)
            engine.backward(value)
            result = engine.step()
    return result


def message(function):
    """The error of a call, or "nothing"."""
    try:
        function()
    except halfstep.HalfstepError as error:
        return str(error)
    return "nothing"


@case
def rank_0_decides():
    """Models that start differently on every rank have the weights and buffers of rank 0."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    model[1].running_mean.normal_()
    first = hashed(*model.state_dict().values())
    build(model).close()
    after = hashed(*model.state_dict().values())
    return {"same": same(after), "kept": after == first}


@case
def auto():
    """A plain model in a process group of several ranks is trained by ddp."""
    engine = build(small_model(), backend="auto")
    engine.close()
    return {"name": type(engine.backend).__name__, "ranks": engine.backend.context().world_size}


@case
def differences():
    """Whatever differs between ranks is an error on all of them, with both values."""
    rank, messages = dist.get_rank(), {}
    wide = nn.Linear(8, 4 + rank)
    messages["shape"] = message(lambda: build(wide))
    messages["precision"] = message(lambda: build(small_model(), "bf16" if rank else "fp32"))
    messages["accumulate"] = message(lambda: build(small_model(), accumulate=2 + rank))
    messages["max_norm"] = message(lambda: build(small_model(), max_norm=1.0 if rank else None))
    messages["class"] = message(lambda: build(small_model(), optimizer=torch.optim.SGD if rank else torch.optim.AdamW))
    messages["lr"] = message(
        lambda: build(small_model(), optimizer=lambda p, lr: torch.optim.SGD(p, lr=0.1 + rank / 10))
    )
    frozen = small_model()
    frozen[0].bias.requires_grad_(rank == 0)
    messages["frozen"] = message(lambda: build(frozen))
    stateful = small_model()
    optimizer = torch.optim.Adam(stateful.parameters())
    stateful(examples(0, 0, rank)[0]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    messages["state"] = message(lambda: halfstep.Engine(stateful, optimizer, "fp32", backend="ddp"))
    return {"messages": messages, "same": same(str(messages))}


@case
def optimizer_state():
    """A state that is equal on all ranks is continued."""
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    model(examples(0, 0, 0)[0]).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    engine = halfstep.Engine(model, optimizer, "fp32", backend="ddp")
    train(engine, model)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    return {"same": same(everything(engine)), "steps": sorted(steps)}


@case
def batch_norm():
    """Running statistics are those of rank 0 after each window, and a skipped window leaves them as they were."""
    rank, torch_seed = dist.get_rank(), torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    engine, fine = build(model, accumulate=2), bool(torch_seed)
    for number in range(4):
        expected = nn.BatchNorm1d(4)
        expected.load_state_dict(model[1].state_dict())
        before = hashed(*model[1].buffers())
        for i in range(2):
            x, y = examples(number, i, 0)
            expected(model[0](x.detach()))
            x, y = examples(number, i, rank)
            with engine.forward():
                loss = F.cross_entropy(model(x), y) * (math.inf if number == 2 and rank == 1 else 1.0)
            engine.backward(loss)
            result = engine.step()
        fine = fine and same(everything(engine)) and result.skipped == (number == 2)
        if result.skipped:
            fine = fine and hashed(*model[1].buffers()) == before
        else:
            fine = fine and torch.allclose(model[1].running_mean, expected.running_mean, atol=1e-6)
            fine = fine and int(model[1].num_batches_tracked) == int(expected.num_batches_tracked)
    engine.close()
    return {"fine": fine}


@case
def frozen_and_unfrozen():
    """Parameters that are frozen are not sent; freezing and unfreezing on all ranks works in the middle of a run."""
    model = small_model()
    model[0].requires_grad_(requires_grad=False)
    engine, sent, fine, before = build(model, backend=DataParallel(**SMALL)), [], True, 0
    for number, trained in enumerate((False, False, True, True, False)):
        model[0].requires_grad_(trained)
        old = model[0].weight.detach().clone()
        train(engine, model, 1, first=number)
        sent.append(engine.backend.reductions.message_bytes - before)
        before = engine.backend.reductions.message_bytes
        fine = fine and same(everything(engine)) and (not torch.equal(old, model[0].weight)) == trained
    engine.close()
    return {"sent": sent, "fine": fine}


@case
def wrapped_by_the_user():
    """Lean presets and other reduce formats on a DistributedDataParallel: bit for bit as without the wrapper."""
    outcomes = {}
    for precision in ("bf16-lean", "fp16-lean", "bf16,reduce=bf16"):
        hashes = []
        for wrap in (False, True):
            model = small_model()
            called = nn.parallel.DistributedDataParallel(model) if wrap else model
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            engine = halfstep.Engine(called, optimizer, precision, accumulate=2, backend="auto")
            train(engine, called, accumulate=2)
            hashes.append(everything(engine))
            name, count = type(engine.backend).__name__, engine.backend.reductions.count
            engine.close()
        outcomes[precision] = [hashes[0] == hashes[1], same(hashes[1]), name, count, called.require_backward_grad_sync]
    hooked = nn.parallel.DistributedDataParallel(small_model())
    hooked.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future())
    static = nn.parallel.DistributedDataParallel(small_model(), static_graph=True)
    return {
        "outcomes": outcomes,
        "hook": message(lambda: build(hooked, "bf16-lean", "auto")),
        "static": message(lambda: build(static, "bf16-lean", "auto")),
    }


@case
def rejections():
    """Sparse gradients and gradient release are rejected by name."""
    sparse = nn.Sequential(nn.Embedding(4, 4, sparse=True))
    release = message(lambda: build(small_model(), gradient_release=True))
    functional = nn.ParameterDict({"table": nn.Parameter(torch.ones(4, 4))})
    engine = build(functional, optimizer=torch.optim.SGD)
    with engine.forward():
        loss = F.embedding(torch.tensor([1, 2]), functional["table"], sparse=True).sum()
    engine.backward(loss)
    late = message(engine.step)
    return {"sparse": message(lambda: build(sparse)), "release": release, "late": late}


@case
def engine_options():
    """EMA, recomputation, a schedule, unscale(), evaluate() and checkpoints: the same state on every rank, saved once."""
    model = nn.Sequential(
        nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)), nn.Linear(8, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    engine = halfstep.Engine(
        model, optimizer, "bf16-lean", ema=0.9, recompute="cheap", scheduler=scheduler, max_norm=1.0, accumulate=2, backend="ddp"
    )  # fmt: skip
    train(engine, model, accumulate=2)
    x, y = examples(9, 0, dist.get_rank())
    with engine.forward():
        loss = F.cross_entropy(model(x), y)
    engine.backward(loss)
    engine.unscale()
    unscaled = same(hashed(*(p.grad for p in model.parameters())))
    engine.step(last=True)
    with engine.evaluate(ema=True):
        evaluated = same(hashed(model(examples(0, 0, 0)[0])))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = engine.save(Path(folder[0]) / "saved")
    dist.barrier()
    before = everything(engine)
    train(engine, model, accumulate=2)
    engine.load(path)
    restored = everything(engine) == before
    row = dict(engine.truth().rows)["reduction"]
    engine.close()
    return {"unscaled": unscaled, "evaluated": evaluated, "restored": restored, "same": same(before), "row": row}


class Shared(nn.Module):
    """A weight that two re-entrant checkpoints use: its gradient arrives twice in one backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, **options):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, **options) if options else self.shared(x)
        return x


@case
def re_entrant_checkpoints():
    """A gradient that arrives in parts is complete before the update, on every rank."""
    hashes = []
    for options in ({}, {"use_reentrant": True}):
        model = Shared()
        engine = build(model, backend=DataParallel(**SMALL), optimizer=torch.optim.SGD)
        for number in range(4):
            x, _ = examples(number, 0, dist.get_rank())
            with engine.forward():
                loss = model(x, **options).pow(2).mean()
            engine.backward(loss)
            engine.step()
        hashes.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        fine, count = same(everything(engine)), engine.backend.reductions.count
        engine.close()
    return {"error": float((hashes[0] - hashes[1]).abs().max()), "same": fine, "reductions": count}


@case
def watched():
    """A watch that replays skipped steps neither waits for other ranks nor disturbs them."""
    model, watch = small_model(), halfstep.Watch(replay=True)
    engine = build(model, "fp16", watch=watch, scaler=halfstep.LossScaler(hysteresis=1))
    for number in range(4):
        x, y = examples(number, 0, dist.get_rank())

        factor = math.inf if number == 2 and dist.get_rank() == 1 else 1.0

        def loss(x=x, y=y, factor=factor):
            return F.cross_entropy(model(x), y) * factor

        with engine.forward():
            value = loss()
        engine.backward(value)
        result = engine.step(replay=loss)
    fine = same(everything(engine)) and not result.skipped
    sentences = [autopsy.sentence for autopsy in watch.autopsies]
    engine.close()
    return {"fine": fine, "sentences": sentences}


@slow_case
def compiled():
    """Hooks of the reducer survive torch.compile of the model and of its blocks."""
    errors, eager = {}, None
    for compile_ in (False, True, "blocks"):
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        model = nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 4))
        engine = build(model, accumulate=2, compile=compile_, backend=DataParallel(**SMALL), optimizer=torch.optim.SGD)
        train(engine, model, accumulate=2)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        fine = same(everything(engine)) and engine.backend.reductions.count == 3
        engine.close()
        eager = weights if eager is None else eager
        errors[str(compile_)] = float((weights - eager).abs().max()) if fine else math.inf
    return {"errors": errors}
