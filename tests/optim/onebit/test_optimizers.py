"""The three optimizers without a process group, or with ranks as threads: parents, precision, skips, states, rejections."""

import copy
import logging

import pytest
import torch
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.errors import RankError, SettingError
from halfstep.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from onebit_cases import SHAPES, gradients, start
from optim_cases import same, snapshot, weights
from thread_ranks import on_threads

SETTINGS = {
    OneBitAdam: {"freeze_step": 4},
    ZeroOneAdam: {"var_freeze_step": 6, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4},
    OneBitLamb: {"freeze_step": 4, "coeff_beta": 0.5},
}
KINDS = list(SETTINGS)
STEPS = 16
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def build(kind, wire=None, dtype=torch.float32, **settings):
    """Parameters and an optimizer over them."""
    params = [nn.Parameter(w.to(dtype)) for w in start()]
    optimizer = kind(
        params, **({"lr": 1e-2, "weight_decay": 0.01, "allow_unverified": True} | SETTINGS[kind] | settings)
    )
    optimizer._wire = wire
    return params, optimizer


def give(params, step, rank=0):
    for param, grad in zip(params, gradients(step, rank), strict=True):
        param.grad = grad.to(param.dtype)


def train(params, optimizer, steps, rank=0):
    for step in steps:
        give(params, step, rank)
        optimizer.step()


# --- the parents ----------------------------------------------------------------------------------------------------


def adam_without_correction(param, grad, state, decay):
    """The direction of Adam as torch writes it, without bias correction."""
    state["m"].mul_(0.9).add_(grad, alpha=1 - 0.9)
    state["v"].mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)
    update = state["m"] / (state["v"].sqrt() + 1e-8)
    return update + decay * param


def lamb(param, update):
    """LAMB's coefficient of a layer, on the host."""
    norm, size = param.norm(), update.norm()
    return float((norm / size).clamp(0.01, 10.0)) if norm and size else 1.0


@pytest.mark.parametrize("kind", [OneBitAdam, ZeroOneAdam], ids=lambda kind: kind.__name__)
def test_dense_steps_are_adams_bit_for_bit(kind):
    """Adam without bias correction, for 0/1 Adam while its variance interval is 1."""
    settings = {"freeze_step": 99} if kind is OneBitAdam else {"var_update_scaler": 99, "var_freeze_step": 99}
    params, optimizer = build(kind, **settings)
    expected = start()
    states = [{"m": torch.zeros_like(w), "v": torch.zeros_like(w)} for w in expected]
    for step in range(20):
        for weight, grad, state in zip(expected, gradients(step, 0), states, strict=True):
            weight.add_(-1e-2 * adam_without_correction(weight, grad, state, 0.01))
        train(params, optimizer, [step])
        assert all(torch.equal(p, w) for p, w in zip(params, expected, strict=True))


def test_dense_steps_are_lambs():
    """Within one ulp of the largest weight."""
    params, optimizer = build(OneBitLamb, freeze_step=99)
    expected = start()
    states = [{"m": torch.zeros_like(w), "v": torch.zeros_like(w)} for w in expected]
    for step in range(20):
        for weight, grad, state in zip(expected, gradients(step, 0), states, strict=True):
            update = adam_without_correction(weight, grad, state, 0.01)
            weight.add_(-1e-2 * lamb(weight, update) * update)
        train(params, optimizer, [step])
        for param, weight in zip(params, expected, strict=True):
            assert torch.allclose(param, weight, rtol=2.4e-7, atol=2.4e-7)


def test_with_bias_correction_dense_steps_are_torchs_adam():
    """Without weight decay, which torch applies elsewhere; within rounding."""
    params, optimizer = build(OneBitAdam, freeze_step=99, weight_decay=0.0, bias_correction=True)
    expected = [nn.Parameter(w) for w in start()]
    reference = torch.optim.Adam(expected, lr=1e-2)
    for step in range(20):
        train(params, optimizer, [step])
        train(expected, reference, [step])
    assert all(torch.allclose(p, w, rtol=0, atol=1e-6) for p, w in zip(params, expected, strict=True))


