"""The drop-in GradScaler: torch's behaviour where it is sound, and the faults of torch's class fixed."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import halfstep
from halfstep.errors import HalfstepError, OverflowStop
from halfstep.scaling.scaler import LossScaler, ScalerCounts

STOCK, OURS = torch.amp.GradScaler, halfstep.GradScaler


def problem(seed=0, *, fused=False, optimizer=torch.optim.AdamW):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    return model, optimizer(model.parameters(), lr=0.05, fused=fused)


def train(scaler_class, trace, *, fused, clip, **settings_):
    """Weights and scales of a loop whose k-th step overflows where trace[k] is true."""
    model, optimizer = problem(fused=fused)
    scaler = scaler_class("cpu", init_scale=64.0, growth_interval=3, **settings_)
    scales = []
    for overflow in trace:
        loss = model(torch.ones(2, 3)).pow(2).mean()
        scaler.scale(loss).backward()
        if overflow:
            next(model.parameters()).grad[0, 0] = math.inf
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return [p.detach().clone() for p in model.parameters()], scales


@settings(max_examples=40, deadline=None)
@given(trace=st.lists(st.booleans(), max_size=12), fused=st.booleans(), clip=st.booleans())
def test_a_healthy_run_equals_torchs_bit_for_bit(trace, fused, clip):
    """Above min_scale, weights and scales are exactly those of torch's class."""
    if sum(trace) > 5:
        trace = trace[:5]
    theirs, their_scales = train(STOCK, trace, fused=fused, clip=clip)
    ours, our_scales = train(OURS, trace, fused=fused, clip=clip)
    assert our_scales == their_scales
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


def test_it_is_torchs_class_with_torchs_defaults():
    """The class is a subclass of torch's with torch's defaults."""
    ours, theirs = OURS("cpu"), STOCK("cpu")
    assert isinstance(ours, torch.amp.GradScaler)
    for name in ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval", "is_enabled"):
        assert getattr(ours, name)() == getattr(theirs, name)()


def overflow_until_dead(scaler_class, **settings_):
    model, optimizer = problem(optimizer=torch.optim.SGD)
    scaler = scaler_class("cpu", init_scale=4.0, **settings_)
    scaler.scale(torch.tensor(1.0))
    for _ in range(200):
        model.zero_grad()
        for p in model.parameters():
            p.grad = torch.full_like(p, math.inf)
        scaler.step(optimizer)
        scaler.update()
    model.zero_grad()
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()  # one healthy step
    scaler.step(optimizer)
    scaler.update()
    return scaler, model


def test_f5_stock_scale_falls_to_zero_and_writes_nan():
    """Fault F5 of torch: after enough overflows a healthy step writes NaN to the weights."""
    scaler, model = overflow_until_dead(STOCK)
    assert scaler.get_scale() == 0.0
    assert any(p.isnan().any() for p in model.parameters())


def test_f5_our_scale_stays_at_its_minimum_and_weights_finite():
    """Fault F5 fixed: the scale stops at 1 and the healthy step leaves finite weights."""
    scaler, model = overflow_until_dead(OURS, max_skips=None)
    assert scaler.get_scale() == 1.0
    assert all(p.isfinite().all() for p in model.parameters())
    assert scaler.counts() == ScalerCounts(updates=201, skips=200, consecutive_skips=0)


