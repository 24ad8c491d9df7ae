"""Cases of `Engine(backend="ddp")` on ranks: the reducer alone, and windows whose mean over all ranks is known exactly."""

import math
import random

import torch
import torch.distributed as dist
from torch import nn

import ddp_program
import halfstep
from halfstep.backends import DataParallel
from halfstep.backends.buckets import GradientReducer
from rank_cases import CASES, case

SMALL = {"first_bucket_bytes": 64, "bucket_bytes": 1024}  # several buckets for a small model

# --- the reducer alone ----------------------------------------------------------------------------------------------


class Sent:
    """Records the sizes of the messages inside its block."""

    def __enter__(self):
        self.sizes, self._own = [], dist.all_reduce

        def recorded(tensor, *args, **options):
            self.sizes.append(tensor.numel())
            return self._own(tensor, *args, **options)

        dist.all_reduce = recorded
        return self

    def __exit__(self, *_):
        dist.all_reduce = self._own


def branches(params, order, factors):
    """A loss whose backward reaches the parameters in the reverse of `order`; each gradient is its factor."""
    return torch.stack([(params[i] * factors[i]).sum() for i in order]).sum()


@case
def arrival_order():
    """Gradients that arrive in another random order on every rank, some of them missing, in many small buckets."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sizes = (3, 50, 1, 7, 120, 20, 64, 5, 33, 2)
    params = [nn.Parameter(torch.zeros(n)) for n in sizes]
    reducer = GradientReducer(
        {str(i): p for i, p in enumerate(params)}, None, torch.float32, first_bucket_bytes=64, bucket_bytes=256
    )
    worst, orders, early = 0.0, [], []
    for window in range(30):
        draws = [random.Random(100 * window + r) for r in range(num_ranks)]
        plans = []
        for draw in draws:
            order = [i for i in range(len(sizes)) if draw.random() > (0.2 if window % 2 else 0)]
            draw.shuffle(order)
            plans.append((order, [draw.uniform(-1, 1) for _ in sizes]))
        order, factors = plans[rank]
        with Sent() as sent:
            if order:
                reducer.arm()
                branches(params, order, factors).backward()
                early.append(len(sent.sizes))
                assert not reducer.finish()
            else:
                reducer.reduce()
        orders.append(sent.sizes)
        for i, param in enumerate(params):
            used = [fs[i] for o, fs in plans if i in o]
            assert (param.grad is None) == (not used), (window, i)
            if used:
                worst = max(worst, float((param.grad - sum(used) / num_ranks).abs().max()))
            param.grad = None
    count = reducer.reductions.count
    reducer.close()
    return {"worst": worst, "orders": orders, "early": max(early), "count": count, "buckets": len(set(orders[0]))}


@case
def formats():
    """Every dtype of gradients and messages: means of multiples of 1/8, which all of them represent."""
    rank, num_ranks, worst = dist.get_rank(), dist.get_world_size(), {}
    for weights in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64):
        for wire in (torch.float32, torch.bfloat16, torch.float16):
            for wide in (False, True) if weights in {torch.bfloat16, torch.float16} else (False,):
                params = [nn.Parameter(torch.zeros(n, dtype=weights)) for n in (5, 3, 16)]
                params.append(
                    nn.Parameter(torch.zeros(2, 3, 4, 4, dtype=weights).to(memory_format=torch.channels_last))
                )
                if wide:
                    for p in params:
                        p.grad_dtype = torch.float32
                reducer = GradientReducer({str(i): p for i, p in enumerate(params)}, None, wire)
                for p in params:
                    p.grad = torch.full_like(p, (rank + 1) * num_ranks / 8, dtype=torch.float32 if wide else None)
                reducer.reduce()
                mean = sum(range(1, num_ranks + 1)) / 8
                fine = all(p.grad.dtype is (torch.float32 if wide else weights) for p in params)
                fine = fine and all(p.grad.stride() == p.stride() for p in params)
                error = max(float((p.grad - mean).abs().max()) for p in params)
                worst[f"{weights} {wire} {wide}"] = error if fine else math.inf
    return {"worst": max(worst.values()), "all": worst}


@case
def fp16_does_not_overflow():
    """Sums above 65504 whose mean is below it."""
    param = nn.Parameter(torch.zeros(4))
    reducer = GradientReducer({"p": param}, None, torch.float16)
    param.grad = torch.full((4,), 60000.0)
    reducer.reduce()
    return {"mean": param.grad.tolist()}


@case
def late_gradient():
    """A gradient that arrives a second time after it was sent is not lost: finish() asks for another reduction."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    param = nn.Parameter(torch.zeros(4))
    reducer = GradientReducer({"p": param}, None, torch.float32)
    reducer.arm()
    (param * (rank + 1)).sum().backward()
    (param * 10 * (rank + 1)).sum().backward()
    late = reducer.finish()
    reducer.reduce()
    mean = 11 * sum(range(1, num_ranks + 1)) / num_ranks
    return {"late": late, "error": float((param.grad - mean).abs().max())}


# --- windows: the cases of the wrapped model, without the wrapper ---------------------------------------------------


class Run(ddp_program.Run):
    """As the runs of a wrapped model, on a plain one."""

    def __init__(self, model=None, precision="fp32", accumulate=4, scaler=None, **options):
        self.rank, self.model = dist.get_rank(), model or ddp_program.Slope()
        self.wrapped = self.model
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.engine = halfstep.Engine(
            self.model, optimizer, precision, accumulate=accumulate, scaler=scaler, backend=DataParallel(**options)
        )
        self.block = self.engine.forward
        self.num_windows, self.errors, self.skips = 0, [], []

    @property
    def num_reductions(self):
        """Reductions since the case last wrote this number."""
        return self.engine.backend.reductions.count - self.__dict__.get("_offset", 0)

    @num_reductions.setter
    def num_reductions(self, value):
        self._offset = self.engine.backend.reductions.count - value


def shared_cases():
    """Cases of the wrapped model that make sense without it."""
    skipped = {"bucket_views", "searching_for_unused", "static_graph_without_accumulation", "batch_norm", "rejections"}
    skipped |= {"several_buckets", "unused_parameter_in_short_windows"}
    return {name: function for name, function in ddp_program.CASES.items() if name not in skipped}


ddp_program.Run = Run
CASES.update(shared_cases())


@case
def several_buckets():
    """Many small buckets, reduced during backward or when the window closes."""
    run = Run(ddp_program.Parts(), **SMALL)
    worst = 0.0
    for weights in ([[None] * 4, [None]], [[3], [5] * 4], ddp_program.FULL, [[2, 4], [8, 1]], ddp_program.FULL):
        before = run.model.weight.detach().clone()
        parts = [part.detach().clone() for part in run.model.parts]
        run.window(weights)
        total = float((before - run.model.weight.detach()).sum())
        for k, (part, old) in enumerate(zip(run.model.parts, parts, strict=True)):
            worst = max(worst, float((old - part.detach() - total * (k + 1)).abs().max()))
    return run.report(worst=worst)


@case
def unused_parameter():
    """One that no rank uses keeps no gradient; one that a single rank uses is averaged; in full windows and short ones."""
    run = Run(ddp_program.Slope(spare=True), accumulate=2)
    run.window([[None] * 2, [None]])
    run.window([[None] * 2, [None] * 2])
    idle = run.model.spare.tolist()
    for _ in range(2):
        for i in range(2):
            with run.engine.forward():
                loss = run.model(run.slope(run.rank, i), use_spare=run.rank == 1)
            run.engine.backward(loss)
            run.engine.step()
    return run.report(idle=idle, used=run.model.spare.tolist())
