"""The optimizer contract: a class that declares its states and one rule works everywhere a built-in one does."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import halfstep
from engine_models import Net, batches
from halfstep.checkpoint.export import export_weights
from halfstep.engine.engine import Engine
from halfstep.errors import SettingError
from halfstep.kernels.layout import Layout, Rule, restore
from halfstep.kernels.split import split
from halfstep.optim import AdamW, LeanOptimizer
from halfstep.planning.estimator import Estimator
from halfstep.precision.policy import Policy
from planning_jobs import small_job

PRESETS = ("fp32", "bf16", "fp16", "bf16-lean", "fp16-lean")
LAYOUTS = [
    f"{preset},master={master},states={states}"
    for preset, master, states in itertools.product(
        ("bf16-lean", "fp16-lean"), ("split", "fp32", "none"), ("fp32", "bf16", "8bit")
    )
]


class Muon(LeanOptimizer):
    """Momentum, orthogonalised for matrices by five Newton-Schulz iterations (Jordan et al., 2024)."""

    moments = ("momentum_buffer",)
    elementwise = False

    def __init__(self, params, lr=0.02, momentum=0.95, **layout):
        super().__init__(params, {"lr": lr, "momentum": momentum}, **layout)

    def update(self, group, state, master, grad):
        state["momentum_buffer"] = state["momentum_buffer"] * group["momentum"] + grad
        direction = state["momentum_buffer"]
        if direction.dim() == 2:
            direction = direction / (direction.norm() + 1e-7)
            for _ in range(5):
                gram = direction @ direction.T
                direction = 3.4445 * direction + (2.0315 * gram @ gram - 4.7750 * gram) @ direction
        return master - group["lr"] * direction


def build(precision, seed=0, **options):
    """A small model, and an Engine over it with Muon."""
    torch.manual_seed(seed)
    model = Net()
    return model, Engine(model, Muon(model.parameters()), precision, **options)


def train(model, engine, data):
    """One step per batch; the losses and the results."""
    losses, results = [], []
    for x, y in data:
        with engine.forward():
            loss = F.cross_entropy(model(x), y)
        engine.backward(loss)
        results.append(engine.step())
        losses.append(loss.item())
    return losses, results


def bits_of(model, engine):
    """Every weight and every optimizer state, as bytes."""
    tensors = dict(model.named_parameters())
    for i, state in engine.optimizers[0].state_dict()["state"].items():
        tensors |= {f"{i}.{name}": value for name, value in state.items()}
    return {name: t.detach().reshape(-1).view(torch.uint8).clone() for name, t in tensors.items()}


def same_bits(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("precision", [*PRESETS, *LAYOUTS])
def test_it_learns_in_every_preset_and_layout(precision):
    """The loss falls, whatever weights, masters and moments are stored in."""
    model, engine = build(precision)
    losses, _ = train(model, engine, batches(2) * 15)
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_masters_are_those_of_the_rule_on_fp32_tensors(dtype, master):
    """With fp32 moments, twenty steps give the masters that the bare rule gives, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(6, 4, generator=generator).to(dtype))
    optimizer = Muon([param], master=master, states="fp32")
    expected, state = param.detach().float(), {"momentum_buffer": torch.zeros(6, 4)}
    for _ in range(20):
        param.grad = torch.randn(6, 4, generator=generator).to(dtype)
        expected = optimizer.update(optimizer.param_groups[0], state, expected, param.grad.float())
        optimizer.step()
    assert torch.allclose(optimizer.master_of(param), expected, rtol=0, atol=0 if dtype is torch.bfloat16 else 1e-7)
    assert torch.equal(param, split(optimizer.master_of(param), dtype)[0])


