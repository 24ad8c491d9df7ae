"""Lean optimizers: masters of 16-bit weights, gated steps, state."""

import contextlib
import copy
import io
import itertools
import os
import pickle

import pytest
import torch
from torch import nn

from halfstep.errors import SettingError
from halfstep.kernels.split import join, split
from halfstep.optim import SGD, Adam, AdamW, Lion, adopt
from optim_cases import BF16, FP16, FP32, bits, give_grads, same, snapshot, weights

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BUILDERS = {
    "AdamW": lambda params, **kw: AdamW(params, lr=0.01, weight_decay=0.1, **kw),
    "Adam-amsgrad": lambda params, **kw: Adam(params, lr=0.01, weight_decay=0.1, amsgrad=True, **kw),
    "Lion": lambda params, **kw: Lion(params, lr=0.01, weight_decay=0.1, **kw),
    "SGD": lambda params, **kw: SGD(params, lr=0.1, **kw),
    "SGD-momentum": lambda params, **kw: SGD(params, lr=0.1, momentum=0.9, nesterov=True, **kw),
}
every_class = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
every_16_bit = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
every_layout = pytest.mark.parametrize(
    ("dtype", "master", "states"),
    [
        (FP32, "policy", "policy"),
        (FP32, "none", "bf16"),
        (BF16, "policy", "policy"),
        *itertools.product([BF16, FP16], ["split", "fp32", "none"], ["fp32", "bf16"]),
    ],
    ids=str,
)


