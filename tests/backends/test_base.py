"""The hook list: no-ops that are right for one process, called by the Engine in their order."""

import contextlib
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.backends import Backend, DataParallel, RunContext, SingleDevice, WrappedDDP, make_backend, unwrap
from halfstep.engine.engine import Engine
from halfstep.errors import SettingError
from halfstep.precision.policy import Policy

HOOKS = (
    "adapt", "compare", "check_together", "suggest_units", "check", "group_of", "prepare", "context", "own", "settle", "gradients", "parts", "whole_weights", "forward_context", "agree_reference", "backward", "retained_gradients",
    "reduce_gradients", "norm_of", "reduce_weight", "total_norm", "agree", "watch_overflows", "step", "share_buffers", "reset", "drop_copies", "local", "gather",
    "scatter", "ranks", "truth_rows", "close",
)  # fmt: skip


def as_ddp(module):
    """A DistributedDataParallel around `module`, without a process group."""
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = module
    return wrapper


class Recording(Backend):
    """Writes down the hooks that are called."""

    def __init__(self):
        super().__init__(RunContext(world_size=2))
        self.calls = []

    def __getattribute__(self, name):
        if name in HOOKS:
            self.calls.append(name)
        return super().__getattribute__(name)


def step(engine, model):
    """One micro-batch through the Engine."""
    with engine.forward():
        loss = F.mse_loss(model(torch.ones(2, 3)), torch.zeros(2, 2))
    engine.backward(loss)
    return engine.step()


def test_the_hook_list_is_the_documented_one():
    """A backend's public methods are the hooks and nothing else."""
    methods = {n for n, _ in inspect.getmembers(Backend, inspect.isfunction) if not n.startswith("_")}
    assert methods == set(HOOKS)


def test_every_hook_is_right_for_one_process():
    """Tensors, states and weights pass unchanged; no step is taken over; closing twice is fine."""
    backend, tensor, state = SingleDevice(), torch.ones(()), {"a": 1}
    assert backend.context() == RunContext()
    for hook in (backend.reduce_weight, backend.total_norm, backend.agree, backend.local):
        assert hook(tensor) is tensor
    assert backend.agree_reference(tensor, weighted=True, closing=True) is tensor
    assert backend.gather(state) is backend.scatter(state) is state
    assert backend.ranks().num_ranks == 1
    assert backend.step(None, None) is False
    assert backend.gradients() is None
    assert backend.adapt(Policy()) == Policy()
    assert backend.truth_rows() == {}
    with backend.forward_context(last=False):
        backend.close()
        backend.close()


def test_the_engine_calls_the_hooks_in_their_order(tmp_path):
    """Check comes before any change, prepare once, and each step decides over all ranks before it updates."""
    backend, model = Recording(), nn.Linear(3, 2)
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", max_norm=1.0, backend=backend) as engine:
        assert backend.calls[:6] == ["adapt", "compare", "check_together", "suggest_units", "check", "prepare"]
        backend.calls.clear()
        step(engine, model)
        anytime = {"context", "truth_rows", "drop_copies", "local"}
        order = [name for name in dict.fromkeys(backend.calls) if name not in anytime]
        update = [
            "reduce_gradients",
            "gradients",
            "norm_of",
            "total_norm",
            "reduce_weight",
            "agree",
            "step",
            "share_buffers",
            "reset",
        ]
        assert order == ["forward_context", "agree_reference", "backward", *update]
        once = (
            "reduce_gradients",
            "total_norm",
            "reduce_weight",
            "agree",
            "step",
            "share_buffers",
        )  # each may be a collective
        assert [backend.calls.count(name) for name in once] == [1] * len(once)
        backend.calls.clear()
        engine.load(engine.save(tmp_path / "saved"))
        assert [name for name in backend.calls if name in {"gather", "scatter"}] == ["gather", "scatter"]
    assert backend.calls[-1] == "close"


