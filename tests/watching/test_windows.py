"""Loops that are not one forward, one backward and one step: several losses, several optimizers, outcomes read at odd moments."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.engine.engine import Engine
from halfstep.kernels.exponents import BIN_OF_1
from halfstep.scaling.scaler import LossScaler


def bits(tensors):
    """The bytes of tensors by name."""
    return {n: t.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for n, t in tensors.items()}


def counted(stats):
    """Elements by exponent."""
    return {i - BIN_OF_1: n for i, n in enumerate(stats.bins) if n}


def exponents(gradient):
    """The same in float64."""
    values = gradient.detach().double().abs().flatten().tolist()
    found = {}
    for value in values:
        if value and math.isfinite(value):
            found[math.frexp(value)[1] - 1] = found.get(math.frexp(value)[1] - 1, 0) + 1
    return found


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 3))


def data(step, bad=False):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(6, 4, generator=g)
    if bad:
        x[2, 1] = math.nan
    return x, torch.randint(3, (6,), generator=g)


# --- several losses per step ----------------------------------------------------------------------------------------------


def two_losses(watch, precision="fp16", bad=None, steps=4):
    """Two forwards and backwards per step, on different batches; `bad` is the step whose second batch has a NaN."""
    model = net()
    scaler = LossScaler(init_scale=2.0**8) if precision == "fp16" else None
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision, watch=watch, scaler=scaler)
    true = []
    for step in range(1, steps + 1):
        parts = [data(step), data(100 + step, bad=step == bad)]

        def first(part=parts[0]):
            return F.cross_entropy(model(part[0]), part[1])

        def second(part=parts[1]):
            return model(part[0]).square().mean()

        for compute in (first, second):
            with engine.forward():
                loss = compute()
            engine.backward(loss)
        scale = engine.scaler.get_scale()
        true.append({n: p.grad.double() / scale for n, p in model.named_parameters()})
        engine.step(replay=lambda first=first, second=second: [first(), second()])
    state = bits(dict(model.state_dict())) | {"rng": torch.get_rng_state().tolist()}
    engine.close()
    return state, true


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_window_of_two_losses_is_one_sample(precision):
    """The gradients are those of both, and activations count both forwards."""
    watch = halfstep.Watch(every=1, activations=True)
    state, true = two_losses(watch, precision)
    assert state == two_losses(None, precision)[0]
    assert [s.step for s in watch.samples] == [1, 2, 3, 4]
    for sample, gradients in zip(watch.samples, true, strict=True):
        assert {n: counted(s) for n, s in sample.gradients.items()} == {n: exponents(g) for n, g in gradients.items()}
        assert sample.activations["3"].numel == 2 * 6 * 3
    assert not watch.events


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_autopsy_of_two_losses_names_the_cause_in_the_second(precision):
    """Random numbers are drawn in the order of the forwards, and training continues as without the autopsy."""
    watch = halfstep.Watch()
    state, _ = two_losses(watch, precision, bad=3)
    (autopsy,) = watch.autopsies
    assert (autopsy.step, autopsy.cause, autopsy.module) == (3, "data", "0")
    assert state == two_losses(None, precision, bad=3)[0]


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("bad", [1, 2], ids=["first", "second"])
def test_a_guard_checks_the_sum_of_both_losses(bad, fused):
    """NaN in either of two backward passes skips the step."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    guard = halfstep.Guard(optimizer)
    for step in range(3):
        before = bits(dict(model.named_parameters()))
        optimizer.zero_grad()
        for number in (1, 2):
            x, y = data(10 * step + number, bad=step == 1 and number == bad)
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert (bits(dict(model.named_parameters())) == before) == (step == 1)
    assert (guard.counts.steps, guard.counts.skips) == (3, 1)


# --- a second optimizer: a GAN --------------------------------------------------------------------------------------------


class Gan(nn.Module):
    """A generator and a discriminator of scalars."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def losses(self, step, bad_real=False, bad_noise=False):
        """Functions for the losses of both, on this step's data."""
        real, _ = data(step, bad=bad_real)
        noise = torch.randn(6, 2, generator=torch.Generator().manual_seed(step))
        if bad_noise:
            noise[0, 0] = math.inf

        def of_discriminator():
            with torch.no_grad():
                fake = self.generator(torch.nan_to_num(noise, posinf=0.0))
            return F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()

        def of_generator():
            return F.softplus(-self.discriminator(self.generator(noise))).mean()

        return of_discriminator, of_generator


PARTS = ("discriminator", "generator")