def step_with_overflow_on_two_devices(scaler_class, make_optimizer):
    """One process, model parallel over two devices, an overflow on each: torch adds the two flags."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = make_optimizer([parameter])
    scaler = scaler_class("cpu", init_scale=2.0)
    scaler.scale(torch.tensor(1.0))
    parameter.grad = torch.full((4,), math.inf)
    scaler.unscale_(optimizer)
    flags = scaler._found_inf_per_device(optimizer)
    flags[torch.device("cpu", 1)] = torch.ones(())  # the flag of a second device, as its overflow check would set it
    scaler.step(optimizer)
    return parameter, optimizer, scaler


FUSED = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("name", [n for n in FUSED if n != "adagrad"])  # whose kernel looks at the flag in torch 2.11
def test_f3_stock_applies_the_bad_step_when_two_devices_overflow(name):
    """Fault F3 of torch: a flag of 2 is not 1, so the fused kernel writes inf or NaN."""
    parameter, _, _ = step_with_overflow_on_two_devices(STOCK, FUSED[name])
    assert not parameter.isfinite().all()


@pytest.mark.parametrize("name", FUSED)
def test_f3_our_step_is_skipped_however_many_devices_overflow(name):
    """Fault F3 fixed: weights and step counts are unchanged, and the scale backs off once."""
    parameter, optimizer, scaler = step_with_overflow_on_two_devices(OURS, FUSED[name])
    assert torch.equal(parameter, torch.ones(4))
    steps = [s["step"].item() for s in optimizer.state.values() if "step" in s]
    assert all(step == 0 for step in steps)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
def test_f3_fixed_with_real_parameters_on_two_devices(name):
    """A model split over CPU and GPU, both overflowing, is unchanged, also if the GPU has other work to finish first."""
    params = [torch.nn.Parameter(torch.ones(4, device=d)) for d in ("cuda", "cpu")]
    optimizer = FUSED[name](params)
    scaler = OURS("cuda", init_scale=2.0)
    scaler.scale(torch.ones((), device="cuda"))
    for p in params:
        p.grad = torch.full_like(p, math.inf)
    torch.cuda._sleep(200_000_000)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p.cpu(), torch.ones(4)) for p in params)
    assert scaler.get_scale() == 1.0


def overflowing_steps(scaler, optimizer, model, count):
    for _ in range(count):
        scaler.scale(model(torch.ones(1, 3)).sum() * math.inf).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_stuck_run_stops_and_names_parameters(fused):
    """The max_skips-th skipped update in a row raises an error with the model's parameter names."""
    model, optimizer = problem(fused=fused)
    scaler = OURS("cpu", max_skips=4, named_parameters=model.named_parameters())
    overflowing_steps(scaler, optimizer, model, 3)
    with pytest.raises(OverflowStop, match=r"0\.weight \(12 of 12\)"):
        overflowing_steps(scaler, optimizer, model, 1)


def test_stuck_run_uses_the_optimizers_names_or_positions():
    """Without named_parameters=, names come from the optimizer, else position and shape."""
    model = torch.nn.Linear(3, 1)
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    with pytest.raises(OverflowStop, match=r"weight \(3 of 3\)"):
        overflowing_steps(OURS("cpu", max_skips=1), named, model, 1)
    model.zero_grad()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OverflowStop, match=r"parameter 1 of group 0, shape \(1,\)"):
        overflowing_steps(OURS("cpu", max_skips=1), plain, model, 1)


@pytest.mark.parametrize(
    "bad",
    [{"backoff_factor": 0.0}, {"backoff_factor": -1.0}, {"growth_factor": 1.0}, {"growth_interval": 0}, {"init_scale": 0.0},
     {"init_scale": 0.5}, {"init_scale": math.nan}, {"min_scale": 0.0}, {"max_skips": 0}, {"growth_interval": 1.5}],
    ids=str,
)  # fmt: skip
def test_invalid_settings_are_rejected(bad):
    """A setting that torch accepts but that cannot work raises a HalfstepError with the value."""
    name, value = next(iter(bad.items()))
    with pytest.raises(HalfstepError, match=f"{name}={value}"):
        OURS("cpu", **bad)


def test_setters_are_checked_and_keep_growing():
    """An interval shorter than the steps already counted stops growth for ever in torch, but not here."""

    def clean_step(scaler):
        model, optimizer = problem(optimizer=torch.optim.SGD)
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    scales = {}
    for kind in (STOCK, OURS):
        scaler = kind("cpu", init_scale=4.0, growth_interval=100)
        for _ in range(5):
            clean_step(scaler)
        scaler.set_growth_interval(3)
        for _ in range(20):
            clean_step(scaler)
        scales[kind] = scaler.get_scale()
    assert scales[STOCK] == 4.0
    assert scales[OURS] > 4.0
    ours = OURS("cpu")
    ours.set_growth_factor(4.0)
    ours.set_backoff_factor(0.25)
    assert (ours.get_growth_factor(), ours.get_backoff_factor()) == (4.0, 0.25)
    for setter, value in ((ours.set_growth_factor, 1.0), (ours.set_backoff_factor, 0.0), (ours.set_growth_interval, 0)):
        with pytest.raises(HalfstepError):
            setter(value)


def test_update_accepts_a_new_scale():
    """A float, an int or a tensor sets the scale; a number below min_scale is rejected, a tensor clamped."""
    scaler = OURS("cpu")
    scaler.scale(torch.tensor(1.0))
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0
    scaler.update(16)
    assert scaler.get_scale() == 16.0
    scaler.update(torch.tensor(0.25))
    assert scaler.get_scale() == 1.0
    for bad in (0.5, math.nan, math.inf):
        with pytest.raises(HalfstepError, match="min_scale"):
            scaler.update(bad)