@pytest.mark.parametrize("precision", ["bf16", "bf16-lean", "fp16-lean", "bf16-lean,states=8bit"])
def test_accumulation_and_clipping(precision):
    """Two micro-batches make one update, and its reported norm is above the limit that the update obeys."""
    model, engine = build(precision, accumulate=2, max_norm=1e-3)
    before = {name: master.clone() for name, master in engine.masters().items()}
    _, results = train(model, engine, batches(2))
    assert [r.boundary for r in results] == [False, True]
    assert results[-1].grad_norm > 1e-3
    bias = "inner.bias"  # plain momentum: moves by lr times the clipped gradient
    assert 0 < (engine.masters()[bias] - before[bias]).norm() <= 0.02 * 1e-3 * 1.01


@pytest.mark.parametrize("precision", [p for p in LAYOUTS if p.startswith("fp16")])
def test_an_overflow_changes_nothing(precision):
    """A step with infinite gradients is skipped: weights, masters, moments and counts stay bit for bit."""
    model, engine = build(precision)
    data = batches(3)
    train(model, engine, data[:2])
    before = bits_of(model, engine)
    x, y = data[2]
    _, (result,) = train(model, engine, [(x * math.inf, y)])
    assert result.skipped
    assert same_bits(before, bits_of(model, engine))
    _, (result,) = train(model, engine, [data[2]])
    assert not result.skipped


@pytest.mark.parametrize("precision", [*PRESETS, *LAYOUTS])
def test_resume_is_bit_exact(precision, tmp_path):
    """A run that is saved and resumed in a fresh Engine ends in the bits of the uninterrupted one."""
    data = batches(6)
    model, engine = build(precision)
    train(model, engine, data[:3])
    engine.save(tmp_path / "checkpoint")
    train(model, engine, data[3:])
    resumed_model, resumed = build(precision, seed=9)
    resumed.load(tmp_path / "checkpoint")
    train(resumed_model, resumed, data[3:])
    assert same_bits(bits_of(model, engine), bits_of(resumed_model, resumed))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("bf16-lean", "bf16-lean,states=8bit"),
        ("bf16-lean,states=8bit", "bf16-lean,master=fp32"),
        ("fp16-lean,master=fp32,states=bf16", "bf16-lean"),
        ("bf16", "fp16-lean"),
        ("bf16-lean,states=8bit", "fp32"),
    ],
)
def test_a_checkpoint_loads_into_another_layout(source, target, tmp_path):
    """Masters are the same numbers in the other layout, moments the same values but for its rounding."""
    model, engine = build(source)
    train(model, engine, batches(3))
    engine.save(tmp_path / "checkpoint")
    other_model, other = build(target, seed=9)
    other.load(tmp_path / "checkpoint")
    for name, master in engine.masters().items():
        assert torch.allclose(other.masters()[name], master, rtol=0, atol=2.0**-40), name
    for p, q in zip(model.parameters(), other_model.parameters(), strict=True):
        mine, theirs = (restore(e.optimizers[0].state[w], "momentum_buffer") for e, w in ((other, q), (engine, p)))
        assert (mine - theirs).abs().max() <= (theirs.abs().max() / 60 if "8bit" in target else 0)
    train(other_model, other, batches(1))


@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean,master=fp32,states=8bit"])
def test_export_writes_the_masters(precision, tmp_path):
    """The exported file has the fp32 values that the optimizer worked on."""
    model, engine = build(precision)
    train(model, engine, batches(3))
    engine.save(tmp_path / "checkpoint")
    exported = load_file(export_weights(tmp_path / "checkpoint", tmp_path / "weights.safetensors"))
    for name, master in engine.masters().items():
        assert torch.equal(exported[name], master), name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-lean", "bf16-lean,master=fp32,states=8bit"])
def test_gradient_release_gives_the_ordinary_updates(precision):
    """Stepping parameters inside backward ends in the bits of stepping all together."""
    ends = []
    for release in (False, True):
        model, engine = build(precision, gradient_release=release)
        train(model, engine, batches(4))
        ends.append(bits_of(model, engine))
        assert all(p.grad is None for p in model.parameters())
    assert same_bits(*ends)