@every_kind
def test_one_process_trains_through_the_whole_schedule(kind):
    """Every step moves the momentum (DeepSpeed's 0/1 Adam leaves it on most steps), and nothing is sent."""
    params, optimizer = build(kind)
    for step in range(STEPS):
        before = None if not step else optimizer.state[params[0]]["exp_avg"].clone()
        train(params, optimizer, [step])
        assert before is None or not torch.equal(before, optimizer.state[params[0]]["exp_avg"])
    assert optimizer.schedule.frozen
    assert optimizer.wire.sent_bytes == 0


# --- 16-bit weights -------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_fp16_weights_have_exact_masters(kind, master):
    """The masters are those of an fp32 run with the same gradients, from the same values, and the weight is their rounding."""

    def run(wire):
        params, optimizer = build(kind, wire, torch.float16, master=master, allow_unverified=False)
        wide = [nn.Parameter(p.detach().float()) for p in params]
        other = kind(wide, lr=1e-2, weight_decay=0.01, allow_unverified=True, **SETTINGS[kind])
        other._wire = wire
        for step in range(STEPS):
            give(params, step, wire.rank)
            for a, b in zip(wide, params, strict=True):
                a.grad = b.grad.float()
            optimizer.step()
            other.step()
        masters = [optimizer.master_of(p) for p in params]
        return [(m - w.detach()).abs().max().item() for m, w in zip(masters, wide, strict=True)] + [
            (m.half() - p.detach()).abs().max().item() for m, p in zip(masters, params, strict=True)
        ]

    for differences in on_threads(2, run):
        assert max(differences) < 3e-6  # a split fp16 master is rounded once more at each step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@every_kind
def test_other_precisions_are_rejected_unless_allowed(kind, dtype, caplog):
    """With the reason and the way out, before anything changes; allowed, it is logged once and recorded."""
    params, optimizer = build(kind, dtype=dtype, allow_unverified=False)
    give(params, 0)
    before = [p.detach().clone() for p in params]
    with pytest.raises(SettingError, match="verified in fp16 only.*allow_unverified=True"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    assert not optimizer.state
    params, optimizer = build(kind, dtype=dtype)
    with caplog.at_level(logging.WARNING, "halfstep"):
        train(params, optimizer, range(3))
    assert caplog.text.count("verified in fp16 only") == 1
    assert "unverified" in optimizer.truth_rows()["unverified"]


@every_kind
def test_fp16_is_verified(kind, caplog):
    """fp16 weights, also with some in fp32, and fp32 weights under fp16 autocast; bf16 compute over fp32 weights is not."""
    params, optimizer = build(kind, dtype=torch.float16, allow_unverified=False)
    train(params, optimizer, range(2))
    mixed = [*weights((3,), dtype=torch.float16), *weights((3,))]
    optimizer = kind(mixed, **SETTINGS[kind])
    for param in mixed:
        param.grad = torch.ones_like(param)
    optimizer.step()
    params, optimizer = build(kind, compute="fp16", allow_unverified=False)
    train(params, optimizer, range(2))
    assert "unverified" not in optimizer.truth_rows()
    assert "verified" not in caplog.text
    params, optimizer = build(kind, compute="bf16", allow_unverified=False)
    give(params, 0)
    with pytest.raises(SettingError, match="bf16 compute"):
        optimizer.step()


# --- skips ----------------------------------------------------------------------------------------------------------


@every_kind
def test_an_overflow_on_one_rank_skips_the_step_everywhere(kind):
    """Weights, moments, errors and schedule stay what they were, bit for bit, in every stage; later steps are as without it."""

    def run(wire, bad):
        params, optimizer = build(kind, wire)
        optimizer.grad_scale = torch.tensor(8.0)
        for step in range(STEPS):
            if step in bad:
                before, schedule = snapshot(optimizer), optimizer.schedule
                give(params, 99, wire.rank)
                if wire.rank == 1:
                    params[1].grad[3] = float("inf")
                optimizer.found_inf = torch.tensor(float(wire.rank == 1))
                optimizer.step()
                optimizer.settle()
                assert same(before, snapshot(optimizer))
                assert optimizer.schedule == schedule
            give(params, step, wire.rank)
            for param in params:
                param.grad *= 8.0
            optimizer.found_inf = torch.tensor(0.0)
            optimizer.step()
            optimizer.settle()
        return snapshot(optimizer)

    undisturbed = on_threads(2, lambda wire: run(wire, ()))
    skipped = on_threads(2, lambda wire: run(wire, (1, 5, 8, 11, 14)))
    assert all(same(a, b) for a, b in zip(undisturbed, skipped, strict=True))


@every_kind
def test_the_loss_scale_divides_gradients(kind):
    """A scaled gradient with `grad_scale` set makes the same run, for a power of two bit for bit."""
    params, optimizer = build(kind)
    scaled, other = build(kind)
    other.grad_scale = torch.tensor(1024.0)
    for step in range(STEPS):
        train(params, optimizer, [step])
        give(scaled, step)
        for param in scaled:
            param.grad *= 1024
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(params, scaled, strict=True))


