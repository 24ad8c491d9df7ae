"""One rank of DistributedDataParallel runs under the Engine: every case prints what it measured as one line of JSON.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/ddp_program.py

The gradient of the model is its input, so that the mean over all micro-batches of all ranks is known exactly, and the update
is the gradient itself.
"""

import contextlib
import datetime as dt
import json
import math
import random

import torch
import torch.distributed as dist
from torch import nn

import halfstep
from halfstep.backends.agreement import Agreement

CASES = {}
NUM_RANKS = 2


def case(function):
    """Register a case under its name."""
    CASES[function.__name__] = function
    return function


class Slope(nn.Module):
    """A model whose gradient is its input; `spare` is used only where a case asks for it."""

    def __init__(self, spare=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        if spare:
            self.spare = nn.Parameter(torch.ones(3))

    def forward(self, slope, use_spare=False):
        loss = (self.weight * slope).sum()
        return loss + self.spare.sum() if use_spare else loss


class Run:
    """A wrapped model with its Engine, counting how often gradients and small messages cross ranks."""

    def __init__(self, model=None, precision="fp32", accumulate=4, scaler=None, **options):
        self.rank, self.num_reductions, self.num_messages = dist.get_rank(), 0, 0
        self.model = model or Slope()
        self.wrapped = nn.parallel.DistributedDataParallel(self.model, **options)
        self.wrapped.register_comm_hook(None, self._count)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.engine = halfstep.Engine(self.wrapped, optimizer, precision, accumulate=accumulate, scaler=scaler)
        self.block = self.engine.forward
        self.num_windows, self.errors, self.skips = 0, [], []

    def _count(self, _state, bucket):
        self.num_reductions += 1
        reduced = dist.all_reduce(bucket.buffer().div_(NUM_RANKS), async_op=True)
        return reduced.get_future().then(lambda future: future.value()[0])

    def slope(self, rank, i):
        """The gradient of one micro-batch."""
        generator = torch.Generator().manual_seed(1000 * self.num_windows + 10 * i + rank)
        return torch.randn(4, generator=generator)

    def micro_batch(self, i, weight, *, last):
        """One micro-batch of this rank."""
        with self.block():
            loss = self.wrapped(self.slope(self.rank, i))
        self.engine.backward(loss, weight)
        return self.engine.step(last=last)

    def window(self, weights):
        """One window; `weights` has a list per rank, and numbers become tensors where they are in a tuple."""
        before, own = self.model.weight.detach().clone(), weights[self.rank]
        for i, weight in enumerate(own):
            passed = torch.tensor(float(weight[0])) if isinstance(weight, tuple) else weight
            result = self.micro_batch(i, passed, last=i == len(own) - 1)
        self.check(weights, before, result)

    def check(self, weights, before, result):
        """Compare the update with the mean over all ranks in float64."""
        numbers = [[1.0 if w is None else float(w[0] if isinstance(w, tuple) else w) for w in ws] for ws in weights]
        total = sum(map(sum, numbers)) or math.nan
        expected = sum(w * self.slope(rank, i).double() for rank, ws in enumerate(numbers) for i, w in enumerate(ws))
        update = (before - self.model.weight.detach()).double()
        error = update.abs().max() if result.skipped else (update - expected / total).abs().max()
        self.errors.append(float(error))
        self.skips.append(result.skipped)
        self.num_windows += 1

    def report(self, **more):
        """What this rank measured; the drift is that of the weights and the loss scale over ranks."""
        state = torch.cat([self.model.weight.detach(), torch.tensor([self.engine.scaler.get_scale()])])
        states = [torch.empty_like(state) for _ in range(NUM_RANKS)]
        dist.all_gather(states, state)
        self.engine.close()
        return {
            "windows": self.num_windows,
            "reductions": self.num_reductions,
            "error": max(self.errors, default=0.0),
            "skips": self.skips,
            "drift": float((states[0] - states[1]).abs().max()),
            **more,
        }


def windows_of(*windows, **options):
    """A case that trains these windows."""

    def function():
        run = Run(**options)
        for weights in windows:
            run.window(weights)
        return run.report()

    return function


FULL = [[None] * 4, [None] * 4]
CASES |= {
    "unweighted": windows_of(FULL, FULL, FULL),
    "short_on_all_ranks": windows_of(FULL, [[None] * 2, [None] * 2], [[None], [None]], FULL),
    "lengths_differ": windows_of([[None] * 4, [None] * 2], FULL, [[None], [None] * 4], [[None] * 3, [None] * 2]),
    "weights_differ": windows_of([[3, 5, 2, 1], [40, 7, 0.5, 9]], [[100] * 4, [1] * 4], [[1, 1, 1, 900], [7] * 4]),
    "tensor_weights": windows_of([[(3,), (5,), (2,), (1,)], [(40,), (7,), (0.5,), (9,)]], [[(0,), (2e3,)], [(1e-3,)]]),
    "numbers_here_and_tensors_there": windows_of([[3, (5,), 2, 1], [(40,), 7, (0.5,), 9]], [[(1,)] * 4, [5] * 4]),
    "weights_on_one_rank": windows_of([[5, 6, 7, 8], [None] * 4], [[None] * 4, [30, 20]], FULL, FULL, FULL),
    "weights_that_start_late": windows_of(FULL, FULL, FULL, [[9, 8, 7, 6], [None] * 4], [[500] * 4, [30] * 4], FULL, FULL),
    "one_micro_batch": windows_of([[3], [11]], [[None], [7]], [[None], [None]], [[(5,)], [(4000,)]], accumulate=1),
    "zero_on_one_rank": windows_of([[0] * 4, [3, 4, 5, 6]], [[1, 2, 3, 4], [(0,)] * 4], [[0, 0], [0, 9]]),
    "zero_on_all_ranks": windows_of([[0] * 4, [0] * 4], FULL, [[(0,)] * 4, [0]], FULL, precision="fp16"),
    "broken_weight": windows_of([[3, 3], [(3,), (math.nan,)]], [[3], [4]], [[(-1,), 3], [4, 4]], [[3], [4]], FULL),
    "fp16_small_and_large": windows_of([[1, 1], [4096, 1]], [[1, 4096], [2, 2]], precision="fp16,loss_scale=8192"),
    "bucket_views": windows_of(FULL, [[3, 5], [9] * 4], FULL, gradient_as_bucket_view=True),
    "searching_for_unused": windows_of(FULL, [[3, 5], [9] * 4], [[3], [9]], find_unused_parameters=True),
    "static_graph_without_accumulation": windows_of([[3], [5]], [[2], [9]], accumulate=1, static_graph=True),
}  # fmt: skip


@case
def random_windows():
    """Windows of random lengths, kinds of weights and sizes of weights on every rank."""
    run, draw = Run(), random.Random(0)
    kinds = (lambda w: w, lambda w: (w,), lambda _: None, lambda _: 0)
    for _ in range(40):
        weighted = draw.random() < 0.6
        weights = []
        for _rank in range(NUM_RANKS):
            numbers = [2.0 ** draw.uniform(-12, 12) for _ in range(draw.randint(1, 4))]
            weights.append([draw.choice(kinds)(w) if weighted else None for w in numbers])
        weights[0][0] = weights[0][0] if weights[0][0] is None else weights[0][0] or 3
        run.window(weights)
    return run.report()


@case
def messages():
    """How many small messages windows need without weights, and with them."""
    reduced, count = Agreement._reduced, []

    def counted(self, *args):
        count.append(1)
        return reduced(self, *args)

    Agreement._reduced = counted
    run, numbers = Run(), []
    for weights in (FULL, FULL, FULL, [[3] * 4, [5] * 4], [[3] * 4, [5] * 4]):
        before = len(count)
        run.window(weights)
        numbers.append(len(count) - before)
    Agreement._reduced = reduced
    return run.report(messages=numbers)


@case
def overflow_on_one_rank():
    """A loss of inf on one rank only, in the last micro-batch or before it."""
    run = Run(scaler=halfstep.LossScaler(hysteresis=1), precision="fp16")
    for at in (0, 3):
        before = run.model.weight.detach().clone()
        for i in range(4):
            with run.engine.forward():
                loss = run.wrapped(run.slope(run.rank, i)) * (math.inf if run.rank == 1 and i == at else 1.0)
            run.engine.backward(loss)
            result = run.engine.step()
        run.check(FULL, before, result)
    run.window(FULL)
    return run.report()


@case
def edited_on_one_rank():
    """After unscale() one rank writes an inf into its gradient, then none does."""
    run = Run(accumulate=2)
    for poison in (True, False):
        before = run.model.weight.detach().clone()
        for i in range(2):
            with run.engine.forward():
                loss = run.wrapped(run.slope(run.rank, i))
            run.engine.backward(loss, 3 + run.rank)
            if i == 1:
                run.engine.unscale()
                if poison and run.rank == 0:
                    run.model.weight.grad[0] = math.inf
            result = run.engine.step()
        run.check([[3, 3], [4, 4]], before, result)
    return run.report()


@case
def unscaled_in_a_short_window():
    """unscale() finds reduced gradients, also when the window is closed early."""
    run = Run()
    before = run.model.weight.detach().clone()
    with run.engine.forward():
        loss = run.wrapped(run.slope(run.rank, 0))
    run.engine.backward(loss, 2 + run.rank)
    run.engine.unscale()
    expected = (2 * run.slope(0, 0) + 3 * run.slope(1, 0)) / 5
    close = torch.allclose(run.model.weight.grad, expected, atol=1e-6)
    run.check([[2], [3]], before, run.engine.step(last=True))
    return run.report(close=close)


@case
def flag_of_the_hook():
    """`agree` by itself."""
    run = Run()
    flags = [float(run.engine.backend.agree(torch.tensor(float(run.rank == rank)))) for rank in (0, 1, 2)]
    return run.report(flags=flags)


@case
def two_losses():
    """Two backwards per micro-batch, of one forward, half of the loss each."""
    run = Run(accumulate=2)
    for weights in ([[3, 5], [4, 9]], [[None], [None, None]]):
        before, own = run.model.weight.detach().clone(), weights[run.rank]
        for i, weight in enumerate(own):
            with run.engine.forward():
                loss = run.wrapped(run.slope(run.rank, i))
            run.engine.backward(loss * 0.5, weight, retain_graph=True)
            run.engine.backward(loss * 0.5)
            result = run.engine.step(last=i == len(own) - 1)
        run.check(weights, before, result)
    return run.report()


@case
def two_forwards():
    """Two forwards with a backward each per micro-batch, as discriminators have."""
    run = Run(accumulate=2)
    for weights in ([[3, 5], [4, 9]], [[None], [None, None]], [[2, 2], [7]]):
        before, own = run.model.weight.detach().clone(), weights[run.rank]
        for i, weight in enumerate(own):
            for _ in range(2):
                with run.engine.forward():
                    loss = run.wrapped(run.slope(run.rank, i)) * 0.5
                run.engine.backward(loss, weight)
            result = run.engine.step(last=i == len(own) - 1)
        run.check(weights, before, result)
    return run.report()


class Parts(nn.Module):
    """Parameters of several sizes whose gradient is the sum of the input, times their place."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.parts = nn.ParameterList([torch.zeros(n) for n in (300, 7, 1200, 1, 64)])

    def forward(self, slope):
        sums = [(part * (k + 1)).sum() for k, part in enumerate(self.parts)]
        return (self.weight * slope).sum() + torch.stack(sums).sum() * slope.sum()


@case
def several_buckets():
    """Reductions with and without a forward fill the same buckets in the same order, also before they are rebuilt."""
    run = Run(Parts(), bucket_cap_mb=0.002)
    worst = 0.0
    for weights in ([[None] * 4, [None]], [[3], [5] * 4], FULL, [[2, 4], [8, 1]]):
        before = run.model.weight.detach().clone()
        parts = [part.detach().clone() for part in run.model.parts]
        run.window(weights)
        total = float((before - run.model.weight.detach()).sum())
        for k, (part, old) in enumerate(zip(run.model.parts, parts, strict=True)):
            worst = max(worst, float((old - part.detach() - total * (k + 1)).abs().max()))
    return run.report(worst=worst)


@case
def forward_outside_the_wrapper():
    """The model inside is called instead of the wrapper."""
    run = Run(accumulate=2)
    run.wrapped, wrapped = run.model, run.wrapped
    run.window([[None] * 2, [None] * 2])
    run.wrapped = wrapped
    run.window([[None] * 2, [None] * 2])
    return run.report()


@case
def without_the_block():
    """`with engine.forward():` was forgotten: every backward reduces, and the update is still right."""
    run = Run()
    run.block = contextlib.nullcontext
    run.window(FULL)
    run.window([[3] * 4, [5] * 4])
    return run.report()


@case
def aborted_windows():
    """Windows dropped after a forward, in the middle, and after a reduction leave no trace."""
    run = Run(accumulate=2)
    for stage in range(4):
        for i in range(2):
            with run.engine.forward():
                loss = run.wrapped(run.slope(run.rank, i))
            if stage == 2 * i:
                break
            run.engine.backward(loss, 5)
            if stage == 2 * i + 1:
                break
            run.engine.step()
        run.engine.reset_window()
        reductions = run.num_reductions
        run.window([[3, 4], [9, None]])
        run.num_reductions = reductions + 1 if run.num_reductions == reductions + 1 else 99
    return run.report()


@case
def unused_parameter_in_short_windows():
    """One that no rank uses keeps no gradient; one that a single rank uses is averaged."""
    run = Run(Slope(spare=True), find_unused_parameters=True)
    run.window([[None] * 2, [None]])
    idle = run.model.spare.tolist()
    with run.engine.forward():
        loss = run.wrapped(run.slope(run.rank, 0), use_spare=run.rank == 1)
    run.engine.backward(loss)
    run.engine.step(last=True)
    return run.report(idle=idle, used=run.model.spare.tolist())


@case
def batch_norm():
    """Buffers are broadcast by the forward after a reduction: lengths that differ must not confuse it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    wrapped = nn.parallel.DistributedDataParallel(model)
    engine = halfstep.Engine(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate=3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for lengths in ((3, 1), (2, 3), (3, 3), (1, 1)):
        for i in range(lengths[dist.get_rank()]):
            with engine.forward():
                loss = wrapped(torch.randn(5, 4, generator=generator)).pow(3).mean()
            engine.backward(loss, 5)
            engine.step(last=i == lengths[dist.get_rank()] - 1)
    weights = [torch.empty(4, 4) for _ in range(NUM_RANKS)]
    dist.all_gather(weights, model[0].weight.detach())
    engine.close()
    return {"drift": float((weights[0] - weights[1]).abs().max())}


def rejected(run, weights):
    """The message with which a run rejects a window."""
    try:
        run.window(weights)
    except halfstep.HalfstepError as error:
        return str(error)
    return "nothing"


@case
def rejections():
    """What cannot be right is rejected by name, on every rank."""
    run = Run()
    with run.wrapped.join(enable=False):
        run.window(FULL)
    with run.wrapped.join(throw_on_early_termination=False):
        join = rejected(run, FULL)
        run.wrapped._join_config = run.wrapped._join_config._replace(enable=False)
    static = rejected(Run(static_graph=True), FULL)
    unused = rejected(Run(Slope(spare=True)), [[None] * 4, [None] * 4])
    model, other = Slope(), Slope()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    backend = halfstep.backends.WrappedDDP()
    try:
        backend.prepare(nn.parallel.DistributedDataParallel(model), [optimizer])
        foreign = "nothing"
    except halfstep.HalfstepError as error:
        foreign = str(error)
    return {"join": join, "static": static, "unused": unused, "foreign": foreign}


def main():
    """Run every case."""
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=120))
    for name, function in CASES.items():
        print(json.dumps({"case": name, "rank": dist.get_rank(), **function()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
