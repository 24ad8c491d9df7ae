"""The schedules: which step sends what, in closed form, and when a variance is stable."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from halfstep.optim import OneBitAdam, ZeroOneAdam
from halfstep.optim.onebit.allreduce import compressed_bytes
from halfstep.optim.onebit.schedule import (
    FreezePolicy,
    FreezeSchedule,
    Stability,
    ZeroOnePolicy,
    ZeroOneSchedule,
    schedule_from,
)
from halfstep.optim.onebit.wire import dense_bytes
from onebit_cases import SHAPES, gradients, start
from thread_ranks import on_threads


def kinds_of(policy, steps):
    """What each step of 0/1 Adam is."""
    schedule, kinds = ZeroOneSchedule(), []
    for _ in range(steps):
        if schedule.dense:
            kinds.append("dense")
        elif not schedule.frozen:
            kinds.append("compressed")
        else:
            kinds.append("sync" if schedule.synchronizes else "local")
        schedule = schedule.advance(policy)
    return kinds, schedule


def test_variance_steps_double_their_distance():
    """After every `var_update_scaler` of them, until the freeze; steps between them are compressed."""
    kinds, schedule = kinds_of(ZeroOnePolicy(40, 4, 100, 16), 41)
    assert [t for t, kind in enumerate(kinds, 1) if kind == "dense"] == [
        1,
        2,
        3,
        4,
        6,
        8,
        10,
        12,
        16,
        20,
        24,
        28,
        32,
        40,
    ]
    assert schedule.frozen_at == 41
    assert schedule.var_updates == 14
    assert kinds.count("compressed") == 41 - 14


def test_local_steps_double_their_distance_up_to_the_limit():
    """After every `local_step_scaler` steps; a synchronization ends each run of local steps."""
    kinds, schedule = kinds_of(ZeroOnePolicy(1, 16, 8, 4), 2 + 40)
    syncs = [t for t, kind in enumerate(kinds, 1) if kind == "sync"]
    assert syncs == [*range(3, 11), 12, 14, 16, 18, *range(20, 43, 4)]
    assert schedule.local_interval == 4
    assert schedule.local_steps == 42 - 40


def test_a_skipped_step_does_not_advance_anything():
    """Schedules are values: what is not advanced stays."""
    schedule = ZeroOneSchedule(step=5, var_interval=2)
    assert schedule.advance(ZeroOnePolicy(40, 4, 100, 16)) != schedule
    assert schedule == ZeroOneSchedule(step=5, var_interval=2)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_bytes_of_zero_one_adam_follow_from_its_schedule(num_ranks):
    """Dense messages at variance steps, compressed ones else, none at local steps; exactly, the check of the first step aside."""
    policy = {"var_freeze_step": 12, "var_update_scaler": 3, "local_step_scaler": 6, "local_step_clipper": 4}
    steps = 36

    def run(wire):
        params = [torch.nn.Parameter(w) for w in start()]
        optimizer = ZeroOneAdam(params, allow_unverified=True, **policy)
        optimizer._wire = wire
        sent = []
        for step in range(steps):
            for param, grad in zip(params, gradients(step, wire.rank), strict=True):
                param.grad = grad
            before = wire.sent_bytes
            optimizer.step()
            sent.append(wire.sent_bytes - before)
        return sent

    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    prices = {"dense": dense_bytes(4 * sum(sizes), num_ranks), "local": 0}
    prices["compressed"] = prices["sync"] = compressed_bytes(sizes, num_ranks)
    kinds, _ = kinds_of(ZeroOnePolicy(**policy), steps)
    assert {"dense", "compressed", "local", "sync"} == set(kinds)
    expected = [prices[kind] for kind in kinds]
    expected[0] += (num_ranks - 1) * 24
    for sent in on_threads(num_ranks, run):
        assert sent == expected


def test_local_steps_at_interval_16_send_a_480th():
    """On ViT-S, scales included, averaged over an interval."""
    from halfstep.models import vit_s_16

    with torch.device("meta"):
        sizes = [p.numel() for p in vit_s_16().parameters()]
    for num_ranks in (2, 4, 8):
        assert compressed_bytes(sizes, num_ranks) / 16 <= dense_bytes(4 * sum(sizes), num_ranks) / 480


def test_the_freeze_step_counts_applied_steps():
    """`freeze_step` dense steps, then compressed ones."""
    policy, schedule = FreezePolicy(3, Stability()), FreezeSchedule()
    dense = []
    for _ in range(5):
        dense.append(schedule.dense)
        schedule = schedule.advance(policy)
    assert dense == [True, True, True, False, False]
    assert schedule.frozen_at == 3


def frozen_after(norms, distance=20, threshold=0.96):
    """The step at which these norms, one per step, freeze the variance; None if they do not."""
    policy, schedule = FreezePolicy(None, Stability(threshold, distance)), FreezeSchedule()
    for norm in norms:
        schedule = schedule.advance(policy, norm if schedule.wants_norm(policy) else None)
        if schedule.frozen:
            return schedule.frozen_at
    return None


def test_a_stable_variance_is_frozen():
    """Falling or growing norms are not stable, a constant one is as soon as two samples are old enough."""
    assert frozen_after([1.0] * 100) == 40
    assert frozen_after([0.99**t for t in range(200)]) is None
    assert frozen_after([1.01**t for t in range(200)]) is None
    settled = [max(1.0, 10 * 0.95**t) for t in range(200)]
    step = frozen_after(settled)
    assert settled[step - 1] == 1.0
    assert settled[step - 1 - 20] <= 1 / 0.96
    assert frozen_after([0.0] * 100) is None


def test_the_freeze_step_is_found_in_a_run():
    """With gradients whose size falls and then settles, all ranks freeze at the same step, after they have settled."""

    def run(wire):
        params = [torch.nn.Parameter(w) for w in start()]
        optimizer = OneBitAdam(params, lr=1e-3, betas=(0.9, 0.9), freeze_step="auto", allow_unverified=True)
        optimizer._wire = wire
        for step in range(80):
            size = max(1.0, 8 * 0.8**step)
            for param, grad in zip(params, gradients(3, wire.rank), strict=True):
                param.grad = grad * size
            optimizer.step()
        return optimizer.schedule.frozen_at

    steps = on_threads(2, run)
    assert len(set(steps)) == 1
    assert 10 < steps[0] < 80


def test_schedules_survive_json():
    """As a checkpoint stores them, samples included; unknown keys of a later version are left out."""
    freeze = FreezeSchedule(7, -1, ((5, 0.25), (6, 0.5)))
    zero_one = replace(ZeroOneSchedule(), step=9, var_interval=4, local_steps=2)
    for schedule in (freeze, zero_one):
        saved = json.loads(json.dumps(asdict(schedule) | {"rank": 0}))
        assert schedule_from(type(schedule), saved) == schedule