# --- ranks ----------------------------------------------------------------------------------------------------------


@every_kind
def test_ranks_have_equal_weights_when_synchronized(kind):
    """Bit for bit after every step; for 0/1 Adam's local steps, at every synchronization."""

    def run(wire):
        params, optimizer = build(kind, wire)
        history = []
        for step in range(24):
            train(params, optimizer, [step], wire.rank)
            history.append((optimizer.synchronized, torch.cat([p.detach().reshape(-1) for p in params]).clone()))
        return history

    first, second = on_threads(2, run)
    assert [a for a, _ in first] == [b for b, _ in second]
    for (synchronized, a), (_, b) in zip(first, second, strict=True):
        assert torch.equal(a, b) == synchronized
    assert first[-1][0]
    assert any(not synchronized for synchronized, _ in first) == (kind is ZeroOneAdam)


@every_kind
def test_averaged_gradients_can_come_from_outside(kind):
    """With local_gradients=False the caller averages when `needs_dense_gradients` is true, and the run is the same."""

    def run(wire, *, local):
        params, optimizer = build(kind, wire, local_gradients=local)
        for step in range(STEPS):
            give(params, step, wire.rank)
            if not local and optimizer.needs_dense_gradients:
                for param, mean in zip(params, wire.average([p.grad for p in params]), strict=True):
                    param.grad = mean
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in params]), wire.sent_bytes

    inside = on_threads(2, lambda wire: run(wire, local=True))
    outside = on_threads(2, lambda wire: run(wire, local=False))
    for (a, sent), (b, also_sent) in zip(inside, outside, strict=True):
        assert torch.equal(a, b)
        assert sent == also_sent


def test_a_group_can_stay_dense():
    """`non_freeze` parameters have Adam's steps on the mean of the gradients after the freeze, variance included."""

    def run(wire, freeze_step):
        shapes = [nn.Parameter(w) for w in start()]
        groups = [{"params": shapes[:2], "non_freeze": True}, {"params": shapes[2:]}]
        optimizer = OneBitAdam(groups, lr=1e-2, freeze_step=freeze_step, allow_unverified=True)
        optimizer._wire = wire
        train(shapes, optimizer, range(12), wire.rank)
        return [p.detach() for p in shapes]

    frozen, dense = on_threads(2, lambda wire: run(wire, 3)), on_threads(2, lambda wire: run(wire, 99))
    for a, b in zip(frozen, dense, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
        assert not torch.equal(a[2], b[2])


def test_a_missing_gradient_counts_as_zero():
    """A parameter that had a gradient before takes part with zero, so that ranks send the same tensors."""

    def run(wire, *, missing):
        params, optimizer = build(OneBitAdam, wire)
        for step in range(8):
            give(params, step, wire.rank)
            if step == 6:
                params[1].grad = (
                    None if missing and wire.rank == 0 else torch.zeros(16) if wire.rank == 0 else params[1].grad
                )
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in params])

    for a, b in zip(
        on_threads(2, lambda w: run(w, missing=True)), on_threads(2, lambda w: run(w, missing=False)), strict=True
    ):
        assert torch.equal(a, b)


def test_ranks_with_different_parameters_are_rejected():
    """At the first step, on every rank."""

    def run(wire):
        params = weights((4,), (5 + wire.rank,))
        optimizer = OneBitAdam(params, allow_unverified=True)
        optimizer._wire = wire
        for param in params:
            param.grad = torch.ones_like(param)
        with pytest.raises(RankError, match="another rank has others"):
            optimizer.step()

    on_threads(2, run)


