"""fp32 masters around any optimizer: it trains 16-bit weights as it would train an fp32 model."""

import copy
import gc
import logging
import weakref

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import halfstep
from engine_models import batches
from halfstep.checkpoint.export import export_weights
from halfstep.engine.engine import Engine
from halfstep.errors import SettingError
from halfstep.kernels.split import split
from halfstep.optim.masters import Fp32Masters
from halfstep.planning.estimator import Estimator
from halfstep.precision.policy import Policy
from planning_jobs import small_job

LEAN = ("bf16-lean", "fp16-lean")
DTYPES = {"bf16-lean": torch.bfloat16, "fp16-lean": torch.float16}


class LARS(torch.optim.Optimizer):
    """Momentum with a rate per layer (You et al., 2017), as people write it: states on the first step, in place."""

    def __init__(self, params, lr=0.5, momentum=0.9, trust=0.1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if len(state) == 0:
                    state["momentum_buffer"] = torch.zeros_like(p)
                rate = group["trust"] * p.norm() / (p.grad.norm() + 1e-6)
                state["momentum_buffer"].mul_(group["momentum"]).add_(p.grad * rate)
                p.add_(state["momentum_buffer"], alpha=-group["lr"])


class Replacing(torch.optim.Optimizer):
    """SGD that assigns `p.data` and counts its steps in the group and, as some do, in the state."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "count": 0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            self.state["steps"] = self.state.get("steps", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                p.data = p.data - group["lr"] * p.grad.data


class OwnAdamW(torch.optim.AdamW):
    """A subclass, which may do anything, and so is not adopted."""


def lookahead(params):
    """Lookahead over AdamW: two optimizers, two states, and a state dict of another form than torch's."""
    library = pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer has the Lookahead that is tested")
    return library.Lookahead(torch.optim.AdamW(params, lr=1e-2), k=2)


OPTIMIZERS = {
    "muon": lambda params: torch.optim.Muon(params, lr=0.02),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
    "lars": LARS,
    "replacing": Replacing,
    "subclass": lambda params: OwnAdamW(params, lr=1e-2),
    "lookahead": lookahead,
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_preset = pytest.mark.parametrize("precision", LEAN)


def net(seed=0):
    """Two matrices, which is all that Muon takes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.GELU(), nn.Linear(8, 3, bias=False))


def build(make, precision, seed=0, **options):
    """A model, its optimizer and an Engine over both with a schedule."""
    model = net(seed)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    return model, optimizer, Engine(model, optimizer, precision, scheduler=scheduler, **options)


def train(model, engine, data):
    """One step per batch; the results."""
    results = []
    for x, y in data:
        with engine.forward():
            loss = F.cross_entropy(model(x).float(), y)
        engine.backward(loss)
        results.append(engine.step())
    return results


def masters(engine):
    """Copies of the masters."""
    return [master.clone() for master in engine.masters().values()]


@every_preset
@every_optimizer
def test_updates_are_those_of_the_optimizer_on_an_fp32_model(make, precision):
    """Fed the same gradients, an fp32 twin has the masters, and the 16-bit weights are their rounding."""
    model, optimizer, engine = build(make, precision)
    twin = net()
    reference = make(twin.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(reference, 1, gamma=0.9)
    grads = {}
    for name, param in model.named_parameters():
        param.register_hook(lambda g, name=name: grads.__setitem__(name, g.float().clone()))
    for batch in batches(6):
        scale = engine.scaler.get_scale()
        train(model, engine, [batch])
        for name, param in twin.named_parameters():
            param.grad = grads[name] / scale
        reference.step()
        schedule.step()
        for mine, theirs in zip(masters(engine), twin.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    for param, master in zip(model.parameters(), masters(engine), strict=True):
        assert param.dtype is DTYPES[precision]
        assert torch.equal(param, split(master, param.dtype)[0])
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"] < reference.param_groups[0]["initial_lr"]


@every_preset
@every_optimizer
def test_resume_is_bit_exact(make, precision, tmp_path):
    """A run that is saved and resumed in a fresh Engine has the masters and weights of the uninterrupted one."""
    data = batches(6)
    model, _, engine = build(make, precision)
    train(model, engine, data[:3])
    engine.save(tmp_path / "checkpoint")
    train(model, engine, data[3:])
    other, optimizer, resumed = build(make, precision, seed=9)
    resumed.load(tmp_path / "checkpoint")
    train(other, resumed, data[3:])
    assert all(map(torch.equal, masters(engine), masters(resumed)))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    states = [t for p in other.parameters() for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    assert all(t.dtype is torch.float32 for t in states if t.is_floating_point())


@every_optimizer
def test_a_skipped_step_changes_nothing(make):
    """After an overflow weights, masters, states, groups and the schedule are what they were, bit for bit."""
    model, _, engine = build(make, "fp16-lean")
    data = batches(3)
    train(model, engine, data[:2])
    before = copy.deepcopy((list(model.parameters()), engine.optimizers[0].state_dict(), masters(engine)))
    x, y = data[2]
    (result,) = train(model, engine, [(x * float("inf"), y)])
    assert result.skipped
    after = (list(model.parameters()), engine.optimizers[0].state_dict(), masters(engine))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    (result,) = train(model, engine, [data[2]])
    assert not result.skipped
    assert not torch.equal(masters(engine)[0], before[2][0])


@every_preset
def test_an_outside_edit_of_a_weight_wins(precision):
    """Edited elements continue from the weight, the others from their exact master."""
    for edit in (
        lambda w: w.zero_(),
        lambda w: w.clamp_(-0.05, 0.05),
        lambda w: w[0].copy_(torch.full((6,), 0.5)),
    ):
        model, _, engine = build(Replacing, precision)
        train(model, engine, batches(2))
        before, old = masters(engine)[0], model[0].weight.detach().clone()
        edit(model[0].weight.data)
        new = model[0].weight.detach()
        expected = torch.where(new == old, before, new.float())
        assert torch.equal(masters(engine)[0], expected)
        saved = engine.optimizers[0].state_dict()["state"][0]["master"]
        assert torch.equal(saved, expected)
        lr = engine.optimizers[0].param_groups[0]["lr"]
        x, y = batches(1, seed=5)[0]
        with engine.forward():
            loss = F.cross_entropy(model(x).float(), y)
        engine.backward(loss)
        grad = model[0].weight.grad.float() / engine.scaler.get_scale()
        engine.step()
        assert torch.equal(masters(engine)[0], expected - lr * grad)


def test_accumulation_clipping_ema_and_fp32_modules():
    """Two micro-batches make one clipped update, the EMA follows the masters, and modules kept in fp32 are updated too."""
    model, _, engine = build(LARS, "bf16-lean,keep_fp32=2", accumulate=2, max_norm=1e-3, ema=0.5)
    before = masters(engine)
    results = train(model, engine, batches(2))
    assert [r.boundary for r in results] == [False, True]
    assert model[2].weight.dtype is torch.float32
    for old, new, average in zip(before, masters(engine), engine.ema.averages.values(), strict=True):
        assert not torch.equal(old, new)
        assert torch.allclose(average, (old + new) / 2)


def test_muon_for_matrices_and_adamw_for_the_rest(tmp_path):
    """One Engine steps both: the adopted one with split masters, the other over fp32 masters, and a skip skips both."""

    def build_two(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
        groups = [[p for p in model.parameters() if (p.dim() == 2) is matrix] for matrix in (True, False)]
        optimizers = [torch.optim.Muon(groups[0], lr=0.02), torch.optim.AdamW(groups[1], lr=1e-2)]
        return model, Engine(model, optimizers, "fp16-lean")

    model, engine = build_two(0)
    train(model, engine, batches(2))
    rows = dict(engine.truth().rows)
    assert rows["master"].startswith("split: ")
    assert rows["master"].endswith("; an fp32 copy, exact fp32")
    before = masters(engine)
    x, y = batches(1)[0]
    assert train(model, engine, [(x * float("inf"), y)])[0].skipped
    assert all(map(torch.equal, before, masters(engine)))
    engine.save(tmp_path / "checkpoint")
    other, resumed = build_two(9)
    resumed.load(tmp_path / "checkpoint")
    for each, run in ((model, engine), (other, resumed)):
        train(each, run, batches(2, seed=3))
    assert not any(map(torch.equal, before, masters(engine)))
    assert all(map(torch.equal, masters(engine), masters(resumed)))


def test_a_copy_takes_the_same_next_step():
    """A deep copy of parameter and optimizer continues bit for bit, masters included."""
    param = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
    optimizer = Fp32Masters(LARS([param]))
    param.grad = torch.full_like(param, 1e-3)
    optimizer.step()
    twin, copied = copy.deepcopy((param, optimizer))
    for p, each in ((param, optimizer), (twin, copied)):
        p.grad = torch.full_like(p, 0.5)
        each.step()
    assert torch.equal(optimizer.master_of(param), copied.master_of(twin))
    assert copied.inner is not optimizer.inner


def test_small_updates_add_up():
    """Updates far below half a ulp of the weight reach it in time, which 16-bit weights alone would lose."""
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Fp32Masters(Replacing([param], lr=2.0**-14))
    for _ in range(256):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert torch.equal(param, torch.full((4,), 1 - 2.0**-6, dtype=torch.bfloat16))


def test_the_optimizers_own_hooks_and_storage_stay():
    """Hooks of the user's optimizer run, gradients and weights keep their storage, and a failing step restores both."""
    model, optimizer, engine = build(LARS, "bf16-lean")
    calls = []
    optimizer.register_step_pre_hook(lambda o, *_: calls.append(o))
    pointers = [p.data_ptr() for p in model.parameters()]
    train(model, engine, batches(1))
    assert calls == [optimizer]
    assert [p.data_ptr() for p in model.parameters()] == pointers

    def fail(*_):
        raise KeyError("hook")

    optimizer.register_step_pre_hook(fail)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyError, match="hook"):
        train(model, engine, batches(1))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(map(torch.equal, before, model.parameters()))


def test_the_choice_is_logged_and_in_the_truth_table(caplog):
    """The log names the optimizer and the masters it gets, and the truth table shows fp32 copies."""
    caplog.set_level(logging.INFO, logger="halfstep")
    model, _, engine = build(LARS, "bf16-lean")
    assert "LARS runs over fp32 masters (master=fp32 instead of master=split" in caplog.text
    train(model, engine, batches(1))
    rows = dict(engine.truth().rows)
    assert rows["master"] == "an fp32 copy, exact fp32"
    assert rows["step"] == "LARS over fp32 masters, decided on the host"
    assert engine.truth().bytes_per_parameter == 2 + 2 + 4 + 4


def test_a_direct_step_and_a_closure_are_rejected():
    """optimizer.step() would bypass the masters; the message names the call to use."""
    model, optimizer, engine = build(LARS, "bf16-lean")
    train(model, engine, batches(1))
    with pytest.raises(SettingError, match=r"LARS is stepped over fp32 masters.*engine.step\(\)"):
        optimizer.step()
    with pytest.raises(SettingError, match="closure"):
        Fp32Masters(optimizer).step(lambda: 0.0)


def test_a_second_engine_continues_from_the_exact_masters():
    """After close() another Engine over the same optimizer has the masters of the first."""
    model, optimizer, engine = build(LARS, "bf16-lean")
    train(model, engine, batches(2))
    before = masters(engine)
    engine.close()
    again = Engine(model, optimizer, "bf16-lean")
    assert all(map(torch.equal, before, masters(again)))
    train(model, again, batches(1))


def test_weights_that_were_16_bit_from_the_start_get_fp32_states():
    """States that the optimizer had made of 16-bit weights are widened, so that they fit the masters."""
    model = net().bfloat16()
    optimizer = lookahead(model.parameters())
    engine = Engine(model, optimizer, "bf16-lean")
    train(model, engine, batches(3))
    assert all(state["slow_params"].dtype is torch.float32 for state in optimizer.state.values())


@pytest.mark.parametrize(
    ("source", "target"), [("bf16", "bf16-lean"), ("fp16-lean", "bf16-lean"), ("bf16-lean", "fp32")]
)
def test_a_checkpoint_loads_into_another_precision(source, target, tmp_path):
    """Masters and states are the same numbers there."""
    model, optimizer, engine = build(LARS, source)
    train(model, engine, batches(3))
    engine.save(tmp_path / "checkpoint")
    other, loaded, resumed = build(LARS, target, seed=9)
    resumed.load(tmp_path / "checkpoint")
    assert all(map(torch.equal, masters(engine), masters(resumed)))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], loaded.state[q]["momentum_buffer"])
    train(other, resumed, batches(1))


