"""Cases of `Engine(backend="ddp")` on ranks, each compared with a run of one process on the batches of all ranks.

With beta1 = beta2 = 0 the first moment of Adam is the gradient that reached the optimizer.
"""

import math
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import halfstep
from data_parallel_windows import SMALL
from halfstep.backends import DataParallel
from rank_cases import case, everything, same


def small_model():
    """A network that has every kind of gradient in few parameters, the same on every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def examples(step, micro_batch, rank, number=6):
    """The examples of one rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    return torch.randn(number, 8, generator=generator), torch.randint(4, (number,), generator=generator)


class Pair:
    """The same training on all ranks together, and on this process alone with the batches of all ranks."""

    def __init__(self, precision, *, accumulate=1, scaler=None, max_norm=None, lr=1e-2, **options):
        self.accumulate, self.engines, self.models = accumulate, [], []
        for backend in (DataParallel(**SMALL), "single"):
            model = small_model()
            optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.0, 0.0))
            settings = {} if scaler is None else {"scaler": scaler()}
            engine = halfstep.Engine(
                model,
                optimizer,
                precision,
                accumulate=accumulate,
                max_norm=max_norm,
                backend=backend,
                **settings,
                **options,
            )
            self.engines.append(engine)
            self.models.append(model)

    def step(self, number, factors=None, weights=None):
        """One window of both; `factors` multiply the loss of each rank, `weights` are those of its micro-batches."""
        ranks, results = range(dist.get_world_size()), []
        for engine, model, own in zip(self.engines, self.models, ([dist.get_rank()], ranks), strict=True):
            for i in range(self.accumulate):
                data = [examples(number, i, rank) for rank in own]
                shares = [1.0 if weights is None else weights[rank] for rank in own]
                with engine.forward():
                    losses = [
                        F.cross_entropy(model(x), y) * (1 if factors is None else factors[r])
                        for r, (x, y) in zip(own, data, strict=True)
                    ]
                    loss = sum(share * each for share, each in zip(shares, losses, strict=True)) / sum(shares)
                engine.backward(loss, None if weights is None else sum(shares))
                result = engine.step()
            results.append(result)
        return results

    def moments(self):
        """The gradients that reached both optimizers, in fp32."""
        return [[e.optimizers[0].state[p]["exp_avg"].float().clone() for p in e.params.values()] for e in self.engines]

    def error(self):
        """The largest difference of the gradients, relative to the largest of the gradients."""
        ours, theirs = self.moments()
        largest = max(float(t.abs().max()) for t in theirs)
        return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / largest

    def report(self, **more):
        """What every case reports."""
        reductions = self.engines[0].backend.reductions
        more |= {
            "same": same(everything(self.engines[0])),
            "reductions": reductions.count,
            "bytes": reductions.message_bytes,
        }
        more["row"] = dict(self.engines[0].truth().rows)["reduction"]
        for engine in self.engines:
            engine.close()
        return more


@case
def gradients():
    """The gradient that reached the optimizer, in every preset and reduce format, in the first windows."""
    errors = {}
    for precision in ("fp32", "bf16", "fp16", "bf16-lean", "fp16-lean", "bf16,reduce=bf16", "fp16-lean,reduce=fp16"):
        for accumulate, weights in ((1, None), (2, [3.0, 5.0, 1.0, 9.0])):
            pair = Pair(precision, accumulate=accumulate, max_norm=1.0, lr=1e-4)
            worst = 0.0
            for number in range(2):  # the first reduces when the window closes, the second during backward
                results = pair.step(number, weights=weights)
                worst = max(worst, math.inf if any(r.skipped for r in results) else pair.error())
            report = pair.report()
            fine = report["same"] and report["reductions"] == 2
            errors[f"{precision} {accumulate}"] = worst if fine else math.inf
    return {"errors": errors, "row": report["row"], "bytes": report["bytes"]}


@case
def loss_curve():
    """Fifty steps in fp32: the weights of both runs stay together."""
    pair, worst = Pair("fp32", accumulate=2, max_norm=1.0, lr=1e-3), 0.0
    for number in range(50):
        ours, theirs = pair.step(number)
        worst = max(worst, abs(ours.grad_norm - theirs.grad_norm) / theirs.grad_norm)
    ours, theirs = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in pair.models)
    return pair.report(norms=worst, weights=float((ours - theirs).abs().max()))


@case
def overflow_trace():
    """Overflows injected on some rank: scales and skips are those of one process."""
    traces = []
    for precision in ("fp16", "fp16-lean"):
        pair = Pair(precision, accumulate=2, scaler=lambda: halfstep.LossScaler(growth_interval=3, hysteresis=2))
        draw, ours, theirs = random.Random(5), [], []
        for number in range(20):
            rank = draw.randrange(dist.get_world_size())
            bad = draw.random() < 0.4
            factors = [math.inf if bad and r == rank else 1.0 for r in range(dist.get_world_size())]
            a, b = pair.step(number, factors)
            ours.append((a.skipped, a.scale))
            theirs.append((b.skipped, b.scale))
        report = pair.report(equal=ours == theirs, skips=sum(s for s, _ in ours), scales=len({s for _, s in ours}))
        traces.append(report)
    return {"traces": traces}


@case
def inf_on_one_rank():
    """An inf in the gradient of one random parameter on one random rank: all skip, and no bit differs after any step."""
    outcomes = []
    for precision in ("fp32", "fp16-lean", "bf16-lean,reduce=bf16"):
        model = small_model()
        options = {"scaler": halfstep.LossScaler(max_skips=None)} if "fp16" in precision else {}
        engine = halfstep.Engine(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision, accumulate=2, ema=0.9, backend=DataParallel(**SMALL), **options
        )  # fmt: skip
        draw, wrong = random.Random(7), 0
        for number in range(20):
            rank, index, bad = draw.randrange(dist.get_world_size()), draw.randrange(6), draw.random() < 0.7
            param, micro_batch = list(model.parameters())[index], draw.randrange(2)
            for i in range(2):
                x, y = examples(number, i, dist.get_rank())
                with engine.forward():
                    loss = F.cross_entropy(model(x), y)
                mine = bad and i == micro_batch and rank == dist.get_rank()
                handle = param.register_hook(lambda g: g.index_fill(0, torch.tensor([0]), math.inf)) if mine else None
                engine.backward(loss)
                result = engine.step()
                if handle is not None:
                    handle.remove()
            wrong += result.skipped != bad
            wrong += not same(everything(engine))
        outcomes.append(wrong)
        engine.close()
    return {"wrong": outcomes}


@case
def natural_overflows():
    """A loss scale that starts far too high: ranks overflow by themselves, and always agree."""
    model = small_model()
    scaler = halfstep.LossScaler(init_scale=2.0**24, growth_interval=2, hysteresis=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    engine = halfstep.Engine(model, optimizer, "fp16-lean", scaler=scaler, backend="ddp")
    results, equal = [], True
    for number in range(20):
        x, y = examples(number, 0, dist.get_rank())
        with engine.forward():
            loss = F.cross_entropy(model(x * 10), y) * 30
        engine.backward(loss)
        result = engine.step()
        results.append(result.skipped)
        equal = equal and same(everything(engine) + str(result.skipped) + str(result.scale))
    engine.close()
    return {"skips": sum(results), "equal": equal}
