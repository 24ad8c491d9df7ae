"""States in slabs: the same values in fewer allocations."""

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import halfstep
from halfstep.checkpoint.tensorfile import view_key
from halfstep.engine.engine import Engine
from halfstep.optim import slabs
from halfstep.optim.slabs import ALIGNMENT, SEPARATE, SLAB, gather, runs
from halfstep.planning import allocator
from halfstep.planning.optimizers import states_after_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LARGE = SEPARATE // 4 + 100  # elements of an fp32 entry that is gathered


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """Gather on a CPU too, whose allocator needs it not."""
    monkeypatch.setattr(slabs, "DEVICE_TYPES", frozenset({"cuda", "cpu"}))


def storages(states):
    """The number of allocations behind the entries of these states."""
    tensors = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
    return len({t.untyped_storage().data_ptr() for t in tensors})


def entries(count, numel=LARGE, dtype=torch.float32):
    """States with one large and one small entry each."""
    make = torch.Generator().manual_seed(0)
    return [
        {
            "large": torch.randn(numel + i, generator=make).to(DEVICE, dtype),
            "small": torch.ones(3, device=DEVICE),
            "name": "text",
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint8], ids=str)
def test_large_entries_share_a_storage_and_have_their_values(dtype):
    """Values, shapes, dtypes and alignment stay; small entries and other values are left alone."""
    states = entries(3, 4 * LARGE, dtype)
    before = copy.deepcopy(states)
    small = [state["small"] for state in states]
    gather(states)
    assert len({state["large"].untyped_storage().data_ptr() for state in states}) == 1
    for state, old, left in zip(states, before, small, strict=True):
        assert torch.equal(state["large"], old["large"])
        assert state["large"].dtype is dtype
        assert state["large"].data_ptr() % 16 == states[0]["large"].data_ptr() % 16
        assert state["small"] is left


def test_entries_do_not_touch_each_other():
    """A write to one entry changes no other entry and no other version counter."""
    states = entries(3)
    gather(states)
    before = [state["large"].clone() for state in states]
    versions = [state["large"]._version for state in states]
    states[1]["large"].fill_(7.0)
    assert torch.equal(states[0]["large"], before[0])
    assert torch.equal(states[2]["large"], before[2])
    assert [states[i]["large"]._version for i in (0, 2)] == [versions[0], versions[2]]
    assert len({view_key(state["large"]) for state in states}) == 3


def test_gathered_entries_stay_where_they_are():
    """A second call moves only what was created since, so that addresses in the kernels' tables stay valid."""
    states = entries(2)
    gather(states)
    where = [state["large"].data_ptr() for state in states]
    for i, state in enumerate(states):
        state["more"] = torch.full((LARGE,), float(i), device=DEVICE)
    gather(states)
    assert [state["large"].data_ptr() for state in states] == where
    assert storages(states) == 2 + 2  # two slabs, two small entries


def test_entries_that_a_slab_cannot_hold_as_they_are_stay():
    """Strided entries and views of other tensors keep their memory."""
    whole = torch.zeros(2, LARGE, device=DEVICE)
    states = [{"view": whole[0]}, {"strided": torch.zeros(600, 700, device=DEVICE).t()}, {"view": whole[1]}]
    where = [next(iter(state.values())).data_ptr() for state in states]
    gather(states)
    assert [next(iter(state.values())).data_ptr() for state in states] == where