def test_a_backend_can_own_the_step():
    """Where the hook returns True the Engine leaves the optimizer alone, as ZeRO needs it."""

    class Owning(Backend):
        def step(self, optimizer, decision):
            return True

    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    step(Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", backend=Owning()), model)
    assert torch.equal(model.weight, before)


def test_weights_of_a_window_are_agreed():
    """Gradients are divided by what `reduce_weight` returns."""

    class Twice(Backend):
        def reduce_weight(self, weight):
            return weight * 2

    norms = []
    for backend in ("single", Twice()):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", backend=backend)
        norms.append(step(engine, model).grad_norm)
    assert norms[0] == pytest.approx(2 * norms[1])


def test_only_the_last_forward_of_a_window_reduces():
    """`forward_context` is told which micro-batch fills the window."""

    class Telling(Backend):
        def forward_context(self, *, last):
            flags.append(last)
            return contextlib.nullcontext()

    flags, model = [], nn.Linear(3, 2)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate=3, backend=Telling())
    for _ in range(6):
        step(engine, model)
    assert flags == [False, False, True] * 2


def test_rows_of_the_backend_replace_those_of_the_truth_table():
    """A known row is replaced, a new one is added."""

    class Rows(Backend):
        def truth_rows(self):
            return {"reduction": "bf16 over 8 ranks", "sharding": "ZeRO 3"}

    model = nn.Linear(3, 2)
    rows = dict(Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", backend=Rows()).truth().rows)
    assert (rows["reduction"], rows["sharding"]) == ("bf16 over 8 ranks", "ZeRO 3")


def test_a_plain_module_is_itself():
    """Nothing to unwrap; a submodule called `module` belongs to the user."""
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert unwrap(model) is model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch by its own compiler, in some versions
def test_wrappers_are_removed_in_any_order():
    """torch.compile's, DistributedDataParallel's, and both around each other."""
    model = nn.Linear(2, 2)
    assert unwrap(torch.compile(model, backend="eager")) is model
    assert unwrap(as_ddp(model)) is model
    assert unwrap(torch.compile(as_ddp(model), backend="eager")) is model
    assert unwrap(as_ddp(torch.compile(model, backend="eager"))) is model


def test_a_backend_is_an_object_or_a_name():
    """An object is used as it is, names are checked, and "auto" looks at the model."""
    model, backend = nn.Linear(2, 2), SingleDevice()
    assert make_backend(backend, model) is backend
    assert [make_backend(name, model).name for name in ("auto", "single")] == ["single", "single"]
    for name in ("auto", "ddp"):
        assert isinstance(make_backend(name, as_ddp(model)), WrappedDDP)
        for policy in ("bf16-lean", "fp16-lean", "bf16,reduce=bf16"):
            assert isinstance(make_backend(name, as_ddp(model), Policy.parse(policy)), DataParallel)
    with pytest.raises(SettingError, match="Did you mean 'single'"):
        make_backend("singel", model)
    assert isinstance(make_backend("ddp", model), DataParallel)
    with pytest.raises(SettingError, match="must be a Backend"):
        make_backend(None, model)
    with pytest.raises(SettingError, match="DistributedDataParallel"):
        make_backend("single", as_ddp(model))


def test_a_wrapper_around_a_part_is_rejected():
    """Its ranks would agree on nothing: weights would be per rank."""
    with pytest.raises(SettingError, match="A part of the model"):
        make_backend("auto", nn.Sequential(as_ddp(nn.Linear(2, 2)), nn.Linear(2, 2)))


def test_processes_of_a_launcher_without_a_group_are_rejected(monkeypatch):
    """Each would train a model of its own; by name one process may do so, and "ddp" shows what to write."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SettingError, match="WORLD_SIZE=2.*init_process_group"):
        make_backend("auto", nn.Linear(2, 2))
    assert make_backend("single", nn.Linear(2, 2)).name == "single"
    model = nn.Linear(2, 2)
    with pytest.raises(SettingError, match='backend="ddp" needs a process group.*WORLD_SIZE=2.*init_process_group'):
        Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", backend="ddp")
