"""Guard: no optimizer steps on a gradient that is not finite, in any loop, and fused ones without a host read."""

import copy
import gc
import math
import platform
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from gpu_sync import no_synchronisation
from halfstep.engine.engine import Engine
from halfstep.errors import OverflowStop, SettingError

BAD = (math.nan, math.inf, -math.inf)
FUSED = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam-fused-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
    "sgd-fused-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "halfstep-adamw": lambda p: halfstep.optim.AdamW(p, lr=1e-2),
    "halfstep-sgd": lambda p: halfstep.optim.SGD(p, lr=1e-2, momentum=0.9),
}
OTHERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-plain": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "sgd-fused-dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
}
EVERY = FUSED | OTHERS


class NoHostRead(TorchDispatchMode):
    """Raises where the host reads a value of a tensor, which on a GPU would wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host read a tensor"
        return func(*args, **(kwargs or {}))


class Plain(torch.optim.Optimizer):
    """An optimizer that nobody here knows."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        """Gradient descent."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad)
        return loss


def build(make, dtype=torch.float32, seed=0):
    """A small model and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)
    return model, make(model.parameters())


def backward(model, step, *, bad=None, place=(0, 0)):
    """The gradients of one batch, one element of them replaced by `bad`."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(model[0].weight.dtype)
    model.zero_grad()
    F.mse_loss(model(x), torch.zeros(5, 2, dtype=x.dtype)).backward()
    if bad is not None:
        list(model.parameters())[place[0]].grad.flatten()[place[1]] = bad


def snapshot(model, optimizer):
    """Weights and every state entry."""
    weights = [p.detach().clone() for p in model.parameters()]
    state = {k: {n: copy.deepcopy(v) for n, v in s.items()} for k, s in optimizer.state_dict()["state"].items()}
    return weights, state


def assert_same(before, after):
    """Nothing changed; a state that a skipped first step created is zero."""
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    for key, entries in after[1].items():
        for name, value in entries.items():
            old = before[1].get(key, {}).get(name)
            if name in {"low", "master"} and old is None:
                continue
            assert torch.equal(
                torch.as_tensor(value),
                torch.zeros_like(torch.as_tensor(value)) if old is None else torch.as_tensor(old),
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY.keys())
def test_a_nonfinite_gradient_changes_nothing_and_the_next_step_is_applied(make, dtype):
    """Weights and states are bit-identical after a skip, also in the first step, and training then equals one without the batch."""
    model, optimizer = build(make, dtype)
    if (
        dtype is torch.bfloat16
        and isinstance(optimizer, torch.optim.SGD)
        and platform.machine() in {"aarch64", "arm64"}
    ):
        pytest.skip("torch's fused SGD computes 16-bit weights from stray memory on Arm, with or without a Guard")
    guard = halfstep.Guard(optimizer)
    reference, plain = build(make, dtype)
    for step, bad in enumerate((math.nan, None, math.inf, -math.inf, None, None)):
        backward(model, step, bad=bad, place=(step % 4, 0))
        before = snapshot(model, optimizer)
        optimizer.step()
        if bad is not None:
            assert_same(before, snapshot(model, optimizer))
            continue
        backward(reference, step)
        plain.step()
        assert_same(snapshot(reference, plain), snapshot(model, optimizer))
    assert guard.counts == halfstep.watching.guard.GuardCounts(6, 3, 0)


def test_an_unguarded_optimizer_is_ruined():
    """The control of the tests here: without a Guard one NaN reaches the weights."""
    model, optimizer = build(FUSED["adamw-fused"])
    backward(model, 0, bad=math.nan)
    optimizer.step()
    assert model[0].weight.isnan().any()


@given(st.integers(0, 3), st.integers(0, 1), st.sampled_from(BAD), st.sampled_from(sorted(EVERY)))
def test_every_element_of_every_gradient_is_checked(tensor, end, bad, name):
    """Wherever the element is, the step is skipped."""
    model, optimizer = build(EVERY[name])
    guard = halfstep.Guard(optimizer, max_consecutive=None)
    backward(model, 0, bad=bad, place=(tensor, -end))
    before = snapshot(model, optimizer)
    optimizer.step()
    assert guard.counts.skips == 1
    assert_same(before, snapshot(model, optimizer))


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED.keys())
def test_fused_optimizers_need_no_host_read(make):
    """From the first step on, skipped or not, no value of a tensor is read by the host."""
    model, optimizer = build(make)
    halfstep.Guard(optimizer)
    for step in range(4):
        backward(model, step, bad=math.nan if step % 2 == 0 else None)
        with NoHostRead():
            optimizer.step()


