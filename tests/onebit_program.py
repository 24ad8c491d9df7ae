"""Cases of the compressed optimizers on real gloo ranks, run by tests/optim/onebit/test_ranks.py."""

import sys

import torch
import torch.distributed as dist

import onebit_simulation as simulation
from halfstep.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from onebit_cases import SHAPES, gradients, run, start
from rank_cases import case, hashed, run_cases, same

COMMON = {"lr": 1e-2, "weight_decay": 0.01}
ZERO_ONE = {"var_freeze_step": 9, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4}


def compare(kind, paper, steps, settings, group=None):
    """The largest difference to the float64 simulation, over all steps and parameters of this rank."""
    params = [torch.nn.Parameter(w) for w in start()]
    optimizer = kind(params, allow_unverified=True, process_group=group, **COMMON | settings)
    num_ranks, rank = optimizer.wire.num_ranks, optimizer.wire.rank
    expected = paper([w.numpy() for w in start()], num_ranks, simulation.Settings(**COMMON | settings))
    worst = 0.0
    for step in range(steps):
        for param, grad in zip(params, gradients(step, rank), strict=True):
            param.grad = grad
        optimizer.step()
        expected.step([[g.double().numpy().reshape(-1) for g in gradients(step, r)] for r in range(num_ranks)])
        for k, param in enumerate(params):
            wanted = torch.from_numpy(expected.p[rank][k]).reshape(SHAPES[k])
            worst = max(worst, (param.detach().double() - wanted).abs().max().item())
    return {"worst": worst, "closest": float(expected.closest), "sent": optimizer.wire.sent_bytes}


@case
def adam():
    return compare(OneBitAdam, simulation.Adam, 11, {"freeze_step": 4})


@case
def zero_one():
    return compare(ZeroOneAdam, simulation.ZeroOne, 22, ZERO_ONE)


@case
def lamb():
    return compare(OneBitLamb, simulation.Lamb, 16, {"freeze_step": 8, "coeff_beta": 0.8})


@case
def subgroups():
    """Two groups train different models at the same time: the even ranks and the odd ones."""
    size = dist.get_world_size()
    groups = [dist.new_group([r for r in range(size) if r % 2 == odd]) for odd in range(2)]
    return compare(OneBitAdam, simulation.Adam, 8, {"freeze_step": 3}, groups[dist.get_rank() % 2])


@case
def overflow():
    """The last rank sees inf at a compressed step: all skip it."""
    params = [torch.nn.Parameter(w) for w in start()]
    optimizer = OneBitAdam(params, freeze_step=3, allow_unverified=True)
    last = dist.get_rank() == dist.get_world_size() - 1
    for step in range(6):
        before = hashed(*params, *(v for s in optimizer.state.values() for v in s.values()))
        for param, grad in zip(params, gradients(step, dist.get_rank()), strict=True):
            param.grad = grad * float("inf") if step == 5 and last else grad
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(float(step == 5 and last))
        optimizer.step()
    after = hashed(*params, *(v for s in optimizer.state.values() for v in s.values()))
    optimizer.settle()
    return {"unchanged": before == after, "same": same(hashed(*params)), "steps": optimizer.schedule.step}


@case
def several_buckets():
    """Bit for bit what one bucket gives, with gloo's messages under way at the same time."""
    from halfstep.optim.onebit import allreduce
    from halfstep.optim.onebit.wire import Wire

    whole = run(Wire(), OneBitAdam, {"freeze_step": 2}, 5)
    allreduce._BUCKET = 20
    divided = run(Wire(), OneBitAdam, {"freeze_step": 2}, 5)
    allreduce._BUCKET = 1 << 24
    return {
        "equal": all(torch.equal(a, b) for s, t in zip(whole, divided, strict=True) for a, b in zip(s, t, strict=True))
    }


if __name__ == "__main__":
    run_cases(sys.argv[1:])