def test_a_positional_closure_is_rejected_like_a_keyword_one():
    """A closure raises; torch would run a positional one unscaled."""
    model, optimizer = problem()
    scaler = OURS("cpu")
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    for args, kwargs in (((lambda: None,), {}), ((), {"closure": lambda: None})):
        with pytest.raises(RuntimeError, match="Closure"):
            scaler.step(optimizer, *args, **kwargs)


def test_disabled_scaler_is_transparent():
    """With enabled=False steps are normal, nothing is scaled and the state is empty."""
    model, optimizer = problem()
    scaler = OURS("cpu", enabled=False, growth_factor=0.0)
    loss = model(torch.ones(1, 3)).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    before = [p.clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    assert pickle.loads(pickle.dumps(scaler)).is_enabled() is False


def test_pickle_and_deepcopy_keep_scale_tracker_and_counts():
    """A copy has the same state and counts as the original."""
    model, optimizer = problem()
    scaler = OURS("cpu", growth_interval=7, named_parameters=model.named_parameters())
    overflowing_steps(scaler, optimizer, model, 2)
    for clone in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert clone.state_dict() == scaler.state_dict()
        assert clone.counts() == ScalerCounts(2, 2, 2)


def test_state_is_exchanged_with_torch_and_others():
    """torch loads our state; we load torch's, LossScaler's and DeepSpeed's."""
    model, optimizer = problem()
    scaler = OURS("cpu", growth_interval=9)
    overflowing_steps(scaler, optimizer, model, 1)
    stock = STOCK("cpu")
    stock.load_state_dict(scaler.state_dict())
    assert stock.state_dict() == {k: v for k, v in scaler.state_dict().items() if k in stock.state_dict()}
    for source in (stock.state_dict(), scaler.state_dict(), LossScaler("torch", init_scale=32768.0).state_dict()):
        target = OURS("cpu")
        target.load_state_dict(source)
        assert target.get_scale() == 32768.0
    target.load_state_dict(
        {"cur_scale": 256.0, "dynamic": True, "cur_iter": 12, "last_overflow_iter": 4, "scale_window": 50}
    )
    assert (target.get_scale(), target.get_growth_interval(), target._get_growth_tracker()) == (256.0, 50, 7)


def test_loading_repairs_or_rejects_a_bad_state(caplog):
    """A collapsed scale is raised with a warning; an empty state, a NoScaler's or an invalid one is rejected."""
    scaler = OURS("cpu")
    scaler.load_state_dict(STOCK("cpu").state_dict() | {"scale": 0.0, "growth_interval": 5, "_growth_tracker": 900})
    assert scaler.get_scale() == 1.0
    assert "below min_scale" in caplog.text
    assert scaler._get_growth_tracker() == 4
    with pytest.raises(RuntimeError, match="empty"):
        scaler.load_state_dict({})
    with pytest.raises(HalfstepError, match="NoScaler"):
        scaler.load_state_dict(halfstep.NoScaler().state_dict())
    with pytest.raises(HalfstepError, match="growth_factor=0.5"):
        scaler.load_state_dict(STOCK("cpu").state_dict() | {"growth_factor": 0.5})


def test_two_optimizers_one_update_counts_one_skip():
    """An overflow in either optimizer counts as one skipped update."""
    (m1, o1), (m2, o2) = problem(0), problem(1)
    scaler = OURS("cpu", init_scale=8.0)
    scaler.scale(m1(torch.ones(1, 3)).sum() + m2(torch.ones(1, 3)).sum()).backward()
    next(m1.parameters()).grad.fill_(math.inf)
    scaler.step(o1)
    scaler.step(o2)
    scaler.update()
    assert scaler.counts() == ScalerCounts(1, 1, 1)
    assert scaler.get_scale() == 4.0


@pytest.mark.gpu
def test_step_and_update_can_be_captured_in_a_cuda_graph():
    """Fused step and update can be replayed from a graph and keep counting."""
    model = torch.nn.Linear(4, 4, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True, capturable=True)
    scaler = OURS("cuda", init_scale=8.0, growth_interval=2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    scaler.scale(torch.ones((), device="cuda"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            scaler.step(optimizer)
            scaler.update()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.step(optimizer)
        scaler.update()
    for _ in range(4):
        graph.replay()
    assert scaler.counts().updates == 6
    assert scaler.get_scale() == 64.0
