"""torch's elementwise optimizers as lean ones: adopted in every layout, with what each can store."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from engine_models import Net, batches
from halfstep import optim
from halfstep.checkpoint.export import export_weights
from halfstep.engine.engine import Engine
from halfstep.errors import SettingError
from halfstep.optim.adopt import ADOPTS
from halfstep.planning.estimator import Estimator
from halfstep.precision.policy import Policy
from optim_cases import BF16, FP16, FP32, give_grads, same, snapshot, weights
from planning_jobs import small_job

STOCK = {
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.5),
    "RMSprop-centered": lambda params: torch.optim.RMSprop(params, lr=1e-2, centered=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=5e-2, initial_accumulator_value=0.125),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=1e-2),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=1e-2),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=5e-2, t0=2),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=1e-3),
}
REJECTED = {
    ("RMSprop-centered", "bf16"): "centered=True",
    ("RMSprop-centered", "8bit"): "centered=True",
    ("Adagrad", "bf16"): "stops growing",
    ("ASGD", "bf16"): "average of the weights",
    ("ASGD", "8bit"): "average of the weights",
    ("Rprop", "8bit"): "step sizes",
}
CASES = [case for case in itertools.product(STOCK, ("fp32", "bf16", "8bit")) if case not in REJECTED]
every_stock = pytest.mark.parametrize("name", STOCK)
every_case = pytest.mark.parametrize(("name", "states"), CASES)


def build(name, precision, seed=0, **options):
    """A small model, and an Engine over it that adopts torch's optimizer."""
    torch.manual_seed(seed)
    model = Net()
    return model, Engine(model, STOCK[name](model.parameters()), precision, **options)


