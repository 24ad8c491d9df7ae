"""Cases of `Engine(backend="ddp")` on ranks: random numbers in checkpoints, and statistics of batch norms."""

import random
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as reduced
import torch.nn.functional as F
from torch import nn

from data_parallel_laws import examples
from data_parallel_options import build, message, train
from rank_cases import case, everything, same, slow_case


def shared_folder():
    """The same new folder on every rank."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def dropping(*, wrapped=False, backend="auto"):
    """A model with dropout, as the user calls it, and its Engine."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    called = nn.parallel.DistributedDataParallel(model) if wrapped else model
    return called, build(called, "fp32", backend)


def drawn():
    """The next random numbers of this rank."""
    return str((torch.rand(3).tolist(), random.random()))


@case
def random_numbers_of_each_rank():
    """A run with dropout that continues from its checkpoint, plain and in DistributedDataParallel, and checkpoints of other sizes."""
    rank, folder, fine = dist.get_rank(), shared_folder(), {}
    for name, wrapped in (("plain", False), ("wrapped", True)):
        model, engine = dropping(wrapped=wrapped)
        torch.manual_seed(100 + rank)
        random.seed(100 + rank)
        train(engine, model, windows=2)
        path = engine.save(folder / name, number=rank)
        train(engine, model, windows=2, first=2)
        expected = everything(engine) + drawn()
        engine.close()
        model, engine = dropping(wrapped=wrapped)
        fine[f"{name}: extra"] = engine.load(path) == {"number": rank}
        train(engine, model, windows=2, first=2)
        fine[f"{name}: resumed"] = everything(engine) + drawn() == expected
        fine[f"{name}: own numbers"] = not same(drawn())
        taken = message(lambda engine=engine, path=path: engine.save(path))
        fine[f"{name}: one error on all"] = "exists" in taken and ("rank 0: " in taken) == bool(rank)
        engine.close()
    model, alone = dropping(backend="single")
    if rank == 0:
        alone.save(folder / "alone")
    dist.barrier()
    _, engine = dropping()
    draws = []
    for _ in range(2):
        engine.load(folder / "alone")
        draws.append(drawn())
    fine["other size: own numbers"] = not same(draws[0])
    fine["other size: repeatable"] = draws[0] == draws[1]
    engine.close()
    fine["to one process"] = alone.load(folder / "plain") == {"number": 0}
    alone.close()
    return {"fine": fine}


# --- batch norms ------------------------------------------------------------------------------------------------------


class Synchronised(nn.BatchNorm1d):
    """What nn.SyncBatchNorm computes, which takes GPU tensors only: the statistics of the batches of all ranks."""

    def forward(self, x):
        own = torch.cat([x.sum(0), x.square().sum(0), x.new_full((1,), len(x))])
        *sums, number = reduced.all_reduce(own).split([self.num_features, self.num_features, 1])
        mean, square = (each / number for each in sums)
        variance = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * number / (number - 1), self.momentum)
            self.num_batches_tracked += 1
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


def normed(kind, device):
    """A model with a batch norm of this kind, the same on every call; a bias before it would have no gradient but noise."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6, bias=False), kind(6), nn.Tanh(), nn.Linear(6, 4)).to(device)


def against_whole_batches(kind, device="cpu", *, own=examples, accumulate=2):
    """Train three windows on all ranks, and on this process alone with the whole batches; returns both models."""
    models = normed(kind, device), normed(nn.BatchNorm1d, device)
    engines = [build(m, "fp32", b, accumulate=accumulate) for m, b in zip(models, ("ddp", "single"), strict=True)]
    for number in range(3):
        for i in range(accumulate):
            parts = [own(number, i, rank) for rank in range(dist.get_world_size())]
            whole = tuple(map(torch.cat, zip(*parts, strict=True)))
            for model, engine, batch in zip(models, engines, (parts[dist.get_rank()], whole), strict=True):
                x, y = (part.to(device) for part in batch)
                with engine.forward():
                    loss = F.cross_entropy(model(x), y)
                engine.backward(loss)
                engine.step()
    is_same = same(everything(engines[0]))
    for engine in engines:
        engine.close()
    return models, is_same


def farthest(tensors, others):
    """The largest difference of two lists of tensors."""
    return max(float((a - b).detach().abs().max()) for a, b in zip(tensors, others, strict=True))


def compared(models, is_same):
    """What the cases of synchronised batch norms report."""
    ours, theirs = models
    return {
        "weights": farthest(ours.parameters(), theirs.parameters()),
        "statistics": farthest(ours.buffers(), theirs.buffers()),
        "same": is_same,
    }


@case
def synchronised_batch_norm():
    """Statistics over ranks, computed by the model: weights and buffers are those of one process on the whole batches."""
    return compared(*against_whole_batches(Synchronised))


@slow_case
def sync_batch_norm_of_torch():
    """The same with nn.SyncBatchNorm, on ranks that share a GPU."""
    return compared(*against_whole_batches(nn.SyncBatchNorm, "cuda"))


@case
def batch_norm_of_equal_batches():
    """Ranks whose examples are the same in another order have the statistics of the whole batch, and so its weights and buffers."""

    def rolled(number, i, rank):
        return tuple(part.roll(rank, 0) for part in examples(number, i, 0))

    (ours, theirs), is_same = against_whole_batches(nn.BatchNorm1d, own=rolled)
    # The unbiased variance of n examples is n / (n - 1) times the biased one, which is equal.
    number, steps = 6, 6
    start = (1 - ours[1].momentum) ** steps  # what is left of the initial variance
    biased = [
        (model[1].running_var - start) * (size - 1) / size
        for model, size in ((ours, number), (theirs, number * dist.get_world_size()))
    ]
    return {
        "weights": farthest(ours.parameters(), theirs.parameters()),
        "mean": farthest([ours[1].running_mean], [theirs[1].running_mean]),
        "variance": farthest(biased[:1], biased[1:]),
        "batches": [int(model[1].num_batches_tracked) for model in (ours, theirs)],
        "same": is_same,
    }
