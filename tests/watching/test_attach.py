"""Watch(model).attach(optimizer, scaler): true values in anyone's loop."""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn

import halfstep
from halfstep.engine.engine import Engine
from halfstep.errors import SettingError
from halfstep.kernels.exponents import BIN_OF_1

OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "lean": lambda p: halfstep.optim.AdamW(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
}


def build(make, seed=0):
    """A small model and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return model, make(model.parameters())


def loop(model, optimizer, scaler=None, *, steps=6, unscale=False, poison=()):
    """A loop with torch's scaler or none; returns the true gradients of each step."""
    true = []
    for step in range(1, steps + 1):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        loss = model(x).square().mean() * (math.inf if step in poison else 1.0)
        true.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
        if scaler is None:
            loss.backward()
            optimizer.step()
            continue
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return true


def binned(values):
    """Elements by exponent, of values whose scale is a power of two, so that fp32 is exact."""
    exponents = torch.frexp(values[values != 0].abs())[1] - 1
    return {e: int((exponents == e).sum()) for e in exponents.unique().tolist()}


def assert_true_values(watch, true, model):
    """Each sample has the exponents of the true gradients."""
    names = [name for name, _ in model.named_parameters()]
    assert [s.step for s in watch.samples] == list(range(1, len(true) + 1))
    for sample, gradients in zip(watch.samples, true, strict=True):
        for name, gradient in zip(names, gradients, strict=True):
            if gradient.isfinite().all():
                stats = sample.gradients[name]
                assert {i - BIN_OF_1: n for i, n in enumerate(stats.bins) if n} == binned(gradient)
            else:
                assert sample.gradients[name].nonfinite == int((~gradient.isfinite()).sum())


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_gradients_are_unscaled_under_torchs_scaler(make, unscale):
    """Whoever unscales, the loop or the scaler or the fused kernel, the counts are those of the true gradients."""
    model, optimizer = build(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    watch = halfstep.Watch(model, every=1).attach(optimizer, scaler)
    true = loop(model, optimizer, scaler, unscale=unscale, poison=(3,))
    watch.close()
    assert_true_values(watch, true, model)
    assert [s.skipped for s in watch.samples] == [False, False, True, False, False, False]
    assert watch.samples[0].scale == (1.0 if unscale else 2.0**12)
    kinds = [(e.kind, e.step) for e in watch.events]
    assert kinds == [("skip", 3), ("scale", 4)]
    skip, lowered = watch.events
    assert set(skip.data["parameters"]) == {name for name, _ in model.named_parameters()}
    assert lowered.data["after"] == 2.0**11


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_loop_without_a_scaler_is_watched(make):
    """The optimizer's step hooks are enough: gradients, weights and updates of each step."""
    model, optimizer = build(make)
    watch = halfstep.Watch(model, every=1, activations=True).attach(optimizer)
    true = loop(model, optimizer)
    watch.close()
    assert_true_values(watch, true, model)
    assert all(s.updates["0.weight"].ratio > 1e-3 for s in watch.samples)
    assert watch.samples[0].activations.keys() == {"0", "1", "2"}
    assert not watch.events


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_watched_loop_is_bit_identical(make, scaled):
    """Neither weights nor the optimizer's and the scaler's states differ from a loop that is not watched."""
    runs = []
    for watched in (False, True):
        model, optimizer = build(make)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if scaled else None
        watch = halfstep.Watch(model, every=2, activations=True)
        if watched:
            watch.attach(optimizer, scaler)
        loop(model, optimizer, scaler, poison=(2,) if scaled else ())
        state = optimizer.state_dict()["state"]
        runs.append((list(model.parameters()), state, scaler and scaler.state_dict()))
        watch.close()
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert runs[0][2] == runs[1][2]
    assert runs[0][1].keys() == runs[1][1].keys()
    for key, entries in runs[0][1].items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(runs[1][1][key][n])) for n, v in entries.items())


class Unread(dict):
    """Parameters by name that nobody may look at."""

    def _fail(self, *_):
        raise AssertionError("a step that is not sampled looks at parameters")

    __iter__ = __getitem__ = keys = values = items = get = _fail


@pytest.mark.parametrize("way", ["scaler", "none", "guard"])
def test_a_step_that_is_not_sampled_looks_at_no_parameter(way):
    """Step 3 leaves the table of parameters alone; step 4 is sampled and does not."""
    model, optimizer = build(OPTIMIZERS["foreach"])
    scaler = torch.amp.GradScaler("cpu") if way == "scaler" else None
    if way == "guard":
        halfstep.Guard(optimizer)
    watch = halfstep.Watch(model).attach(optimizer, scaler)
    loop(model, optimizer, scaler, steps=2)
    (stream,), (hooks,) = watch._streams, watch._loops
    stream.sampler.params = hooks._params = Unread(stream.sampler.params)
    loop(model, optimizer, scaler, steps=1)
    with pytest.raises(AssertionError, match="not sampled"):
        loop(model, optimizer, scaler, steps=1)