@given(st.lists(st.integers(1, SLAB + SLAB // 2), max_size=30))
def test_runs_contain_every_item_once_and_fit_a_slab(sizes):
    """A run has items of one kind in their order, and one of several is at most a slab."""
    result = list(runs(list(enumerate(sizes)), lambda item: item[1], lambda item: item[0] % 2))
    assert sorted(i for run in result for i, _ in run) == list(range(len(sizes)))
    assert all(run == sorted(run) and len({i % 2 for i, _ in run}) == 1 for run in result)
    assert all(len(run) == 1 or sum(size for _, size in run) <= SLAB for run in result)
    assert all(len(run) == 1 or min(size for _, size in run) > SEPARATE - ALIGNMENT for run in result)


def test_states_are_created_a_slab_at_a_time(monkeypatch):
    """While states are created, no more than a slab's entries wait to be moved."""
    monkeypatch.setattr(slabs, "SLAB", 4 * SEPARATE)
    waiting = []

    def created():
        states = []
        for _ in range(12):
            states.append({"large": torch.zeros(LARGE, device=DEVICE)})
            yield states[-1]
            own = [s for s in states if s["large"].untyped_storage().nbytes() < 2 * SEPARATE]
            waiting.append(len(own))

    gather(created())
    assert max(waiting) <= 4
    assert waiting[-1] < 4


@pytest.fixture
def from_1_kib(monkeypatch):
    """Gather from 1 KiB on, so that small models have slabs."""
    monkeypatch.setattr(slabs, "SEPARATE", 1 << 10)


def model_of(width=48):
    """Three layers whose weights' states are gathered."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, width)).to(DEVICE)


def trained(precision, steps=3, state=None):
    """An engine after some steps."""
    model = model_of()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), precision)
    if state is not None:
        engine.load_state_dict(copy.deepcopy(state))
    for _ in range(steps):
        with engine.forward():
            loss = model(torch.ones(4, 16, device=DEVICE)).float().square().mean()
        engine.backward(loss)
        engine.step()
    return engine


def optimizer_states(engine):
    """The states of its optimizer that have entries."""
    (optimizer,) = engine.optimizers
    return [state for state in optimizer.state.values() if state]


@pytest.mark.usefixtures("from_1_kib")
@pytest.mark.parametrize("precision", ["bf16-lean", "bf16-lean,states=8bit", "fp16-lean,master=fp32"])
def test_training_and_resuming_do_not_depend_on_slabs(monkeypatch, precision):
    """Every bit of weights and states is that of separate entries, also after a state was loaded."""
    gathered = trained(precision)
    resumed = trained(precision, state=gathered.state_dict())
    assert storages(optimizer_states(gathered)) < sum(len(state) for state in optimizer_states(gathered)) - 2
    monkeypatch.setattr(slabs, "DEVICE_TYPES", frozenset())
    separate = trained(precision)
    assert storages(optimizer_states(separate)) > storages(optimizer_states(gathered))
    for one, two in ((gathered, separate), (resumed, trained(precision, state=separate.state_dict()))):
        for mine, other in zip(optimizer_states(one), optimizer_states(two), strict=True):
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.usefixtures("from_1_kib")
@pytest.mark.parametrize("precision", ["bf16-lean", "bf16-lean,states=8bit", "fp16-lean,master=fp32,states=bf16"])
def test_torch_saves_a_slab_once(precision):
    """The file of a state dict is as large as that of separate entries, whatever dtypes these have, and loads."""
    engine = trained(precision)
    (optimizer,) = engine.optimizers
    saved = optimizer.state_dict()
    file, separate = io.BytesIO(), io.BytesIO()
    torch.save(saved, file)
    torch.save(
        {**saved, "state": {i: {k: v.clone() for k, v in s.items()} for i, s in saved["state"].items()}}, separate
    )
    assert len(file.getvalue()) <= len(separate.getvalue()) + 4096
    file.seek(0)
    loaded = torch.load(file)
    assert all(torch.equal(loaded["state"][i][k], v) for i, s in saved["state"].items() for k, v in s.items())


@pytest.mark.usefixtures("from_1_kib")
def test_setting_a_master_writes_into_its_slab():
    """New weights do not leave the old masters' memory unused."""
    engine = trained("bf16-lean")
    (optimizer,) = engine.optimizers
    param = optimizer.param_groups[0]["params"][2]
    low = optimizer.state[param]["low"]
    optimizer.set_master(param, torch.full(param.shape, 1.0 + 2**-12, device=DEVICE))
    assert optimizer.state[param]["low"] is low
    assert torch.equal(optimizer.master_of(param), torch.full(param.shape, 1.0 + 2**-12, device=DEVICE))


@pytest.mark.usefixtures("from_1_kib")
def test_the_planner_counts_the_same_allocations():
    """Its list of states has the sizes of the slabs and of the entries next to them."""
    engine = trained("bf16-lean")
    (optimizer,) = engine.optimizers
    large = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for s in optimizer_states(engine)
        for t in s.values()
    }
    planned = [state.num_bytes for state in states_after_step(optimizer, "lean")]
    planned = planned[:-1] if DEVICE.type == "cuda" else planned  # less the kernels' tables
    expected = sorted(size for size in large.values() if size > slabs.SEPARATE)
    assert sorted(size for size in planned if size > slabs.SEPARATE) == pytest.approx(expected, abs=8 * ALIGNMENT)
    assert SEPARATE == allocator.SMALL
    assert ALIGNMENT == allocator.ROUNDING


@pytest.mark.gpu
def test_slabs_lose_less_than_separate_entries(monkeypatch):
    """Allocated bytes of an optimizer's states are within 1 % of those requested, and nearer than those of separate entries."""

    def lost():
        params = [nn.Parameter(torch.zeros(360_000 + 1000 * i, device="cuda", dtype=torch.bfloat16)) for i in range(60)]
        optimizer = halfstep.optim.AdamW(params)
        for param in params:
            param.grad = torch.zeros_like(param)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        names = ("allocated_bytes.all.current", "requested_bytes.all.current")
        allocated, requested = (after[name] - before[name] for name in names)
        return allocated / requested - 1

    gathered = lost()
    monkeypatch.setattr(slabs, "DEVICE_TYPES", frozenset())
    separate = lost()
    assert gathered < min(0.01, separate)