# --- arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "stock", "options"),
    [
        *((AdamW, torch.optim.AdamW, {"amsgrad": a, "maximize": m}) for a in (False, True) for m in (False, True)),
        *((Adam, torch.optim.Adam, {"weight_decay": w, "amsgrad": a}) for w in (0.0, 0.1) for a in (False, True)),
        (SGD, torch.optim.SGD, {}),
        (SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
        (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
        (AdamW, torch.optim.AdamW, {"lr": torch.tensor(0.02)}),
        (SGD, torch.optim.SGD, {"lr": torch.tensor(0.02), "momentum": 0.5}),
    ],
    ids=str,
)
def test_fp32_weights_follow_torchs_class(ours, stock, options):
    """With fp32 weights a lean optimizer is torch's own, state names included."""
    mine, theirs = weights((4, 3), (5,), ()), weights((4, 3), (5,), ())
    options = {"lr": 0.01} | options
    a, b = ours(mine, **options), stock(theirs, **options)
    for t in range(8 if INTERPRETED else 50):
        give_grads(mine, t)
        give_grads(theirs, t)
        a.step()
        b.step()
    for p, q in zip(mine, theirs, strict=True):
        assert p.dtype is FP32
        assert torch.allclose(p, q, rtol=1e-5, atol=2e-6)
        assert a.state[p].keys() - {"step"} == b.state[q].keys() - {"step"}
        for name in b.state[q].keys() - {"step"}:
            assert torch.allclose(a.state[p][name], b.state[q][name], rtol=1e-4, atol=1e-6)


@every_class
@every_16_bit
def test_split_masters_are_the_fp32_masters(build, dtype):
    """Many steps give bit-identical masters with 16 more bits or with an fp32 copy, and the nearest weights."""
    one, two = weights((64, 5), (7,), dtype=dtype), weights((64, 5), (7,), dtype=dtype)
    a, b = build(one, master="split"), build(two, master="fp32")
    for t in range(8 if INTERPRETED else 50):
        give_grads(one, t)
        give_grads(two, t)
        a.step()
        b.step()
    for p, q in zip(one, two, strict=True):
        master = b.state[q]["master"]
        assert master.dtype is FP32
        normal = (p.abs() >= 2.0**-14) | (dtype is BF16)  # below, an fp16 split has its documented bound
        assert torch.equal(a.master_of(p)[normal], master[normal])
        assert torch.allclose(a.master_of(p), master, rtol=0, atol=1e-7)
        assert torch.equal(p, split(a.master_of(p), dtype)[0])
        assert a.state[p]["low"].dtype is torch.int16
        assert torch.equal(b.master_of(q), master)


@every_16_bit
def test_the_master_passed_at_the_start_is_the_one_that_is_trained(dtype):
    """start_master keeps the digits that casting a model rounds off, and a second call changes nothing."""
    exact = torch.randn(50)
    for master in ("split", "fp32"):
        param = nn.Parameter(split(exact, dtype)[0])
        optimizer = SGD([param], lr=1.0, master=master)
        optimizer.start_master(param, exact)
        optimizer.start_master(param, torch.zeros(50))
        assert torch.allclose(optimizer.master_of(param), exact, rtol=0, atol=2.0**-40)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert torch.allclose(optimizer.master_of(param), exact, rtol=0, atol=2.0**-40)


def test_masters_are_stored_only_where_they_are_of_use():
    """fp32 weights, and 16-bit ones with master=none, store nothing; their master is the weight in fp32."""
    (half,), (full,) = weights((3,), dtype=BF16), weights((3,))
    optimizer = AdamW([half, full], master="none")
    give_grads([half, full], 0)
    optimizer.step()
    assert not {"low", "master"} & (optimizer.state[half].keys() | optimizer.state[full].keys())
    assert torch.equal(optimizer.master_of(half), half.detach().float())
    fresh = nn.Parameter(torch.ones(2, dtype=FP16))
    assert torch.equal(optimizer.master_of(fresh), torch.ones(2))


@every_16_bit
@pytest.mark.parametrize("build", [BUILDERS["AdamW"], BUILDERS["SGD-momentum"]], ids=["AdamW", "SGD"])
def test_a_weight_of_no_dimensions_is_trained(dtype, build):
    """A temperature or a scale is a parameter like any other, in every layout of its master."""
    masters = []
    for master in ("split", "fp32"):
        param = nn.Parameter(torch.tensor(2.5, dtype=dtype))
        optimizer = build([param], master=master)
        for _ in range(3):
            param.grad = torch.ones_like(param)
            optimizer.step()
        masters.append(optimizer.master_of(param))
        assert masters[-1].dtype is FP32
        assert param.item() < 2.5
    assert torch.equal(*masters)


@pytest.mark.skipif(INTERPRETED, reason="thousands of steps, minutes in Triton's interpreter")
@pytest.mark.parametrize(("dtype", "lr"), [(BF16, 1.9 * 2.0**-8), (FP16, 1.9 * 2.0**-11)], ids=["bf16", "fp16"])
def test_plain_16_bit_weights_do_not_move_where_split_masters_converge(dtype, lr):
    """lr times gradient is below half a ulp of the weights: nothing moves without a master, and all arrive with one."""
    start, target, ends = torch.linspace(1.0, 1.4, 8).to(dtype), torch.full((8,), 1.5), {}
    for master in ("none", "split", "fp32"):
        param = nn.Parameter(start.clone())
        optimizer = SGD([param], lr=lr, master=master)
        for _ in range(int(3 / lr)):
            param.grad = (param.detach().float() - target).to(dtype)
            optimizer.step()
        ends[master] = param.detach().float()
    assert torch.equal(ends["none"], start.float())
    assert torch.allclose(ends["split"], target, atol=0.03)  # 3 time constants from at most 0.5 away
    assert torch.equal(ends["split"], ends["fp32"])


@pytest.mark.parametrize(("dtype", "grad"), [(FP16, -1000.0), (BF16, -1e36)], ids=["fp16", "bf16"])
def test_a_master_too_large_for_its_weight_does_not_make_the_weight_inf(dtype, grad):
    """A finite master that would round to inf counts as an overflow: the model never computes with inf."""
    param = nn.Parameter(torch.tensor([torch.finfo(dtype).max, 1.0]).to(dtype))
    optimizer = SGD([param], lr=1.0, master="split")
    param.grad = torch.tensor([grad, 0.5]).to(dtype)
    optimizer.step()
    assert param.isfinite().all()
    assert optimizer.master_of(param).isfinite().all()


def test_fp64_weights_are_not_rounded():
    """An fp64 weight keeps its digits, or is rejected: never silently rounded to fp32."""
    param = nn.Parameter(torch.tensor([1 + 2.0**-40], dtype=torch.float64))
    optimizer = SGD([param], lr=0.0)
    param.grad = torch.ones_like(param)
    with contextlib.suppress(SettingError):
        optimizer.step()
    assert param.item() == 1 + 2.0**-40


# --- weights that somebody else changes --------------------------------------------------------------------------


def zero_a_row(param):
    param[0].zero_()


def clamp_data(param):
    param.data.clamp_(-0.3, 0.3)  # as WGAN does: no version counter notices


def copy_constants(param):
    param.copy_(torch.linspace(-2, 2, param.numel()).reshape(param.shape))


def replace_storage(param):
    param.data = (param.data * 0.5).clone()


def mask_weights(param):
    param.mul_((torch.arange(param.numel()).reshape(param.shape) % 3 != 0).to(param.dtype))


EDITS = [zero_a_row, clamp_data, copy_constants, replace_storage, mask_weights]


@pytest.mark.skipif(INTERPRETED, reason="tests/optim/test_fused.py has the edits for the kernels")
@pytest.mark.parametrize("name", ["AdamW", "Lion", "SGD-momentum"])
@every_16_bit
@pytest.mark.parametrize("master", ["split", "fp32", "none"])
@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_weights_edited_between_steps_are_trained_from_there(name, dtype, master, states):
    """Zeroing, clamping, copying, new storage and masks have the effect that they have on fp32 weights."""
    (param,), (exact,) = weights((8, 4), dtype=dtype), weights((8, 4))
    exact.data.copy_(param)
    build = BUILDERS[name]
    lean, full = build([param], master=master, states=states), build([exact], states=states)
    one_ulp, steps = torch.finfo(dtype).eps, 2
    for edit in EDITS:
        for step in range(steps):
            give_grads([param], step)
            exact.grad = param.grad.float()
            lean.found_inf = full.found_inf = torch.tensor(float(step == 1))  # the edits stay after a skipped step too
            lean.step()
            full.step()
            with torch.no_grad():
                edit(param)
                edit(exact)
            assert torch.allclose(lean.master_of(param), param.float(), rtol=one_ulp, atol=2.0**-25)
        give_grads([param], steps)
        exact.grad = param.grad.float()
        lean.found_inf = full.found_inf = torch.zeros(())
        lean.step()
        full.step()
        assert torch.allclose(param.float(), exact, rtol=8 * one_ulp, atol=8 * one_ulp)
        exact.data.copy_(param)  # so that the roundings of one edit do not add to those of the next


@every_16_bit
def test_masters_without_edits_are_not_taken_for_edited_ones(dtype):
    """Ties, subnormals and masters clamped to the dtype's range step on exactly as they are, with an fp32 master."""
    largest = torch.finfo(dtype).max
    exact = torch.tensor([1 + 2.0**-8, 1 + 2.0**-11, 1e-41, -1e-41, 3e-8, -0.0, 0.1, largest, -largest])
    param = nn.Parameter(split(exact, dtype)[0])
    optimizer = SGD([param], lr=1.0, master="fp32")
    optimizer.start_master(param, exact)
    for grad in (0.0, 0.0, 0.0):
        param.grad = torch.full_like(param, grad)
        optimizer.step()
        assert torch.equal(bits(optimizer.state[param]["master"]), bits(exact))
        assert torch.equal(bits(optimizer.master_of(param)), bits(exact))
    beyond = 1e36 if dtype is BF16 else 1000.0
    param.grad = torch.tensor([0.0] * 7 + [-beyond, beyond]).to(dtype)  # past both ends
    optimizer.step()
    assert torch.equal(optimizer.master_of(param), exact)
    assert torch.equal(param, split(exact, dtype)[0])


@pytest.mark.parametrize("resize", [lambda t: t[:4], lambda t: torch.cat([t, t])], ids=["same address", "larger"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_parameter_resized_after_training_is_rejected(dtype, resize):
    """The states of the old size must not be read past their end; without them the parameter trains again."""
    (param,) = weights((8, 3), dtype=dtype)
    optimizer = AdamW([param], lr=0.01)
    for _ in range(2):
        give_grads([param], 0)
        optimizer.step()
    param.grad = None
    param.data = resize(param.data)
    give_grads([param], 1)
    with pytest.raises(SettingError, match=r"resized after it was trained.*optimizer.state.pop"):
        optimizer.step()
    optimizer.state.pop(param)
    optimizer.step()
    assert param.isfinite().all()


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_a_model_cast_to_fp32_in_between_is_trained_as_it_is(master):
    """After model.float() the fp32 weight is its own master, and after model.bfloat16() it has one again."""
    (param,) = weights((4, 3), dtype=BF16)
    optimizer = SGD([param], lr=0.5, master=master)
    for dtype in (BF16, FP32, BF16):
        param.data = param.data.to(dtype)
        before = param.detach().double()
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert torch.allclose(param.double(), before - 0.5, atol=2.0**-7)


# --- the flag and the scale --------------------------------------------------------------------------------------


@every_class
@every_layout
def test_a_flagged_step_changes_nothing(build, dtype, master, states):
    """found_inf = 1 leaves weights, masters, residuals, moments and step counts bit for bit, whatever the gradients are."""
    params = weights((8, 3), (4,), dtype=dtype)
    optimizer = build(params, master=master, states=states)
    for t in range(3):
        give_grads(params, t)
        optimizer.step()
    before = snapshot(optimizer)
    for bad in (torch.inf, torch.nan, 1.0):
        for p in params:
            p.grad = torch.full_like(p, bad)
        optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.tensor(4.0)
        optimizer.step()
        assert same(before, snapshot(optimizer))


@every_class
@every_layout
def test_a_flagged_first_step_changes_nothing_and_costs_nothing(build, dtype, master, states):
    """After a flagged first step the weights are untouched, the count is 0, and training continues as if it never happened."""
    skipped, clean = weights((8, 3), (4,), dtype=dtype), weights((8, 3), (4,), dtype=dtype)
    a, b = build(skipped, master=master, states=states), build(clean, master=master, states=states)
    before = [bits(p) for p in skipped]
    for p in skipped:
        p.grad = torch.full_like(p, torch.nan)
    a.found_inf = torch.ones(())
    a.step()
    assert all(torch.equal(bits(p), old) for p, old in zip(skipped, before, strict=True))
    assert all(a.state[p]["step"] == 0 for p in skipped)
    a.found_inf = torch.zeros(())
    for t in range(3):
        give_grads(skipped, t)
        give_grads(clean, t)
        a.step()
        b.step()
    assert same(snapshot(a), snapshot(b))


def with_master(exact, dtype, master):
    """A weight and its optimizer, with an exact fp32 master as the Engine passes it."""
    param = nn.Parameter(split(exact, dtype)[0])
    optimizer = AdamW([param], master=master)
    optimizer.start_master(param, exact)
    param.grad = torch.ones_like(param)
    return param, optimizer


@every_16_bit
@pytest.mark.parametrize("master", ["split", "fp32", "none"])
@pytest.mark.parametrize(
    "exact",
    [
        [-0.0, 0.0],
        [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11],
        [1.5 * 2.0**-24 - 2.0**-45, 2.5 * 2.0**-24, 2.0**-42, -(2.0**-42)],
        [1e-45, -1e-40, 3e38, -3e38],
    ],
    ids=["zeros", "ties", "fp16 subnormals", "extremes"],
)
def test_a_flagged_step_keeps_the_bits_of_awkward_weights(dtype, master, exact):
    """Signed zeros, ties, subnormals and infinities are not rounded again by a step that does not happen."""
    param, optimizer = with_master(torch.tensor(exact), dtype, master)
    before = bits(param), {name: bits(value) for name, value in optimizer.state[param].items()}
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(bits(param), before[0])
    assert all(torch.equal(bits(optimizer.state[param][name]), old) for name, old in before[1].items())


@every_16_bit
def test_a_flagged_step_keeps_every_weight_pattern(dtype):
    """All 65536 weights, NaN and infinities included, survive a flagged step bit for bit, in every layout."""
    pattern = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int64).to(torch.int16)
    for master in ("split", "fp32", "none"):
        param = nn.Parameter(pattern.clone().view(dtype))
        optimizer = SGD([param], master=master)
        param.grad = torch.ones_like(param)
        optimizer.found_inf = torch.ones(())
        optimizer.step()
        assert torch.equal(bits(param), pattern)


@every_class
@every_16_bit
def test_grad_scale_divides_the_gradient(build, dtype):
    """Gradients times a power of two with that grad_scale give the same step, bit for bit."""
    plain, scaled = weights((6, 2), dtype=dtype), weights((6, 2), dtype=dtype)
    a, b = build(plain), build(scaled)
    for t in range(5):
        give_grads(plain, t, 0.1)
        give_grads(scaled, t, 0.1)
        scaled[0].grad.mul_(64)
        b.grad_scale, b.found_inf = torch.tensor(64.0), torch.zeros(())
        a.step()
        b.step()
    assert same(snapshot(a), snapshot(b))


def test_torchs_own_grad_scaler_unscales_and_skips():
    """torch.amp.GradScaler drives a lean optimizer by the same protocol, and leaves no scale behind."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    (param,) = weights((4,), dtype=FP16)
    optimizer = AdamW([param], master="split")
    scaler.scale((param.float() ** 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state[param]["step"] == 1
    assert getattr(optimizer, "grad_scale", None) is None
    assert getattr(optimizer, "found_inf", None) is None
    before = snapshot(optimizer)
    param.grad = torch.full_like(param, torch.inf)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    assert same(before, snapshot(optimizer))
    assert scaler.get_scale() == 4.0


def test_fp32_gradients_of_16_bit_weights_are_not_rounded():
    """Gradients that were accumulated in fp32 are not rounded to the weight's dtype first."""
    (param,) = weights((3,), dtype=BF16)
    param.grad_dtype = FP32
    param.grad = torch.full((3,), 1 + 2.0**-20)
    optimizer = SGD([param], lr=1.0, master="split")
    before = optimizer.master_of(param)
    optimizer.step()
    assert torch.equal(optimizer.master_of(param), before - (1 + 2.0**-20))


@pytest.mark.skipif(INTERPRETED, reason="hundreds of steps, half a minute in Triton's interpreter")
def test_the_step_count_is_fp32_whatever_the_default_dtype():
    """Under a 16-bit default dtype a count of that dtype would stop at 256 and spoil the bias corrections."""
    (param,) = weights((2,), dtype=BF16)
    optimizer = AdamW([param])
    param.grad = torch.ones_like(param)
    torch.set_default_dtype(BF16)
    try:
        for _ in range(300):
            optimizer.step()
    finally:
        torch.set_default_dtype(FP32)
    assert optimizer.state[param]["step"].dtype is FP32
    assert optimizer.state[param]["step"] == 300


def test_parameters_without_gradients_are_left_out():
    """Only parameters with a gradient get state or move."""
    a, b = weights((2,), (2,), dtype=BF16)
    optimizer = AdamW([a, b], master="split")
    a.grad = torch.ones_like(a)
    before = bits(b)
    optimizer.step()
    assert b not in optimizer.state
    assert torch.equal(bits(b), before)


# --- what is rejected ---------------------------------------------------------------------------------------------


def test_a_closure_computes_the_gradients_first():
    """As with torch's optimizers: it runs once, with gradients enabled, and its result is returned."""
    stepped, plain = weights((3,)), weights((3,))
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        loss = stepped[0].float().square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = AdamW(stepped, lr=0.1).step(closure)
    plain[0].float().square().sum().backward()
    AdamW(plain, lr=0.1).step()
    assert calls == [True]
    assert loss.item() > 0
    assert torch.equal(bits(stepped[0]), bits(plain[0]))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 warns although they were asked for
def test_sparse_gradients_are_rejected_before_anything_moves():
    """The message names the kind and shape; no other parameter has been stepped."""
    dense, table = weights((3,), (5, 2), dtype=BF16)
    dense.grad = torch.ones_like(dense)
    table.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2, dtype=BF16), (5, 2), check_invariants=True)
    optimizer = AdamW([dense, table])
    before = bits(dense)
    with pytest.raises(SettingError, match=r"sparse gradient of shape \(5, 2\)"):
        optimizer.step()
    assert torch.equal(bits(dense), before)