def test_export_writes_the_masters(tmp_path):
    """The exported file has the fp32 values that the optimizer worked on."""
    model, _, engine = build(LARS, "bf16-lean")
    train(model, engine, batches(3))
    engine.save(tmp_path / "checkpoint")
    exported = load_file(export_weights(tmp_path / "checkpoint", tmp_path / "weights.safetensors"))
    for name, master in engine.masters().items():
        assert torch.equal(exported[name], master), name


@every_preset
def test_the_planner_counts_masters_and_states(precision):
    """States and masters in the prediction are the bytes that the Engine's optimizer really has."""
    job = small_job(optimizer=LARS)
    model = job.model()
    engine = Engine(model, LARS(model.parameters()), precision)
    train(model, engine, [(torch.randn(8, 16), torch.randint(4, (8,)))])
    actual = {"master": 0, "states": 0}
    for state in engine.optimizers[0].state.values():
        for name, tensor in state.items():
            actual["master" if name == "master" else "states"] += tensor.nbytes
    breakdown = Estimator(job, Policy.parse(precision)).at(8).peak.breakdown
    assert {category: breakdown.get(category, 0) for category in actual} == actual
    assert halfstep.plan(job, 8, precision=(precision,), memory="1GiB").entries[0].fits


def test_a_state_of_another_form_is_loaded_only_in_the_same_order():
    """Such a state refers to parameters by position, so parameters in another order are rejected."""
    params = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = Fp32Masters(lookahead(params))
    for p in params:
        optimizer.start_master(p, None)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    by_state = saved | {"state": {0: saved["state"][1], 1: saved["state"][0]}}
    by_group = saved | {"param_groups": [saved["param_groups"][0] | {"params": [1, 0]}]}
    for swapped in (by_state, by_group):
        with pytest.raises(SettingError, match="Lookahead has a form of its own.*order"):
            optimizer.load_state_dict(swapped)