def optimizers_of(gan):
    return [torch.optim.AdamW(getattr(gan, part).parameters(), lr=1e-2, betas=(0.5, 0.9), fused=True) for part in PARTS]


def gan_loop(watch=None, scaler=None, guarded=False, bad=None, steps=4):
    """A loop over both optimizers; the generator's backward also fills the gradients of the discriminator."""
    gan = Gan()
    optimizers = optimizers_of(gan)
    guards = [halfstep.Guard(o) for o in optimizers] if guarded else []
    if watch is not None:
        watch = halfstep.Watch(gan, every=1).attach(optimizers, scaler)
    true = []
    for step in range(1, steps + 1):
        for part, optimizer, compute in zip(PARTS, optimizers, gan.losses(step, bad_noise=step == bad), strict=True):
            optimizer.zero_grad()
            loss = compute()
            (loss if scaler is None else scaler.scale(loss)).backward()
            scale = 1.0 if scaler is None else scaler.get_scale()
            true.append({n: p.grad.double() / scale for n, p in gan.named_parameters() if n.startswith(part)})
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
    if watch is not None:
        watch.close()
    return bits(gan.state_dict()), true, watch, guards


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
def test_each_optimizer_of_a_gan_is_sampled_at_its_own_step(scaled):
    """Counts are those of its gradients then, not of what the other backward adds; weights are those of a loop without a watch."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None for _ in range(2)]
    state, true, watch, _ = gan_loop(watch=True, scaler=scalers[0])
    assert state == gan_loop(scaler=scalers[1])[0]
    assert len(watch.samples) == len(true) == 8
    for sample, gradients in zip(watch.samples, true, strict=True):
        assert {n: counted(s) for n, s in sample.gradients.items()} == {n: exponents(g) for n, g in gradients.items()}
    assert not watch.events


def test_a_skip_of_one_optimizer_is_not_the_others():
    """An infinite noise vector ruins the generator's gradients only; the event names its parameters."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    _, _, watch, _ = gan_loop(watch=True, scaler=scaler, bad=2)
    skips = [e for e in watch.events if e.kind == "skip"]
    assert [e.step for e in skips] == [2]
    assert {name.partition(".")[0] for name in skips[0].data["parameters"]} == {"generator"}
    assert [s.skipped for s in watch.samples if "generator.0.weight" in s.gradients] == [False, True, False, False]
    assert not any(s.skipped for s in watch.samples if "discriminator.0.weight" in s.gradients)


def test_guards_of_a_gan_decide_separately():
    """The discriminator learns in the step that the generator skips."""
    state, _, _, guards = gan_loop(guarded=True, bad=2)
    assert [(g.counts.steps, g.counts.skips) for g in guards] == [(4, 0), (4, 1)]
    assert all(
        torch.tensor(values, dtype=torch.uint8).view(torch.float32).isfinite().all() for values in state.values()
    )


def two_engines(watched, bad):
    """A GAN in which each network has an Engine of its own; `bad` is the step whose real data has a NaN."""
    gan = Gan()
    watches = [halfstep.Watch(every=1) if watched else None for _ in PARTS]
    engines = [
        Engine(getattr(gan, part), optimizer, "fp16", watch=watch, scaler=LossScaler(init_scale=2.0**6))
        for part, optimizer, watch in zip(PARTS, optimizers_of(gan), watches, strict=True)
    ]
    skipped = []
    for step in range(1, 5):
        for engine, compute in zip(engines, gan.losses(step, bad_real=step == bad), strict=True):
            with engine.forward():
                loss = compute()
            engine.backward(loss)
            skipped.append(engine.step(replay=compute).skipped)
            gan.discriminator.zero_grad()  # of the generator's backward
    for engine in engines:
        engine.close()
    return bits(gan.state_dict()), skipped, watches


def test_an_autopsy_of_one_engine_leaves_the_other_alone():
    """It names the discriminator's data, and both networks train as without it."""
    state, skipped, watches = two_engines(watched=True, bad=2)
    plain, expected, _ = two_engines(watched=False, bad=2)
    assert state == plain
    assert skipped == expected
    assert skipped.count(True) == 1
    discriminator, generator = watches
    assert [(a.step, a.cause, a.module) for a in discriminator.autopsies] == [(2, "data", "0")]
    assert not generator.autopsies
    assert not generator.events