def test_several_optimizers_have_their_own_samples():
    """A scaler steps two optimizers; each one's parameters are sampled at its own steps."""
    model, _ = build(OPTIMIZERS["fused"])
    first = torch.optim.AdamW(model[0].parameters(), fused=True)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    watch = halfstep.Watch(model, every=1).attach([first, second], scaler)
    for _ in range(2):
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    watch.close()
    assert [(s.step, sorted(s.gradients)) for s in watch.samples] == [
        (1, ["0.bias", "0.weight"]),
        (1, ["2.bias", "2.weight"]),
        (2, ["0.bias", "0.weight"]),
        (2, ["2.bias", "2.weight"]),
    ]


def test_a_guard_and_a_watch_work_together():
    """A step that a Guard skips on the device is a skipped sample."""
    model, optimizer = build(OPTIMIZERS["fused"])
    halfstep.Guard(optimizer)
    watch = halfstep.Watch(model, every=1).attach(optimizer)
    loop(model, optimizer, poison=(2,), steps=3)
    watch.close()
    assert [s.skipped for s in watch.samples] == [False, True, False]
    assert model[0].weight.isfinite().all()


def test_closing_removes_every_hook():
    """Afterwards the optimizer, the scaler and the model are as they were, and nothing is sampled."""
    model, optimizer = build(OPTIMIZERS["foreach"])
    scaler = torch.amp.GradScaler("cpu")
    own = vars(scaler).copy()
    for each in (scaler, None):
        watch = halfstep.Watch(model, every=1, activations=True).attach(optimizer, each)
        watch.close()
        loop(model, optimizer, each, steps=1)
        assert not watch.samples
    assert vars(scaler).keys() == own.keys()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not any(m._forward_hooks for m in model.modules())


def test_a_watch_keeps_no_optimizer_alive():
    """Optimizer states are freed without the garbage collector while the watch still exists."""
    model, optimizer = build(OPTIMIZERS["fused"])
    scaler = torch.amp.GradScaler("cpu")
    watch = halfstep.Watch(model, every=1).attach(optimizer, scaler)
    loop(model, optimizer, scaler, steps=2)
    gc.disable()
    try:
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    watch.close()
    assert len(watch.samples) == 2


def test_a_disabled_scaler_is_no_scaler():
    """GradScaler(enabled=False) passes the optimizer's own step through."""
    model, optimizer = build(OPTIMIZERS["foreach"])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    watch = halfstep.Watch(model, every=1).attach(optimizer, scaler)
    true = loop(model, optimizer, scaler, steps=2)
    watch.close()
    assert_true_values(watch, true, model)


def test_a_pure_bf16_loop_that_stalls_is_reported():
    """model.bfloat16() with a stock AdamW and a small learning rate is the usual case."""
    model, _ = build(OPTIMIZERS["foreach"])
    model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    watch = halfstep.Watch(model).attach(optimizer)
    for step in range(1, 40):
        optimizer.zero_grad()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(x).square().mean().backward()
        optimizer.step()
    watch.close()
    (event,) = watch.events
    assert event.kind == "lost-updates"
    assert event.step <= 32
    assert "0.weight" in event.data["parameters"]


@pytest.mark.parametrize(
    ("attach", "message"),
    [
        (lambda m, o: halfstep.Watch().attach(o), r"needs the model"),
        (lambda m, o: halfstep.Watch(nn.Linear(2, 2)).attach(o), r"4 of 4 parameters of AdamW are not in the model"),
        (lambda m, o: halfstep.Watch(m).attach(torch.optim.LBFGS(m.parameters())), "LBFGS"),
        (lambda m, o: halfstep.Watch(m).attach(m), "not Sequential"),
        (lambda m, o: halfstep.Watch("model"), "not str"),
    ],
)
def test_what_cannot_be_watched_is_rejected(attach, message):
    """Rejected with the reason, and nothing is hooked."""
    model, optimizer = build(OPTIMIZERS["foreach"])
    with pytest.raises(SettingError, match=message):
        attach(model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks


def test_an_engines_optimizer_is_rejected():
    """The Engine passes more than hooks can see."""
    model, optimizer = build(OPTIMIZERS["foreach"])
    engine = Engine(model, optimizer, "fp32")
    with pytest.raises(SettingError, match="Engine\\(watch="):
        halfstep.Watch(model).attach(optimizer)
    engine.close()


def test_a_watched_scaler_can_be_copied():
    """copy.deepcopy of a scaler, which some trainers do, yields one that works."""
    model, optimizer = build(OPTIMIZERS["foreach"])
    scaler = torch.amp.GradScaler("cpu")
    watch = halfstep.Watch(model, every=1).attach(optimizer, scaler)
    clone = copy.deepcopy(scaler)
    loop(model, optimizer, clone, steps=1)
    watch.close()
    assert clone.get_scale() == 2.0**16