@every_optimizer
def test_the_users_own_save_and_load_of_the_optimizer_is_exact(make):
    """`load_state_dict` of the user's optimizer after Engine(...) restores states in fp32, and the masters stay."""
    model, optimizer, engine = build(make, "bf16-lean")
    train(model, engine, batches(3))
    saved, before = copy.deepcopy(optimizer.state_dict()), masters(engine)
    expected = copy.deepcopy(engine.optimizers[0].state_dict())
    optimizer.load_state_dict(saved)
    torch.testing.assert_close(engine.optimizers[0].state_dict(), expected, rtol=0, atol=0)
    assert all(map(torch.equal, before, masters(engine)))
    train(model, engine, batches(1))


def test_states_of_other_dtypes_are_restored_as_they_were():
    """Integer and 16-bit states, which torch casts to the dtype of the parameters, come back with their own."""
    param = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    inner = LARS([param])
    optimizer = Fp32Masters(inner)
    param.grad = torch.ones_like(param)
    optimizer.step()
    inner.state[param] |= {"codes": torch.tensor([3, 250], dtype=torch.uint8), "small": torch.ones(2).half()}
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    dtypes = {name: value.dtype for name, value in inner.state[param].items()}
    assert dtypes == {"momentum_buffer": torch.float32, "codes": torch.uint8, "small": torch.float16}
    assert inner.state[param]["codes"].tolist() == [3, 250]