def test_complex_parameters_are_rejected():
    """Complex weights have no 16-bit form here."""
    param = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    param.grad = torch.ones_like(param)
    with pytest.raises(SettingError, match=r"complex parameter of shape \(2,\)"):
        SGD([param]).step()


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda p: AdamW(p, lr=-1.0), "lr=-1.0"),
        (lambda p: AdamW(p, lr=float("nan")), "lr=nan"),
        (lambda p: AdamW(p, betas=(0.9, 1.0)), "betas"),
        (lambda p: Adam(p, eps=-1e-8), "eps"),
        (lambda p: Adam(p, weight_decay=-1.0), "weight_decay"),
        (lambda p: SGD(p, lr=-1.0), "lr=-1.0"),
        (lambda p: SGD(p, momentum=-0.1), "momentum=-0.1"),
        (lambda p: SGD(p, weight_decay=-0.1), "weight_decay=-0.1"),
        (lambda p: SGD(p, nesterov=True), "nesterov needs momentum"),
        (lambda p: SGD(p, nesterov=True, momentum=0.9, dampening=0.1), "no dampening"),
        (lambda p: AdamW(p, master="splt"), "Did you mean 'split'"),
        (lambda p: AdamW(p, states="fp8"), "Unknown states 'fp8'"),
    ],
)
def test_bad_settings_are_rejected(build, match):
    """A setting that cannot work is rejected at once, with its value."""
    with pytest.raises(SettingError, match=match):
        build(weights((2,)))