def two_optimizers(watch):
    """One Engine that steps two optimizers of different kinds; the third of four batches has a NaN."""
    model = net()
    optimizers = [torch.optim.AdamW(model[0].parameters(), lr=1e-2), torch.optim.SGD(model[3].parameters(), lr=0.1)]
    engine = Engine(model, optimizers, "fp32", watch=watch)
    for step in range(1, 5):
        x, y = data(step, bad=step == 3)

        def compute(x=x, y=y):
            return F.cross_entropy(model(x), y)

        with engine.forward():
            loss = compute()
        engine.backward(loss)
        engine.step(replay=compute)
    engine.close()
    return bits(model.state_dict())


def test_an_engine_with_two_optimizers_has_one_sample_for_both():
    """Every parameter is in it, with the update that its own optimizer made."""
    watch = halfstep.Watch(every=1)
    assert two_optimizers(watch) == two_optimizers(None)
    assert [(a.step, a.cause) for a in watch.autopsies] == [(3, "data")]
    for sample in watch.samples:
        assert sample.gradients.keys() == sample.updates.keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}
        assert all((update.ratio > 0) == (sample.step != 3) for update in sample.updates.values())


# --- outcomes that are read at odd moments --------------------------------------------------------------------------------


def deliver_late(engine):
    """Outcomes arrive with the next step or when they are read, as on a GPU."""
    drain, close, closing = engine._delivery.drain, engine._close_window, []

    def late_drain():
        if not closing:
            drain()

    def late_close(lr):
        closing.append(1)
        try:
            return close(lr)
        finally:
            closing.pop()

    vars(engine._delivery)["drain"] = late_drain
    vars(engine)["_close_window"] = late_close


def read_somewhere(watch, where, bad=2, steps=4):
    """A run whose outcome is read at one place of the next step."""
    model = net()
    engine = Engine(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), "fp16", watch=watch, scaler=LossScaler(init_scale=2.0**8)
    )
    deliver_late(engine)
    result, outcomes = None, []

    def read(place):
        if place == where and result is not None:
            outcomes.append(result.skipped)

    for step in range(1, steps + 1):
        x, y = data(step, bad=step == bad)

        def compute(x=x, y=y):
            return F.cross_entropy(model(x), y)

        read("before forward")
        with engine.forward():
            read("in forward")
            loss = compute()
        read("before backward")
        engine.backward(loss)
        read("before step")
        result = engine.step(replay=compute)
    engine.close()
    return bits(model.state_dict()) | {"rng": torch.get_rng_state().tolist()}, outcomes


@pytest.mark.parametrize("where", ["before forward", "before backward", "before step", "nowhere"])
def test_an_outcome_that_is_read_late_is_examined(where):
    """Between any two calls of the next step: the cause is named and the run is that of nobody reading."""
    watch = halfstep.Watch(every=1, activations=True)
    state, outcomes = read_somewhere(watch, where)
    assert [(a.step, a.cause, a.module) for a in watch.autopsies] == [(2, "data", "0")]
    assert [e.kind for e in watch.events][:2] == ["skip", "autopsy"]
    assert state == read_somewhere(None, "nowhere")[0]
    if where != "nowhere":
        assert outcomes == [False, True, False]
    assert {s.activations["3"].numel for s in watch.samples} == {18}


def test_an_outcome_that_is_read_inside_a_forward_is_not_replayed():
    """A replay would run inside the user's forward; the report has the reason, and the run is undisturbed."""
    watch = halfstep.Watch(every=1, activations=True)
    state, outcomes = read_somewhere(watch, "in forward")
    assert outcomes == [False, True, False]
    (autopsy,) = watch.autopsies
    assert autopsy.cause == "not replayed"
    assert "read inside engine.forward()" in autopsy.sentence
    assert not autopsy.advice  # the loop passes a function already
    assert state == read_somewhere(None, "nowhere")[0]
    assert {s.activations["3"].numel for s in watch.samples} == {18}


@pytest.mark.parametrize("reads", [False, True], ids=["", "read"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_the_counts_of_a_guard_can_be_read_inside_a_forward(fused, reads):
    """They are up to date there, and reading them changes nothing."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    guard, counts = halfstep.Guard(optimizer), []
    if reads:
        model[0].register_forward_pre_hook(lambda *_: counts.append(guard.counts.skips))
    for step in range(4):
        x, y = data(step, bad=step == 1)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert counts == ([0, 0, 1, 1] if reads else [])
    assert (guard.counts.steps, guard.counts.skips) == (4, 1)
    torch.manual_seed(0)
    expected = net()
    plain = torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=fused)
    for step in range(4):
        x, y = data(step, bad=step == 1)
        plain.zero_grad()
        F.cross_entropy(expected(x), y).backward()
        if step != 1:
            plain.step()
    assert bits(model.state_dict()) == bits(expected.state_dict())
