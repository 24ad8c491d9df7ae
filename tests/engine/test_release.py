"""Gradient release: the same updates, a bucket of gradients at a time, and what it cannot promise said."""

import gc
import math

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

import halfstep
from engine_models import batches
from halfstep.engine import release
from halfstep.engine.engine import Engine
from halfstep.errors import HalfstepError
from halfstep.kernels.available import triton_runs_on
from halfstep.optim.fused import FusedOptimizer, FusedStep
from halfstep.optim.lean import LeanOptimizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRESETS = ("fp32", "bf16", "bf16-lean", "bf16-lean,states=8bit")
LAYER_BYTES = 4 * (16 * 16 + 16)  # fp32 gradients of a hidden layer of `build`
BUCKETS = (1, 2 * LAYER_BYTES, release.BUCKET_BYTES)  # a gradient alone, some layers, and the whole model


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


def masters_of(engine):
    """Copies: an fp32 weight is its own master."""
    return {name: master.clone() for name, master in engine.masters().items()}


def assert_equal_masters(a, b):
    assert a.keys() == b.keys()
    for name, master in a.items():
        assert torch.equal(master, b[name]), name


def count_calls(monkeypatch, *methods):
    """Calls of these (class, name) methods from now on."""
    calls = []

    def counted(original, name):
        def call(*args, **options):
            calls.append(name)
            return original(*args, **options)

        return call

    for cls, name in methods:
        monkeypatch.setattr(cls, name, counted(getattr(cls, name), name))
    return calls


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("precision", PRESETS)
def test_released_updates_are_the_ordinary_ones(monkeypatch, precision, bucket):
    """Three steps with and without release end in the same masters and report the same norms, whatever the bucket."""
    monkeypatch.setattr(release, "BUCKET_BYTES", bucket)
    ends = []
    for released in (False, True):
        lean = {"optimizer": halfstep.optim.AdamW} if "lean" not in precision else {}
        model, engine = build(precision, release=released, **lean)
        results = train(model, engine, 3)
        ends.append((engine.masters(), [r.grad_norm for r in results]))
    assert_equal_masters(ends[0][0], ends[1][0])
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-5)


@pytest.mark.parametrize(("bucket", "count"), [(1, 16), (2 * LAYER_BYTES, 4), (release.BUCKET_BYTES, 1)])
def test_a_bucket_is_one_update(monkeypatch, bucket, count):
    """The optimizer is called once per bucket in every step, and once in all for a model smaller than a bucket."""
    monkeypatch.setattr(release, "BUCKET_BYTES", bucket)
    model, engine = build("fp32", release=True, optimizer=halfstep.optim.AdamW)
    calls = count_calls(monkeypatch, (FusedOptimizer, "step_some"))
    for _ in range(3):
        calls.clear()
        train(model, engine, 1)
        assert len(calls) == count


@pytest.mark.skipif(not triton_runs_on(DEVICE), reason="Requires: [a CUDA device, or TRITON_INTERPRET=1]")
def test_tables_are_built_in_the_first_step_only(monkeypatch):
    """Later steps run on the tables of the first, also after a change of the learning rate and another batch size."""
    monkeypatch.setattr(release, "BUCKET_BYTES", 2 * LAYER_BYTES)
    model, engine = build("fp32", release=True, optimizer=halfstep.optim.AdamW)
    calls = count_calls(monkeypatch, (FusedStep, "prepare"), (LeanOptimizer, "_step_by_reference"))
    train(model, engine, 1)
    assert calls == ["prepare"] * 4
    engine.optimizers[0].param_groups[0]["lr"] = 1e-4
    train(model, engine, 3)
    assert calls == ["prepare"] * 4


@pytest.mark.parametrize("bucket", BUCKETS)
def test_no_more_than_a_bucket_of_gradients_is_alive(monkeypatch, bucket):
    """A released gradient's memory is gone while backward still runs, and what is alive is a bucket and the layer at work."""
    monkeypatch.setattr(release, "BUCKET_BYTES", bucket)
    model, engine = build("fp32", release=True)
    made, alive = [], []

    def observe(grad):
        made.append((StorageWeakRef(grad.untyped_storage()), grad.nbytes))
        alive.append(sum(num_bytes for storage, num_bytes in made if not storage.expired()))

    for p in model.parameters():
        p.register_hook(observe)
    train(model, engine, 1)
    total, first = sum(p.nbytes for p in model.parameters()), max(alive)
    assert len(made) == len(list(model.parameters()))
    assert first <= min(bucket + 2 * LAYER_BYTES, total)
    made.clear()
    train(model, engine, 1)  # by the recorded order
    assert max(alive) == first
    assert all(storage.expired() for storage, _ in made)
    assert all(p.grad is None for p in model.parameters())