def test_a_state_called_master_is_rejected():
    """An optimizer with a state of that name cannot be saved with our masters in it."""
    param = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    inner = LARS([param])
    optimizer = Fp32Masters(inner)
    optimizer.start_master(param, None)
    inner.state[param]["master"] = torch.ones(2)
    with pytest.raises(SettingError, match="LARS has a state called 'master'"):
        optimizer.state_dict()


def test_masters_beyond_the_range_are_clamped():
    """A finite master past fp16's end becomes the largest fp16, which counts as no outside edit; inf stays inf."""
    param = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = Fp32Masters(LARS([param]))
    optimizer.set_master(param, torch.tensor([1e6, -1e6, float("inf")]))
    assert param.tolist() == [65504.0, -65504.0, float("inf")]
    assert optimizer.master_of(param).tolist() == [65504.0, -65504.0, float("inf")]


def test_nothing_stays_allocated():
    """Wrapper, optimizer, weights and masters are freed with the last reference, without a garbage collection."""
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = Fp32Masters(LARS([param]))
    param.grad = torch.ones_like(param)
    optimizer.step()
    alive = [weakref.ref(o) for o in (param, optimizer, optimizer.inner, optimizer.master_of(param))]
    gc.disable()
    try:
        del optimizer, param
        assert [reference() for reference in alive] == [None] * 4
    finally:
        gc.enable()