@pytest.mark.parametrize("precision", ["fp32", *LAYOUTS])
def test_the_planner_counts_the_states_that_a_step_makes(precision):
    """States and masters in the prediction are the bytes that the Engine's optimizer really has."""
    job = small_job(optimizer=Muon)
    model = job.model()
    engine = Engine(model, Muon(model.parameters()), precision)
    data = [(torch.randn(8, 16), torch.randint(4, (8,)))]
    train(model, engine, data)
    entries = [item for state in engine.optimizers[0].state.values() for item in state.items()]
    actual = {"master": 0, "states": 0}
    for name, tensor in entries:
        # The storage: 8-bit codes are allocated in whole blocks, and the state is a view of them.
        actual["master" if name in {"low", "master"} else "states"] += tensor.untyped_storage().nbytes()
    breakdown = Estimator(job, Policy.parse(precision)).at(8).peak.breakdown
    assert {cause: breakdown.get(cause, 0) for cause in actual} == actual


def test_a_plan_can_be_made():
    """`plan` answers for a job whose optimizer is not built in."""
    planned = halfstep.plan(small_job(optimizer=Muon), 32, precision=("bf16-lean,states=8bit",), memory="1GiB")
    assert planned.entries[0].fits


def test_a_class_without_a_rule_cannot_be_built():
    """The error names the class and the missing method."""

    class Unfinished(LeanOptimizer):
        moments = ("momentum_buffer",)

    with pytest.raises(TypeError, match="Unfinished.*update"):
        Unfinished([torch.nn.Parameter(torch.ones(2))], {})


def test_the_declarations_have_defaults():
    """Without declarations a class has no states and is elementwise; Muon is not."""
    assert (LeanOptimizer.moments, LeanOptimizer.unsigned, LeanOptimizer.elementwise) == ((), frozenset(), True)
    assert AdamW.elementwise
    assert not Muon.elementwise


@pytest.mark.parametrize("field", ["master", "grad", "momentum_buffer", "step"])
def test_a_rule_that_works_in_place_is_rejected(field):
    """The stored tensors would change even in a skipped step; the message names what was changed."""

    class InPlace(Muon):
        def update(self, group, state, master, grad):
            ({"master": master, "grad": grad} | state)[field].mul_(1.0)
            return super().update(group, state, master, grad)

    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    with pytest.raises(SettingError, match=f"changed {field} in place"):
        InPlace([param]).step()


def test_a_subclass_with_another_rule_does_not_use_its_parents_kernel():
    """Overriding `update` of a built-in class turns its kernel off; overriding anything else does not."""

    class Cautious(AdamW):
        def update(self, group, state, master, grad):
            return master

    class Renamed(AdamW):
        pass

    assert Cautious.rule is None
    assert Renamed.rule is Rule.ADAM
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = Cautious([param])
    assert not optimizer.has_kernels(optimizer.param_groups[0])
    optimizer.step()
    assert torch.equal(param, torch.ones(2))


def test_a_copy_takes_the_same_next_step():
    """A deep copy of model and optimizer continues bit for bit."""
    param = torch.nn.Parameter(torch.randn(4, 3).bfloat16())
    optimizer = Muon([param], master="split", states="8bit")
    param.grad = torch.ones_like(param)
    optimizer.step()
    twin, copied = copy.deepcopy((param, optimizer))
    for p, each in ((param, optimizer), (twin, copied)):
        p.grad = torch.full_like(p, 0.5)
        each.step()
    assert torch.equal(optimizer.master_of(param), copied.master_of(twin))


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("master", ["split", "fp32", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_layout_knows_its_bytes(states, master, dtype):
    """`moment_bytes` and `master_bytes` are the sizes of what `pack` and `pack_master` make."""
    layout = Layout(("a", "b"), frozenset({"b"}), master, states)
    values = torch.rand(700)
    for name in layout.moments:
        packed = layout.pack(name, values, torch.ones(()))
        assert layout.moment_bytes(700) == tuple(t.untyped_storage().nbytes() for t in packed.values())
    entries = layout.pack_master(values, dtype)[1]
    assert layout.master_bytes(700, dtype) == sum(t.untyped_storage().nbytes() for t in entries.values())