class Branches(torch.nn.Module):
    """Layers that are used in the order of `self.order`: some twice, some not at all."""

    def __init__(self, count=8):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(count))
        self.head = torch.nn.Linear(6, 3)
        self.order = range(count)

    def forward(self, x):
        for i in self.order:
            x = torch.tanh(self.layers[i](x))
        return self.head(x)


ORDERS = [
    (range(8), range(7, -1, -1), range(8)),  # reversed
    (range(8), range(4), (0, 2, 4, 6), range(8)),  # unused layers
    (range(2), range(2, 6), range(8), (7, 0)),  # used for the first time later on
    ((0, 1, 0, 2, 0), (2, 1, 2), (3, 3, 3, 0)),  # shared
]


@pytest.mark.parametrize("bucket", [1, 400, release.BUCKET_BYTES])
@pytest.mark.parametrize("orders", ORDERS, ids=str)
def test_an_order_that_changes_between_steps_gives_the_ordinary_updates(monkeypatch, orders, bucket):
    """Reversed, unused, late and shared layers are updated with the bits of the ordinary step, in a bounded memory."""
    monkeypatch.setattr(release, "BUCKET_BYTES", bucket)
    ends, alive = [], []
    for released in (False, True):
        torch.manual_seed(0)
        model = Branches().to(DEVICE)
        engine = Engine(model, halfstep.optim.AdamW(model.parameters(), lr=1e-2), "fp32", gradient_release=released)
        params = list(model.parameters())
        if released:
            for p in params:
                p.register_hook(lambda _: alive.append(sum(q.nbytes for q in params if q.grad is not None)))  # noqa: B023 - called in this turn
        for order in orders * 2:
            model.order = order
            train(model, engine, 1)
        state = engine.optimizers[0].state
        ends.append((engine.masters(), [float(state[p].get("step", 0)) for p in params]))
    assert_equal_masters(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    assert max(alive) <= 2 * bucket + params[0].nbytes


def test_a_changed_order_is_recorded_again(monkeypatch):
    """One step with other buckets, in which too much was waiting, and the next is released in as few updates as the first."""
    monkeypatch.setattr(release, "BUCKET_BYTES", 2 * 4 * (36 + 6))
    model = Branches().to(DEVICE)
    engine = Engine(model, halfstep.optim.AdamW(model.parameters(), lr=1e-2), "fp32", gradient_release=True)
    calls = count_calls(monkeypatch, (FusedOptimizer, "step_some"))
    counts = []
    for order in (range(8), (0, 2, 4, 6, 1, 3, 5, 7), (0, 2, 4, 6, 1, 3, 5, 7), (0, 2, 4, 6, 1, 3, 5, 7)):
        model.order = order
        calls.clear()
        train(model, engine, 1)
        counts.append(len(calls))
    assert counts[1] > counts[0]
    assert counts[2] == counts[3] == counts[0]


@pytest.mark.parametrize("bucket", BUCKETS)
def test_several_optimizers_groups_and_schedules_share_a_bucket(monkeypatch, bucket):
    """Two optimizers, one of them without kernels, with two groups and a schedule each, end in the ordinary bits."""
    monkeypatch.setattr(release, "BUCKET_BYTES", bucket)
    ends = []
    for released in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 16), *[torch.nn.Linear(16, 16) for _ in range(4)], torch.nn.Linear(16, 3)
        ).to(DEVICE)
        params = list(model.parameters())
        first = halfstep.optim.AdamW([{"params": params[0:8:2]}, {"params": params[8::2], "lr": 1e-4}], lr=1e-2)
        second = halfstep.optim.RMSprop([{"params": params[1:6:2]}, {"params": params[7::2], "lr": 1e-4}], lr=1e-3)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (first, second)]
        engine = Engine(model, [first, second], "bf16-lean", scheduler=schedulers, gradient_release=released)
        train(model, engine, 4)
        assert first.param_groups[0]["lr"] < 1e-2
        ends.append(engine.masters())
    assert_equal_masters(*ends)