# --- saving and loading ---------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("stop", [3, 7, 13])
def test_resume_is_bit_exact(kind, stop):
    """In every stage, errors and schedule included: a new optimizer that loads the state continues as if never stopped."""

    def run(wire):
        params, optimizer = build(kind, wire)
        train(params, optimizer, range(stop), wire.rank)
        saved = copy.deepcopy(optimizer.state_dict())
        again, resumed = build(kind, wire)
        for a, b in zip(again, params, strict=True):
            a.data.copy_(b)
        resumed.load_state_dict(saved)
        assert resumed.schedule == optimizer.schedule
        train(params, optimizer, range(stop, STEPS), wire.rank)
        train(again, resumed, range(stop, STEPS), wire.rank)
        return snapshot(optimizer), snapshot(resumed)

    for continued, resumed in on_threads(2, run):
        assert continued.keys() == resumed.keys()
        assert same(continued, resumed)


def test_errors_of_another_number_of_ranks_start_at_zero(caplog):
    """Which is logged; moments and schedule are used."""

    def run(wire):
        params, optimizer = build(OneBitAdam, wire)
        train(params, optimizer, range(8), wire.rank)
        return optimizer.state_dict()

    saved = on_threads(2, run)[0]
    assert saved["state"][0]["worker_error"].any()
    params, optimizer = build(OneBitAdam)
    with caplog.at_level(logging.WARNING, "halfstep"):
        optimizer.load_state_dict(saved)
    assert "rank 0 of 2, and this is rank 0 of 1" in caplog.text
    assert "worker_error" not in optimizer.state[params[0]]
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], saved["state"][0]["exp_avg"])
    assert optimizer.schedule.step == 8
    assert optimizer.schedule.frozen


def test_masks_are_the_programs():
    """They are not saved, and a loaded state does not replace them."""
    first, second = weights((4,)), weights((4,))
    saver = OneBitAdam([{"params": first, "exp_avg_mask": torch.ones(4)}], allow_unverified=True)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    loader = OneBitAdam([{"params": second, "exp_avg_mask": mask}], allow_unverified=True)
    saved = saver.state_dict()
    assert "exp_avg_mask" not in saved["param_groups"][0]
    loader.load_state_dict(saved)
    assert loader.param_groups[0]["exp_avg_mask"] is mask
    assert "onebit" not in loader.param_groups[0]


def test_the_state_of_torchs_adam_is_a_start():
    """Moments are loaded, and the schedule continues from their step count."""
    params = weights((4,))
    reference = torch.optim.Adam(params)
    for _ in range(3):
        params[0].grad = torch.ones(4)
        reference.step()
    optimizer = OneBitAdam(params, freeze_step=10, allow_unverified=True)
    own_groups = [{k: v for k, v in g.items() if k != "onebit"} for g in optimizer.state_dict()["param_groups"]]
    optimizer.load_state_dict({"state": reference.state_dict()["state"], "param_groups": own_groups})
    assert optimizer.schedule.step == 3
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], reference.state[params[0]]["exp_avg"])


@pytest.mark.parametrize("preset", ["fp16", "fp16-lean"])
def test_an_engine_saves_and_loads_the_schedule(preset, tmp_path):
    """One process, across the freeze step: a run that loads the checkpoint continues bit for bit."""

    def make():
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        return model, Engine(model, OneBitAdam(model.parameters(), lr=1e-2, freeze_step=3, compute="fp16"), preset)

    def steps(model, engine, numbers):
        for number in numbers:
            with engine.forward():
                loss = model(torch.randn(8, 6, generator=torch.Generator().manual_seed(number))).pow(2).mean()
            engine.backward(loss)
            engine.step()

    model, engine = make()
    steps(model, engine, range(5))
    engine.save(tmp_path / "checkpoint")
    steps(model, engine, range(5, 8))
    again, resumed = make()
    resumed.load(tmp_path / "checkpoint")
    assert resumed.optimizers[0].schedule.frozen_at == 3
    steps(again, resumed, range(5, 8))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


# --- rejections -----------------------------------------------------------------------------------------------------