def test_other_optimizers_need_one_host_read():
    """The control of the test above: the mode detects the read of a plain optimizer's Guard."""
    model, optimizer = build(Plain)
    halfstep.Guard(optimizer)
    backward(model, 0)
    with pytest.raises(AssertionError, match="the host read a tensor"), NoHostRead():
        optimizer.step()


@pytest.mark.parametrize("make", [FUSED["adamw-fused"], OTHERS["adamw"], Plain], ids=["fused", "foreach", "foreign"])
def test_an_accumulated_window_is_judged_as_one(make):
    """A NaN in any micro-batch skips the step of its window, and only that one."""
    model, optimizer = build(make)
    guard = halfstep.Guard(optimizer)
    for window in range(3):
        model.zero_grad()
        for micro in range(4):
            loss = model(torch.full((2, 4), 0.1 * micro)).square().mean()
            (loss * math.nan if (window, micro) == (1, 2) else loss).backward()
        optimizer.step()
    assert guard.counts.steps == 3
    assert guard.counts.skips == 1
    assert all(p.isfinite().all() for p in model.parameters())


# --- torch's GradScaler -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale"])
@pytest.mark.parametrize("name", ["adamw-fused", "adamw", "halfstep-adamw"])
def test_under_gradscaler_the_run_is_the_same_as_without_a_guard(name, unscale):
    """With torch's scaler nothing is unscaled or skipped twice: weights, states and scale stay bit-identical."""
    runs = []
    for guarded in (False, True):
        model, optimizer = build(EVERY[name])
        guard = halfstep.Guard(optimizer) if guarded else None
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 4, generator=torch.Generator().manual_seed(step))).square().mean()
            scaler.scale(loss * math.inf if step in {0, 3} else loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**8
        runs.append(snapshot(model, optimizer))
    assert_same(*runs)
    assert guard.counts.skips == (
        0 if name == "adamw" else 2
    )  # a skip that the scaler decides on the host is never seen


def test_a_scale_of_zero_is_skipped():
    """torch's scaler can back off to 0, and its fused step then writes 0 / 0 to the weights; a Guard skips it."""
    weights = []
    for guarded in (False, True):
        model, optimizer = build(FUSED["adamw-fused"])
        if guarded:
            halfstep.Guard(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=0.0)
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        weights.append(model[0].weight)
    assert weights[0].isnan().any()
    assert weights[1].isfinite().all()


def test_a_flag_of_two_devices_is_made_one():
    """torch's scaler adds up the flags of devices, and fused kernels skip only at exactly 1."""
    model, optimizer = build(FUSED["adamw-fused"])
    guard = halfstep.Guard(optimizer)
    backward(model, 0, bad=math.nan)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(2.0), None
    optimizer.step()
    assert guard.counts.skips == 1
    assert model[0].weight.isfinite().all()
    assert optimizer.found_inf == 2  # the scaler's own tensor is unchanged


# --- counts, stop, closing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw-fused", "adamw"])
def test_too_many_skips_in_a_row_stop_the_run_and_name_the_parameters(name):
    """The third skip in a row raises; a clean step in between starts the count again."""
    model, optimizer = build(EVERY[name])
    guard = halfstep.Guard(optimizer, max_consecutive=3, named_parameters=model.named_parameters())
    for step, bad in enumerate((math.nan, math.nan, None, math.nan, math.nan)):
        backward(model, step, bad=bad)
        optimizer.step()
    assert guard.counts.consecutive_skips == 2
    backward(model, 9, bad=math.inf)
    with pytest.raises(OverflowStop, match=r"3 steps of AdamW in a row .*0\.weight \(1 of 24\)"):
        optimizer.step()
    assert guard.counts.skips == 5


def test_skips_are_logged_at_powers_of_two(caplog):
    """The first, second, fourth and eighth skip are logged, not each one."""
    model, optimizer = build(FUSED["adamw-fused"])
    halfstep.Guard(optimizer, max_consecutive=None)
    with caplog.at_level("WARNING", logger="halfstep"):
        for step in range(9):
            backward(model, step, bad=math.nan)
            optimizer.step()
    assert [r.message.split(";")[1].strip() for r in caplog.records] == [f"{n} skipped so far." for n in (1, 2, 4, 8)]


def test_several_optimizers_decide_separately():
    """The NaN of one optimizer's gradients does not skip the other's step."""
    (first, a), (second, b) = build(FUSED["adamw-fused"]), build(OTHERS["rmsprop"], seed=1)
    guards = halfstep.Guard(a), halfstep.Guard(b)
    backward(first, 0, bad=math.nan)
    backward(second, 0)
    before = [first[0].weight.clone(), second[0].weight.clone()]
    a.step()
    b.step()
    assert [g.counts.skips for g in guards] == [1, 0]
    assert torch.equal(before[0], first[0].weight)
    assert not torch.equal(before[1], second[0].weight)


def test_a_step_without_gradients_is_no_skip():
    """Nothing to check is finite."""
    _, optimizer = build(FUSED["adamw-fused"])
    guard = halfstep.Guard(optimizer)
    optimizer.step()
    assert guard.counts.steps == 1
    assert guard.counts.skips == 0


def test_sparse_gradients_are_checked():
    """An embedding's sparse gradient with a NaN skips, a clean one is applied."""
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(list(table.parameters()))
    guard = halfstep.Guard(optimizer)
    for factor in (math.nan, 1.0):
        optimizer.zero_grad()
        before = table.weight.detach().clone()
        (table(torch.tensor([1, 1, 2])).sum() * factor).backward()
        optimizer.step()
        assert torch.equal(before, table.weight) is (factor != 1.0)
    assert guard.counts.skips == 1


@pytest.mark.parametrize("order", ["guard first", "scheduler first"])
@pytest.mark.parametrize("name", ["adamw-fused", "adamw"])
def test_schedulers_work_with_a_guard(order, name):
    """A scheduler built before or after does not warn after a skipped first step, and the step stays gated."""
    model, optimizer = build(EVERY[name])
    guard = halfstep.Guard(optimizer) if order == "guard first" else None
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    guard = guard or halfstep.Guard(optimizer)
    backward(model, 0, bad=math.nan)
    optimizer.step()
    schedule.step()
    assert guard.counts.skips == 1
    assert schedule.get_last_lr() == [0.005]
    with pytest.raises(SettingError, match="has a Guard already"):
        halfstep.Guard(optimizer)
    guard.close()
    backward(model, 1, bad=math.nan)
    optimizer.step()
    assert model[0].weight.isnan().any()
    halfstep.Guard(optimizer)  # the closed one is no obstacle


def test_closing_restores_the_optimizers_own_step():
    """After close() nothing of the Guard is left on the optimizer."""
    _, optimizer = build(OTHERS["adamw"])
    own = vars(optimizer).copy()
    halfstep.Guard(optimizer).close()
    assert vars(optimizer) == own


def test_a_guard_does_not_keep_its_optimizer_alive():
    """No reference cycle: the states are freed without the garbage collector."""
    model, optimizer = build(FUSED["adamw-fused"])
    guard = halfstep.Guard(optimizer)
    backward(model, 0)
    optimizer.step()
    gc.disable()
    try:
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    assert guard.counts.steps == 1


def test_the_state_dict_is_that_of_the_optimizer():
    """A guarded optimizer saves, loads and copies like an unguarded one."""
    model, optimizer = build(FUSED["adamw-fused"])
    keys = optimizer.state_dict().keys()
    halfstep.Guard(optimizer)
    backward(model, 0)
    optimizer.step()
    assert optimizer.state_dict().keys() == keys
    _, other = build(FUSED["adamw-fused"])
    other.load_state_dict(optimizer.state_dict())
    clone = copy.deepcopy(optimizer)
    assert "step" not in vars(clone)


def test_a_loaded_state_that_is_not_fused_is_still_gated():
    """load_state_dict can switch a fused optimizer to foreach, which ignores found_inf: the Guard then decides on the host."""
    model, optimizer = build(FUSED["adamw-fused"])
    halfstep.Guard(optimizer)
    _, other = build(OTHERS["adamw-foreach"])
    optimizer.load_state_dict(other.state_dict())
    assert not optimizer.param_groups[0]["fused"]
    backward(model, 0, bad=math.nan)
    optimizer.step()
    assert model[0].weight.isfinite().all()


# --- closures and what is rejected --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("name", ["adamw-fused", "adamw"])
def test_closures_of_torchs_optimizers_are_checked(name, keyword):
    """The closure runs once with gradients enabled, its loss is returned, and its NaN skips the step."""
    model, optimizer = build(EVERY[name])
    guard, calls = halfstep.Guard(optimizer), []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).square().mean() * (math.nan if len(calls) == 1 else 1.0)
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [optimizer.step(closure=closure) if keyword else optimizer.step(closure) for _ in range(2)]
    assert calls == [True, True]
    assert losses[0].isnan()
    assert losses[1].isfinite()
    assert guard.counts.skips == 1
    assert model[0].weight.isfinite().all()