def test_a_non_finite_gradient_skips_its_bucket_and_is_counted(monkeypatch):
    """Poisoned buckets keep their bits and step counts, others are updated; the step is reported as skipped, and the schedule does not advance."""
    monkeypatch.setattr(release, "BUCKET_BYTES", 2 * LAYER_BYTES)
    model, engine = build("fp32", release=True)
    train(model, engine, 2)
    before = masters_of(engine)
    hook = model[7].bias.register_hook(lambda grad: grad * math.nan)
    result = train(model, engine, 1)[0]
    hook.remove()
    assert result.skipped
    after = engine.masters()
    unchanged = {name for name, master in after.items() if torch.equal(master, before[name])}
    # Buckets of two layers, from the back: the head is small, and completes none.
    assert unchanged == {"7.weight", "7.bias", "5.weight", "5.bias"}
    assert engine.progress.applied == 2
    assert not train(model, engine, 1)[0].skipped
    state = engine.optimizers[0].state
    steps = {name: state[p]["step"].item() for name, p in model.named_parameters()}
    assert steps == {name: 3 if name in unchanged else 4 for name in before}


def test_a_non_finite_batch_changes_nothing():
    """If every gradient is poisoned, all parameters keep their bits."""
    model, engine = build("fp32", release=True)
    train(model, engine, 2)
    before = masters_of(engine)
    assert train(model, engine, 1, poison=0)[0].skipped
    assert_equal_masters(engine.masters(), before)
    assert engine.progress.applied == 2


def test_a_parameter_that_is_unfrozen_later_is_released():
    """Its hook is registered by the first backward that computes a gradient for it, and the updates are the ordinary ones."""
    ends = []
    for released in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)).to(DEVICE)
        model[0].requires_grad_(False)
        optimizer = halfstep.optim.AdamW(model.parameters(), lr=1e-2)
        engine = Engine(model, optimizer, "fp32", gradient_release=released)
        train(model, engine, 1)
        start = model[0].weight.detach().clone()
        model[0].requires_grad_(True)
        train(model, engine, 2)
        assert not torch.equal(model[0].weight, start)
        ends.append(engine.masters())
    assert_equal_masters(*ends)


def test_a_bare_backward_updates_nothing_and_is_reported():
    """Its gradients stay on the parameters, and the next engine.backward() raises because of them."""
    model, engine = build("fp32", release=True)
    before = masters_of(engine)
    x, y = (t.to(DEVICE) for t in batches(1)[0])
    F.cross_entropy(model(x), y).backward()
    assert_equal_masters(engine.masters(), before)
    with pytest.raises(HalfstepError, match="bare loss.backward"):
        train(model, engine, 1)
    engine.reset_window()
    assert not train(model, engine, 1)[0].skipped


def test_training_continues_after_a_backward_that_failed(monkeypatch):
    """After an error halfway, reset_window() drops what was waiting, and the next steps are complete."""
    monkeypatch.setattr(release, "BUCKET_BYTES", 2 * LAYER_BYTES)
    model, engine = build("fp32", release=True)
    train(model, engine, 1)

    def fail(_):
        raise RuntimeError("halfway")

    hook = model[5].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="halfway"):
        train(model, engine, 1)
    hook.remove()
    engine.reset_window()
    before = masters_of(engine)
    results = train(model, engine, 2)
    assert not any(r.skipped for r in results)
    after = engine.masters()
    assert not any(torch.equal(after[name], before[name]) for name in before)
    assert all(p.grad is None for p in model.parameters())


def test_the_truth_table_says_what_is_given_up():
    """Promises 1 and 4 are named."""
    _, engine = build("bf16", release=True)
    assert [text for text in engine.truth().waived_guarantees if "skips only the bucket" in text]
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


def test_an_engine_that_is_dropped_leaves_nothing_behind():
    """Without close(), its optimizer states go with it, no garbage collection needed, and a backward leaves its gradients."""
    model, engine = build("fp32", release=True, optimizer=halfstep.optim.AdamW)
    train(model, engine, 1)
    moment = engine.optimizers[0].state[model[0].weight]["exp_avg"]
    storage = StorageWeakRef(moment.untyped_storage())
    gc.disable()
    try:
        del engine, moment
        assert storage.expired()
    finally:
        gc.enable()
    model(torch.ones(2, 6, device=DEVICE)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_close_takes_the_hooks_away():
    """After close() a backward leaves its gradients."""
    model, engine = build("fp32", release=True)
    train(model, engine, 1)
    engine.close()
    model(torch.ones(2, 6, device=DEVICE)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
