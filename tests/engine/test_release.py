"""Gradient release: the same updates, one layer's gradients at a time, and what it cannot promise said."""

import math

import pytest
import torch
import torch.nn.functional as F

import halfstep
from engine_models import batches
from halfstep.engine.engine import Engine
from halfstep.errors import HalfstepError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRESETS = ("fp32", "bf16", "bf16-lean", "bf16-lean,states=8bit")


def build(precision, *, release, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (torch.nn.Linear(16, 16), torch.nn.Tanh())]
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), *layers, torch.nn.Linear(16, 3)).to(DEVICE)
    engine = Engine(model, optimizer(model.parameters(), lr=1e-2), precision, gradient_release=release, **options)
    return model, engine


def train(model, engine, count, *, poison=None):
    results = []
    for i, batch in enumerate(batches(count)):
        x, y = (t.to(DEVICE) for t in batch)
        if i == poison:
            x = x * math.inf
        with engine.forward():
            loss = F.cross_entropy(model(x), y)
        engine.backward(loss)
        results.append(engine.step())
    return results


@pytest.mark.parametrize("precision", PRESETS)
def test_released_updates_are_the_ordinary_ones(precision):
    """Ten steps with and without release end in the same masters and report the same norms."""
    ends = []
    for release in (False, True):
        lean = {"optimizer": halfstep.optim.AdamW} if "lean" not in precision else {}
        model, engine = build(precision, release=release, **lean)
        results = train(model, engine, 10)
        ends.append((engine.masters(), [r.grad_norm for r in results]))
    for name, master in ends[0][0].items():
        assert torch.equal(master, ends[1][0][name]), name
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-5)


def test_gradients_of_one_layer_at_a_time_are_alive():
    """While backward runs, no more than a layer's weight and bias hold a gradient; afterwards none does."""
    model, engine = build("bf16-lean", release=True)
    alive = []
    for p in model.parameters():
        p.register_hook(lambda grad: alive.append(sum(q.grad is not None for q in model.parameters())))
    train(model, engine, 2)
    assert max(alive) <= 2
    assert all(p.grad is None for p in model.parameters())


def test_a_non_finite_gradient_skips_its_tensor_and_is_counted():
    """Poisoned tensors keep their bits; the step is reported as skipped, and the schedule does not advance."""
    model, engine = build("fp32", release=True)
    train(model, engine, 2)
    before = engine.masters()
    result = train(model, engine, 1, poison=0)[0]
    assert result.skipped
    for name, master in engine.masters().items():
        assert torch.equal(master, before[name]), name
    assert engine.progress.applied == 2
    assert not train(model, engine, 1)[0].skipped


def test_the_truth_table_says_what_is_given_up():
    """Promises 1 and 4 are named."""
    _, engine = build("bf16", release=True)
    assert [text for text in engine.truth().waived_guarantees if "skips only its own tensor" in text]
    assert [text for text in engine.truth().waived_guarantees if "cannot be clipped" in text]
    assert build("bf16", release=False)[1].truth().waived_guarantees == ()


@pytest.mark.parametrize(
    ("precision", "options", "reason"),
    [
        ("fp16", {}, "scales the loss"),
        ("fp16-lean", {}, "scales the loss"),
        ("bf16", {"max_norm": 1.0}, "max_norm=1.0"),
        ("fp32", {"accumulate": 2}, "accumulate=2"),
        ("bf16-lean", {"compile": True}, "compile=True"),
        ("bf16", {"optimizer": torch.optim.Adafactor}, "Adafactor steps all of them together"),
    ],
)
def test_it_is_rejected_where_all_gradients_are_needed_at_once(precision, options, reason):
    """Each refusal names its reason."""
    with pytest.raises(HalfstepError, match=reason):
        build(precision, release=True, **options)


def test_what_would_update_twice_is_rejected():
    """A second backward in a step, a weighted one, and unscale() raise instead of training wrongly."""
    model, engine = build("fp32", release=True)
    x, y = batches(1)[0]
    with engine.forward():
        first, second = (F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)) for _ in range(2))
    with pytest.raises(HalfstepError, match="without weight"):
        engine.backward(first, weight=3.0)
    engine.backward(first)
    with pytest.raises(HalfstepError, match="once per step"):
        engine.backward(second)
    with pytest.raises(HalfstepError, match="gradient_release"):
        engine.unscale()
    engine.step()


def test_a_gradient_that_comes_twice_in_one_backward_is_an_error():
    """Reentrant checkpointing accumulates a shared weight twice; the second time would be a second update."""
    shared = torch.nn.Linear(4, 4).to(DEVICE)

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = shared

        def forward(self, x):
            from torch.utils.checkpoint import checkpoint

            for _ in range(2):
                x = checkpoint(self.shared, x, use_reentrant=True)
            return x

    model = Twice()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", gradient_release=True)
    with engine.forward():
        loss = model(torch.ones(2, 4, device=DEVICE, requires_grad=True)).sum()
    with pytest.raises(HalfstepError, match="was computed twice"):
        engine.backward(loss)


def test_close_takes_the_hooks_away():
    """After close() a backward leaves its gradients."""
    model, engine = build("fp32", release=True)
    train(model, engine, 1)
    engine.close()
    model(torch.ones(2, 6, device=DEVICE)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