def test_a_closure_of_an_unknown_optimizer_is_rejected():
    """It may run the closure twice or after its own changes, so the gradients in between would not be checked."""
    _, optimizer = build(Plain)
    halfstep.Guard(optimizer)
    with pytest.raises(SettingError, match=r"Plain\.step\(closure\)"):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (torch.optim.LBFGS, {}, "several gradients inside one step"),
        (lambda p: [torch.optim.SGD(p)], {}, "not list; several optimizers have one Guard each"),
        (OTHERS["adamw"], {"max_consecutive": 0}, "max_consecutive=0"),
        (OTHERS["adamw"], {"max_consecutive": 1.5}, r"max_consecutive=1\.5"),
        (OTHERS["adamw"], {"max_consecutive": True}, "max_consecutive=True"),
    ],
)
def test_what_cannot_be_guarded_is_rejected(make, options, message):
    """Rejected by name before anything is changed."""
    _, optimizer = build(make)
    with pytest.raises(SettingError, match=message):
        halfstep.Guard(optimizer, **options)
    assert isinstance(optimizer, list) or "step" not in vars(optimizer)


def test_an_engines_optimizer_needs_no_guard():
    """The Engine skips by itself, and a second gate is a mistake."""
    model, optimizer = build(OTHERS["adamw"])
    engine = Engine(model, optimizer, "fp32")
    with pytest.raises(SettingError, match=r"stepped by a halfstep\.Engine"):
        halfstep.Guard(optimizer)
    engine.close()
    halfstep.Guard(optimizer)


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["adamw-fused", "adamw"])
def test_sharded_parameters_need_a_group(one_rank, name):
    """A rank sees only its own shard, so DTensors are rejected without a process group and gated with one."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    optimizer = EVERY[name]([weight])
    with pytest.raises(SettingError, match="process_group="):
        halfstep.Guard(optimizer)
    guard = halfstep.Guard(optimizer, process_group=one_rank)
    for factor in (math.nan, 1.0):
        optimizer.zero_grad()
        (weight * factor).sum().backward()
        optimizer.step()
        assert weight.full_tensor().isfinite().all()
    assert guard.counts.skips == 1
    assert (weight.full_tensor() != 1).all()


RANK_PROGRAM = """
import math, sys, torch, halfstep
rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
for options in ({"fused": True}, {"foreach": True}):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1, **options)
    guard = halfstep.Guard(optimizer, process_group=torch.distributed.group.WORLD)
    for bad_rank in (0, 1, None):
        weight.grad = torch.full((4,), math.nan if rank == bad_rank else 1.0)
        optimizer.step()
        assert bool((weight == 1).all()) is (bad_rank is not None), (bad_rank, weight)
    assert guard.counts.skips == 2
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_a_group_agree(tmp_path):
    """A NaN in the shard of either rank skips the step on both."""
    command = [sys.executable, "-c", RANK_PROGRAM]
    ranks = [subprocess.Popen([*command, str(rank), f"{tmp_path}/store"]) for rank in range(2)]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED.keys())
def test_a_guarded_fused_step_does_not_wait_for_the_gpu(make):
    """torch's sync debugger raises on no call of a guarded step, and a skip changes nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).cuda()
    optimizer = make(model.parameters())
    if isinstance(optimizer, torch.optim.Adagrad):
        pytest.skip("torch's fused Adagrad has no CUDA kernel")
    guard = halfstep.Guard(optimizer)
    x = torch.randn(16, 64, device="cuda")
    for step in range(6):
        model.zero_grad()
        model(x).square().mean().backward()
        if step in {3, 4}:
            model[0].weight.grad.fill_(math.nan)
        if step < 2:  # kernels are compiled and tables built
            optimizer.step()
            continue
        with no_synchronisation():
            optimizer.step()
    assert guard.counts.skips == 2
    assert all(p.isfinite().all() for p in model.parameters())