def train(model, engine, data):
    """One step per batch; the losses."""
    losses = []
    for x, y in data:
        with engine.forward():
            loss = F.cross_entropy(model(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def lean_of(name):
    """The lean class that adopts an optimizer of `STOCK`."""
    return ADOPTS[getattr(torch.optim, name.partition("-")[0])]


def test_every_elementwise_optimizer_of_torch_is_adopted():
    """Each class of torch.optim is adopted by ours of the same name, but for those whose rule is not elementwise."""
    others = {"Adafactor", "LBFGS", "Muon", "SparseAdam", "Optimizer"}
    known = {n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    assert {stock.__name__: lean.__name__ for stock, lean in ADOPTS.items()} == {n: n for n in known - others}
    assert {lean.__name__ for lean in ADOPTS.values()} <= set(optim.__all__)


@every_case
def test_it_learns_in_every_layout(name, states):
    """The loss falls with every storage of the moments."""
    model, engine = build(name, f"bf16-lean,states={states}")
    losses = train(model, engine, batches(2) * 5)
    assert sum(losses[-2:]) < 0.99 * sum(losses[:2])


@pytest.mark.parametrize(("case", "reason"), REJECTED.items(), ids=str)
def test_states_that_cannot_be_stored_are_rejected_before_anything_changes(case, reason):
    """The error names the class and the reason, in the constructor, in adoption and in the Engine; weights stay fp32."""
    name, states = case
    with pytest.raises(SettingError, match=f"{name.partition('-')[0]}.*{reason}"):
        build(name, f"bf16-lean,states={states}")
    params = weights((2,))
    optimizer = STOCK[name](params)
    with pytest.raises(SettingError, match=reason):
        optim.adopt(optimizer, master="split", states=states)
    options = {"centered": True} if "centered" in name else {}
    with pytest.raises(SettingError, match=reason):
        lean_of(name)(params, **options, states=states)
    give_grads(params, 0)
    optimizer.step()  # not adopted


@every_stock
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_masters_follow_torch_on_fp32_weights(name, dtype, master):
    """With fp32 states, masters of 16-bit weights are those that torch's optimizer makes of the same gradients."""
    mine = weights((5, 3), (), dtype=dtype)
    theirs = [torch.nn.Parameter(p.detach().float()) for p in mine]
    lean, stock = optim.adopt(STOCK[name](mine), master=master, states="fp32"), STOCK[name](theirs)
    for seed in range(8):
        give_grads(mine, seed)
        for p, q in zip(mine, theirs, strict=True):
            q.grad = p.grad.float()
        lean.step()
        stock.step()
    for p, q in zip(mine, theirs, strict=True):
        assert torch.allclose(lean.master_of(p), q, rtol=2e-6, atol=1e-6)


@every_case
def test_a_skipped_step_changes_nothing(name, states):
    """With the flag set, weights, moments, scalars and counts keep their bits; without it all move."""
    params = weights((4, 3), dtype=BF16)
    lean = optim.adopt(STOCK[name](params), master="split", states=states)
    give_grads(params, 0)
    lean.step()
    before = snapshot(lean)
    give_grads(params, 1)
    lean.found_inf = torch.ones(())
    lean.step()
    assert same(before, snapshot(lean))
    lean.found_inf = torch.zeros(())
    lean.step()
    after = snapshot(lean)
    assert not torch.equal(before[0, "step"], after[0, "step"])
    assert not torch.equal(before[0, "weight"], after[0, "weight"]) or not torch.equal(
        before[0, "low"], after[0, "low"]
    )


@pytest.mark.parametrize(("name", "states"), [(n, "fp32") for n in STOCK] + [("NAdam", "8bit"), ("Rprop", "bf16")])
def test_resume_is_bit_exact_and_export_has_the_masters(name, states, tmp_path):
    """A run that is saved and resumed ends in the masters of the uninterrupted one, and export writes them."""
    data, precision = batches(4), f"bf16-lean,states={states}"
    model, engine = build(name, precision)
    train(model, engine, data[:2])
    engine.save(tmp_path / "checkpoint")
    exported = load_file(export_weights(tmp_path / "checkpoint", tmp_path / "weights.safetensors"))
    assert all(torch.equal(exported[n], master) for n, master in engine.masters().items())
    train(model, engine, data[2:])
    other, resumed = build(name, precision, seed=9)
    resumed.load(tmp_path / "checkpoint")
    train(other, resumed, data[2:])
    for (n, mine), theirs in zip(engine.masters().items(), resumed.masters().values(), strict=True):
        assert torch.equal(mine, theirs), n


@every_stock
def test_gradient_release_gives_the_ordinary_updates(name):
    """Stepping each parameter inside backward ends in the masters of stepping all together."""
    ends = []
    for release in (False, True):
        model, engine = build(name, "bf16-lean", gradient_release=release)
        train(model, engine, batches(2))
        ends.append(engine.masters())
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])


@every_case
def test_the_planner_counts_the_states_that_a_step_makes(name, states):
    """States and masters in the prediction are the bytes that the Engine's optimizer really has."""
    precision = f"bf16-lean,states={states}"
    job = small_job(optimizer=STOCK[name])
    model = job.model()
    engine = Engine(model, STOCK[name](model.parameters()), precision)
    train(model, engine, [(torch.randn(8, 16), torch.randint(4, (8,)))])
    actual = {"master": 0, "states": 0}
    for state in engine.optimizers[0].state.values():
        for entry, tensor in state.items():
            # The storage: 8-bit codes are allocated in whole blocks, and the state is a view of them.
            actual["master" if entry == "low" else "states"] += tensor.untyped_storage().nbytes()
    breakdown = Estimator(job, Policy.parse(precision)).at(8).peak.breakdown
    assert {category: breakdown.get(category, 0) for category in actual} == actual


def test_a_fused_adagrad_is_adopted_with_its_state():
    """Adagrad makes its state when it is built; the sums and the step count go into the lean one."""
    params = weights((3,), dtype=FP32)
    stock = torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5, fused=True)
    give_grads(params, 0)
    stock.step()
    expected = stock.state[params[0]]["sum"].clone()
    lean = optim.adopt(stock, master="none", states="fp32")
    assert lean.state[params[0]]["step"] == 1
    assert torch.equal(lean.state[params[0]]["sum"], expected)
    lean.step()


def test_a_group_that_is_added_later_is_checked_too():
    """Options of a new group that the states cannot store raise at its first step."""
    first, second = weights((2,), (2,))
    optimizer = optim.RMSprop([first], states="bf16")
    optimizer.add_param_group({"params": [second], "centered": True})
    give_grads([first, second], 0)
    with pytest.raises(SettingError, match="centered"):
        optimizer.step()