# --- state --------------------------------------------------------------------------------------------------------


def trained(build, dtype, master, states, steps=3, seed=0):
    params = weights((6, 2), (3,), dtype=dtype, seed=seed)
    optimizer = build(params, master=master, states=states)
    for t in range(steps):
        give_grads(params, t)
        optimizer.step()
    return params, optimizer


@every_class
@every_layout
def test_state_dict_round_trip_is_exact(build, dtype, master, states):
    """Through a file and into a fresh optimizer: the same dtypes and bits, and the same next step."""
    params, optimizer = trained(build, dtype, master, states)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others, fresh = trained(build, dtype, master, states, steps=0, seed=9)
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    fresh.load_state_dict(torch.load(file))
    for p, q in zip(params, others, strict=True):
        assert {k: v.dtype for k, v in optimizer.state[p].items()} == {k: v.dtype for k, v in fresh.state[q].items()}
    before = snapshot(optimizer)
    assert same(before, snapshot(fresh))
    assert same(snapshot(fresh), before)
    give_grads(params, 7)
    give_grads(others, 7)
    optimizer.step()
    fresh.step()
    assert same(snapshot(optimizer), snapshot(fresh))


def test_state_dtypes_are_what_was_asked_for():
    """int16 residuals, fp32 masters, fp32 or bf16 moments, fp32 counts."""
    for master, states in itertools.product(["split", "fp32"], ["fp32", "bf16"]):
        (param, _), optimizer = trained(BUILDERS["Adam-amsgrad"], FP16, master, states)
        stored = optimizer.state[param]
        moment = BF16 if states == "bf16" else FP32
        held_as = {"low": torch.int16} if master == "split" else {"master": FP32}
        moments = dict.fromkeys(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), moment)
        assert {k: v.dtype for k, v in stored.items()} == {"step": FP32} | moments | held_as


