"""Monitor: what every integration does with a library's loop."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.errors import OverflowStop
from halfstep.integrations import versions
from halfstep.integrations.clipping import clip_by_norm
from halfstep.integrations.monitor import Monitor, own_optimizer
from rank_processes import cases_of_ranks


def model_and_optimizer(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def step(model, optimizer, x, scaler=None, monitor=None):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    if monitor is not None:
        monitor.add_loss(loss)
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    if monitor is not None:
        monitor.end_step()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_run_that_only_skips_is_stopped(scaled):
    """After max_skips in a row OverflowStop is raised, with a Guard or with the loop's scaler, and no weight has changed."""
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    monitor = Monitor(model, [optimizer], scaler, max_skips=3)
    before = [p.detach().clone() for p in model.parameters()]
    bad = torch.full((2, 4), float("inf"))
    for _ in range(2):
        step(model, optimizer, bad, scaler, monitor)
    with pytest.raises(OverflowStop, match="3 steps"):
        step(model, optimizer, bad, scaler, monitor)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_losses_of_a_window_are_added_up_and_nan_is_reported():
    """A NaN in one micro-batch is the loss of its step."""
    model, optimizer = model_and_optimizer()
    events = []
    monitor = Monitor(model, [optimizer], outlets=[events.append])
    monitor.add_loss(torch.tensor(1.0))
    monitor.end_step()
    monitor.add_loss(torch.tensor(1.0))
    monitor.add_loss(torch.tensor(float("nan")))
    monitor.end_step()
    assert [(event.kind, event.step) for event in events] == [("nan-loss", 2)]


def test_close_leaves_nothing_behind():
    """Hooks, Guard and what on_close was given are gone."""
    model, optimizer = model_and_optimizer()
    called = []
    monitor = Monitor(model, [optimizer])
    monitor.follow(model)
    monitor.on_close(lambda: called.append(True))
    assert model._forward_hooks
    monitor.close()
    assert called == [True]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert "step" not in vars(optimizer)


class Operations(TorchDispatchMode):
    """Counts the operations of a block."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("num_layers", [2, 40])
def test_a_step_that_is_not_sampled_adds_few_operations_for_any_number_of_parameters(num_layers):
    """Besides the scaler's own step: a copy of the loss, and the reads of three values; on a GPU each would be a launch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, x = torch.amp.GradScaler("cpu"), torch.ones(2, 4)

    def num_operations(monitor):
        with Operations() as operations:
            if monitor is not None:
                monitor.record(lambda: model(x).square().mean())
            step(model, optimizer, x, scaler, monitor)
        return operations.num

    step(model, optimizer, x, scaler)
    plain = num_operations(None)
    monitor = Monitor(model, [optimizer], scaler)
    sampled = [num_operations(monitor) for _ in range(2)][1]
    assert num_operations(monitor) - plain <= 6
    assert sampled - plain > 6
    monitor.close()


def test_a_loss_that_the_loop_changes_in_place_was_added_as_it_was():
    """A scalar and a vector, in fp32 and fp16: the sum is that at the time of the call."""
    model, optimizer = model_and_optimizer()
    for loss in (torch.tensor(2.0), torch.tensor([2.0]), torch.ones(2), torch.ones(2, dtype=torch.float16)):
        monitor = Monitor(model, [optimizer])
        monitor.add_loss(loss)
        loss.fill_(9.0)
        assert monitor._loss.item() == 2.0
        assert monitor._loss.dtype is torch.float32
        monitor.close()


def test_the_optimizer_inside_wrappers_is_found():
    """Libraries wrap an optimizer, some of them twice."""
    _, optimizer = model_and_optimizer()

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.optimizer = inner

    assert own_optimizer(Wrapper(Wrapper(optimizer))) is optimizer
    assert own_optimizer(optimizer) is optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_clipping_is_by_the_true_norm(dtype):
    """Gradients that are scaled, and whose norm exceeds fp16's range, are clipped as the true ones would be."""
    scale = torch.tensor(2.0**15)
    param = nn.Parameter(torch.zeros(1000, dtype=dtype))
    param.grad = torch.full((1000,), 2.0**15 * 0.25, dtype=dtype)  # true norm 7.906
    norm = clip_by_norm([param], 2.0, scale)
    assert norm.item() == pytest.approx(0.25 * 1000**0.5)
    assert (param.grad.double().norm() / scale).item() == pytest.approx(2.0, rel=1e-3)


def test_clipping_leaves_small_and_overflowed_gradients_alone():
    """A norm below the limit changes nothing; an inf stays, so that the step is skipped."""
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.tensor([0.1, 0.2, 0.2])
    clip_by_norm([param], 1.0)
    assert torch.equal(param.grad, torch.tensor([0.1, 0.2, 0.2]))
    param.grad = torch.tensor([0.1, float("inf"), 0.2])
    assert not clip_by_norm([param], 1.0).isfinite()
    assert torch.equal(param.grad, torch.tensor([0.1, float("inf"), 0.2]))
    assert clip_by_norm([nn.Parameter(torch.zeros(1))], 1.0) == 0


def test_an_unknown_version_is_reported_once_and_used(monkeypatch, caplog):
    """A version that the tests do not cover gives one warning; one that they do gives none."""
    monkeypatch.setattr(versions, "_warned", set())
    monkeypatch.setattr(versions.importlib.metadata, "version", lambda name: "99.0")
    for _ in range(2):
        versions.warn_if_untested("transformers")
    assert [record.getMessage().split(" is outside")[0] for record in caplog.records] == ["transformers 99.0"]
    caplog.clear()
    monkeypatch.setattr(versions.importlib.metadata, "version", lambda name: "5.22.2")
    versions.warn_if_untested("transformers")
    assert not caplog.records


@pytest.mark.slow
def test_ranks_skip_together_and_the_one_that_overflowed_names_its_module():
    """Under DDP each rank examines its own micro-batch; shards are guarded over all ranks, and not examined."""
    ranks = cases_of_ranks(Path(__file__).parents[1] / "monitor_program.py")
    for cases in ranks:
        assert [case["moved"] for case in cases] == [[True, False, True, True]] * 2
        assert all(case["finite"] for case in cases)
        assert cases[1]["autopsies"] == []
    assert ranks[0][0]["autopsies"] == [[2, "not reproduced", None]]
    assert ranks[1][0]["autopsies"] == [[2, "forward", ""]]


def test_the_truth_is_known_after_the_first_step():
    """What the loop stores, read by halfstep.inspect, is logged once and can be asserted."""
    model, optimizer = model_and_optimizer(momentum=0.9)
    monitor = Monitor(model, [optimizer])
    assert monitor.truth is None
    step(model, optimizer, torch.randn(2, 4), monitor=monitor)
    monitor.truth.expect(weights="fp32", master="fp32", states="fp32")
    monitor.close()
