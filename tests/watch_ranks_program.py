"""One rank of watched runs: every case prints what it measured as one line of JSON.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/watch_ranks_program.py [CASE ...]
"""

import math
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

import halfstep
from halfstep.errors import SettingError
from halfstep.optim.shards import is_sharded
from rank_cases import case, everything, hashed, run_cases, same

HUGE = 1e30  # overflows fp16, in the forward pass
DIM = 5  # odd: the shards of two ranks have other sizes, and one rank has nothing of the last bias


class Middle(nn.Module):
    """A layer that can be made to overflow."""

    def __init__(self):
        super().__init__()
        self.linear, self.gain = nn.Linear(DIM, DIM), 1.0

    def forward(self, x):
        return self.linear(x) * self.gain


class Net(nn.Module):
    """Three layers, dropout, and a buffer that every forward changes."""

    def __init__(self):
        super().__init__()
        self.entry, self.middle, self.head = nn.Linear(4, DIM), Middle(), nn.Linear(DIM, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.sends = False

    def forward(self, x):
        self.seen.add_(1)
        x = nn.functional.dropout(self.entry(x), 0.1, self.training)
        if self.sends:
            dist.all_reduce(torch.zeros(1))
        return self.head(nn.functional.gelu(self.middle(x)))


def batch(number, rank):
    """One batch of a rank."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 1, generator=generator)


class Run:
    """A model, its Engine and its Watch; `broken` maps (step from 0, rank) to the factor of the middle layer."""

    def __init__(
        self, backend="ddp", precision="fp16", *, broken=None, sends=False, replays=True, wraps=False, **watch
    ):
        torch.manual_seed(0)
        self.model, self.broken = Net(), broken or {}
        self.model.sends = sends
        called = nn.parallel.DistributedDataParallel(self.model) if wraps else self.model
        self.called, self.rank = called, dist.get_rank()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.events = []
        self.watch = halfstep.Watch(every=1, outlet=self.events.append, replay=replays, **watch)
        scaler = halfstep.LossScaler(hysteresis=1, init_scale=256) if precision.startswith("fp16") else None
        self.engine = halfstep.Engine(called, optimizer, precision, backend=backend, watch=self.watch, scaler=scaler)
        torch.manual_seed(7 + self.rank)  # dropout differs between ranks
        self.hashes = []

    def steps(self, count):
        """Train some steps."""
        for number in range(count):
            x, y = batch(number, self.rank)
            gain = self.broken.get((number, self.rank), 1.0)

            def loss(x=x, y=y, gain=gain):
                self.model.middle.gain = gain
                return (self.called(x) - y).square().mean()

            with self.engine.forward():
                value = loss()
            self.engine.backward(value)
            self.engine.step(replay=loss)
            own = [p.to_local() if is_sharded(p) else p for p in self.model.parameters()]
            self.hashes.append(hashed(*own, self.model.seen, torch.get_rng_state()))
        return self

    def close(self):
        """Close it; what the Watch knows."""
        state = everything(self.engine) if self.engine.backend.name == "ddp" else ""
        self.engine.close()
        autopsies = [
            {"rank": a.rank, "module": a.module, "cause": a.cause, "step": a.step, "text": str(a)}
            for a in self.watch.autopsies
        ]
        skips = [e.as_dict() for e in self.events if e.kind == "skip"]
        reported = [e.rank for e in self.events if e.kind == "autopsy"]
        return {
            "autopsies": autopsies,
            "skips": skips,
            "reported": reported,
            "same": same(state),
            "hashes": self.hashes,
        }


@case
def one_rank_overflows():
    """An overflow on rank 1 is examined there, named on both ranks, and training continues as without the watch."""
    broken = {(2, 1): HUGE, (3, 0): HUGE}
    watched = Run(broken=broken).steps(5).close()
    plain = Run(broken=broken, replays=False).steps(5).close()
    return {**watched, "undisturbed": watched.pop("hashes") == plain["hashes"]}


@case
def last_step_overflows():
    """The autopsy of the last step arrives, too."""
    return Run(broken={(1, 1): HUGE}).steps(2).close()


@case
def messages_in_the_model():
    """A model that sends messages itself is not replayed, and nobody waits."""
    return Run(broken={(1, 1): HUGE}, sends=True).steps(3).close()


@case
def wrapped_model():
    """A model in DistributedDataParallel is not replayed."""
    return Run("auto", broken={(1, 1): HUGE}, wraps=True).steps(3).close()


@case
def sharded_model():
    """A sharded model is not replayed, and the rank that overflowed is named, whoever owns the shard."""
    return Run("fsdp", broken={(1, 1): HUGE, (2, 0): HUGE}).steps(4).close()


@case
def sharded_statistics():
    """Samples of shards are those of the whole model in one process with all the data."""
    reports = {}
    for precision in ("fp32", "bf16-lean"):
        samples = {}
        for backend in ("ddp", "fsdp"):
            run = Run(backend, precision).steps(3)
            run.close()
            samples[backend] = run.watch.samples[-1]
        pairs = [
            (samples["ddp"].weights, samples["fsdp"].weights),
            (samples["ddp"].gradients, samples["fsdp"].gradients),
        ]
        error, numels = 0.0, []
        for one, other in pairs:
            for name, stats in one.items():
                mine = other[name]
                numels.append(stats.numel == mine.numel)
                for value in ("largest", "smallest"):
                    error = max(error, abs(getattr(stats, value) / getattr(mine, value) - 1))
        ratios = [abs(samples["fsdp"].updates[n].ratio / u.ratio - 1) for n, u in samples["ddp"].updates.items()]
        lost = [samples["fsdp"].updates[n].moving == u.moving for n, u in samples["ddp"].updates.items()]
        text = repr([(s.largest, s.nonfinite) for s in samples["fsdp"].gradients.values()])
        reports[precision] = {
            "error": error, "numels": all(numels), "ratios": max(ratios), "moving": all(lost), "same": same(text),
        }  # fmt: skip
    return reports


@case
def watches_that_differ():
    """A watch on one rank only is an error at the start, on every rank, where the model is sharded; else it is not."""
    rank, errors = dist.get_rank(), {}
    for backend in ("ddp", "fsdp"):
        model = Net()
        watch = halfstep.Watch() if rank == 0 else None
        try:
            halfstep.Engine(
                model, torch.optim.SGD(model.parameters(), 0.1), "fp32", backend=backend, watch=watch
            ).close()
        except SettingError as error:
            errors[backend] = str(error)
    return {"errors": errors}


def guarded(shard, group, wraps=False, fused=False):
    """A user's own loop with a Guard, where rank 1 has a NaN in step 1; its skips and whether ranks stay equal."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Net()
    if shard:
        fully_shard(model)
    called = nn.parallel.DistributedDataParallel(model) if wraps else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    guard = halfstep.Guard(optimizer, process_group=group)
    for number in range(3):
        x, y = batch(number, dist.get_rank())
        if number == 1 and dist.get_rank() == 1:
            x = x * math.nan
        (called(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [p.full_tensor() if is_sharded(p) else p for p in model.parameters()]
    finite = all(bool(p.isfinite().all()) for p in whole)
    return [guard.counts.skips, finite and same(hashed(*whole))]


@case
def guards():
    """A Guard takes the same decision on every rank, in a DDP and an FSDP2 loop; a sharded optimizer needs the group."""
    group = dist.group.WORLD
    report = {
        "ddp": guarded(False, None, wraps=True),
        "ddp_fused": guarded(False, None, wraps=True, fused=True),
        "fsdp": guarded(True, group),
        "error": "",
    }
    try:
        guarded(True, None)
    except SettingError as error:
        report["error"] = str(error)
    return report


@case
def attached():
    """Watch.attach in a user's own DDP loop sees the same on every rank, and events have the rank; of shards it sees the whole."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    watch = halfstep.Watch(model, every=1).attach(optimizer, scaler)
    for number in range(3):
        x, y = batch(number, dist.get_rank())
        if number == 1 and dist.get_rank() == 1:
            x = x * math.nan
        scaler.scale((model(x) - y).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    watch.close()
    text = repr([(s.name, s.largest) for s in watch.samples[-1].gradients.values()])
    numels = {name: p.numel() for name, p in Net().named_parameters()}
    sharded = fully_shard(Net())
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    whole = halfstep.Watch(sharded, every=1).attach(optimizer)
    x, y = batch(0, dist.get_rank())
    (sharded(x) - y).square().mean().backward()
    optimizer.step()
    whole.close()
    is_whole = {s.name: s.numel for s in whole.samples[-1].gradients.values()} == numels
    return {"skips": [e.as_dict() for e in watch.events if e.kind == "skip"], "same": same(text), "whole": is_whole}


if __name__ == "__main__":
    # A user would read them on every rank of a sharded run.
    warnings.filterwarnings("error", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    run_cases(sys.argv[1:])