def test_loading_does_not_alias_the_saved_state():
    """The dictionary that was loaded stays as it was when training continues."""
    params, optimizer = trained(BUILDERS["AdamW"], BF16, "split", "fp32")
    saved = copy.deepcopy(optimizer.state_dict())
    unchanged = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    give_grads(params, 5)
    optimizer.step()
    for index, stored in unchanged["state"].items():
        assert all(torch.equal(value, saved["state"][index][name]) for name, value in stored.items())


def test_loading_keeps_the_groups_shared_with_the_adopted_optimizer():
    """After load_state_dict a scheduler of the stock optimizer still moves the rate that is used."""
    param = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = torch.optim.AdamW([param], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    lean = adopt(optimizer, master="split", states="fp32")
    group = lean.param_groups[0]
    param.grad = torch.ones_like(param)
    lean.step()
    saved = copy.deepcopy(lean.state_dict())
    saved["param_groups"][0]["lr"] = 0.125
    lean.load_state_dict(saved)
    assert lean.param_groups is optimizer.param_groups
    assert lean.param_groups[0] is group
    assert lean.state is optimizer.state
    assert group["lr"] == 0.125
    scheduler.step()
    assert lean.param_groups[0]["lr"] == 0.0625


def test_a_state_without_masters_gets_them_at_the_next_step():
    """A stock optimizer's state dict has no masters; 16-bit weights get one when they step."""
    param = nn.Parameter(torch.ones(3, dtype=BF16))
    stock = torch.optim.AdamW([param])
    param.grad = torch.ones_like(param)
    stock.step()
    lean = AdamW([param], master="split")
    lean.load_state_dict(stock.state_dict())
    lean.step()
    assert lean.state[param]["step"] == 2
    assert "low" in lean.state[param]


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize("steps", [0, 2])
@every_16_bit
def test_copies_are_complete(clone, steps, dtype):
    """A copied or pickled optimizer keeps its master and states settings and takes the same next step."""
    params, optimizer = trained(BUILDERS["AdamW"], dtype, "fp32", "bf16", steps=steps)
    others, twin = clone((params, optimizer))
    give_grads(params, 9)
    give_grads(others, 9)
    optimizer.step()
    twin.step()
    assert (twin.master, twin.states) == ("fp32", "bf16")
    assert all(p is not q for p, q in zip(params, others, strict=True))
    assert same(snapshot(optimizer), snapshot(twin))


def test_join_of_weight_and_low_is_the_master():
    """Weight and residual, which a checkpoint contains, are enough to restore the master."""
    (param, _), optimizer = trained(BUILDERS["AdamW"], BF16, "split", "fp32")
    assert torch.equal(join(param.detach(), optimizer.state[param]["low"]), optimizer.master_of(param))