@every_kind
def test_what_has_no_meaning_is_rejected(kind):
    """amsgrad, 16-bit and 8-bit moments, updates inside backward, masks of another shape, unknown formats."""
    for settings, message in (
        ({"amsgrad": True}, "amsgrad"),
        ({"states": "bf16"}, "error feedback"),
        ({"states": "8bit"}, "error feedback"),
        ({"compute": "int8"}, "compute='int8'"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ):
        with pytest.raises(SettingError, match=message):
            build(kind, **settings)
    params, optimizer = build(kind)
    with pytest.raises(SettingError, match="inside backward"):
        optimizer.step_some([(optimizer.param_groups[0], params[0])], torch.zeros(()), {})
    with pytest.raises(SettingError, match="exp_avg_mask has the shape"):
        kind([{"params": weights((4,), (5,)), "exp_avg_mask": torch.ones(4)}])
    with pytest.raises(SettingError, match="cannot be pickled"):
        copy.deepcopy(optimizer)
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = kind(embedding.parameters(), allow_unverified=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(SettingError, match="sparse gradient"):
        optimizer.step()


def test_settings_of_the_schedules_are_checked():
    """Freeze steps, thresholds, limits; and group settings of another class."""
    params = weights((4,))
    for make, message in (
        (lambda: OneBitAdam(params, freeze_step=0), "freeze_step=0"),
        (lambda: OneBitAdam(params, freeze_step="soon"), "freeze_step='soon'"),
        (lambda: OneBitAdam(params, freeze_threshold=1.5), "freeze_threshold=1.5"),
        (lambda: ZeroOneAdam(params, var_update_scaler=0), "var_update_scaler=0"),
        (lambda: ZeroOneAdam([{"params": params, "non_freeze": True}]), "non_freeze is a group setting of OneBitAdam"),
        (lambda: OneBitLamb([{"params": params, "non_freeze": True}]), "non_freeze is a group setting of OneBitAdam"),
        (lambda: OneBitLamb(params, min_coeff=2.0, max_coeff=1.0), "limits of the coeff"),
        (lambda: OneBitLamb(params, coeff_beta=1.0), "coeff_beta=1.0"),
        (lambda: OneBitAdam(params, process_group=object()), "not initialized"),
    ):
        with pytest.raises(SettingError, match=message):
            make().wire  # noqa: B018


def test_a_late_parameter_is_rejected():
    """After the freeze there is no variance for a new group, nor for a parameter that never had a gradient."""
    params = weights((4,), (4,))
    optimizer = OneBitAdam(params, freeze_step=2, allow_unverified=True)
    for _ in range(3):
        params[0].grad = torch.ones(4)
        optimizer.step()
    with pytest.raises(SettingError, match="frozen its variance at step 2"):
        optimizer.add_param_group({"params": weights((3,))})
    params[1].grad = torch.ones(4)
    with pytest.raises(SettingError, match="first gradient at step 4"):
        optimizer.step()


def test_elements_without_variance_are_warned_of(caplog):
    """At the freeze, unless a mask covers them."""

    def run(wire, mask):
        param = nn.Parameter(torch.ones(6))
        optimizer = OneBitAdam([{"params": [param]} | mask], freeze_step=2, allow_unverified=True)
        optimizer._wire = wire
        for _ in range(2):
            param.grad = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
            optimizer.step()

    on_threads(2, lambda wire: run(wire, {"exp_avg_mask": torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])}))
    assert "never had a gradient" not in caplog.text
    on_threads(2, lambda wire: run(wire, {}))
    assert "0 for 2 elements that never had a gradient" in caplog.text


def test_the_truth_rows_show_stage_and_bytes():
    """What the truth table will list."""
    params, optimizer = build(OneBitAdam)
    train(params, optimizer, range(2))
    assert optimizer.truth_rows()["communication"] == "1-bit Adam on 1 rank, dense so far; 0 bytes sent by this rank"
    train(params, optimizer, range(2, 6))
    assert "compressed since step 4" in optimizer.truth_rows()["communication"]


def test_lamb_coefficients_are_readable():
    """One number per parameter, above zero."""
    params, optimizer = build(OneBitLamb)
    train(params, optimizer, range(8))
    assert len(optimizer.coefficients()) == len(SHAPES)
    assert all(c > 0 for c in optimizer.coefficients())
