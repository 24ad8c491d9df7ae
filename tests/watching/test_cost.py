"""The cost of a watch: measured times of samples and steps, exact on a clock that the test turns, and no waiting on a GPU."""

import pytest
import torch
from torch import nn

import halfstep
from engine_models import batches, build, train_step
from gpu_sync import no_synchronisation
from halfstep.watching.cost import StepClock, WatchCost, cost_of


class Clock:
    """A clock that advances when it is told to."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock of the watch; counting exponents takes 2 seconds, whatever is counted."""
    from halfstep.kernels import exponents

    turned = Clock()
    monkeypatch.setattr("halfstep.watching.cost.time", turned)

    def slow(*args, **kwargs):
        turned.now += 2.0
        return exponents.count_exponents(*args, **kwargs)

    for module in ("sampler", "activations"):
        monkeypatch.setattr(f"halfstep.watching.{module}.count_exponents", slow)
    return turned


def loop(clock, watch, model, optimizer, steps, scaler=None):
    """Steps whose forward and backward take 10 seconds; the first one 1000."""
    watch.attach(optimizer, scaler)
    for step in range(steps):
        clock.now += 1000 if step == 0 else 10
        loss = model(torch.ones(2, 4)).sum()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    watch.close()
    clock.now += 500  # the report is printed later
    return watch.cost


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
def test_the_share_of_an_attached_watch_is_that_of_its_steps(clock, scaled):
    """Gradients and weights take 2 seconds each at steps 1, 2, 4, 8: 12 of the 7 * 10 + 12 seconds after the first step."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    cost = loop(clock, halfstep.Watch(model), model, optimizer, 8, scaler)
    assert cost.samples == 4
    assert cost.seconds_per_sample == pytest.approx(4.0)
    assert cost.seconds_per_step == pytest.approx(82 / 7)
    assert cost.share == pytest.approx(12 / 82)
    assert (
        str(cost)
        == "4 samples of 4000.00 ms, 15 % of the time: 11714.29 ms per step with all that ran between the steps"
    )


def test_activations_are_part_of_the_cost(clock):
    """They are counted before the sample begins, and cost as much."""
    model = nn.Linear(4, 3)
    watch = halfstep.Watch(model, activations=True)
    cost = loop(clock, watch, model, torch.optim.SGD(model.parameters(), lr=0.1), 4)
    assert cost.seconds_per_sample == pytest.approx(6.0)


@pytest.mark.parametrize("release", [False, True], ids=["", "release"])
def test_an_engine_has_the_same_cost(clock, release):
    """Two steps of 10 seconds after the first; with gradient release each of the 8 gradients is counted alone."""
    watch = halfstep.Watch(every=1)
    model, _, engine = build("bf16-lean", watch=watch, gradient_release=release, schedule=False)
    for batch in batches(3):
        clock.now += 10
        train_step(model, engine, batch)
    per_sample = 18.0 if release else 4.0
    assert watch.cost.seconds_per_sample == pytest.approx(per_sample)
    # With gradient release the weights of the step after the last are counted already.
    assert watch.cost.share == pytest.approx(2 * per_sample / (2 * (10 + per_sample)))
    engine.close()


def test_two_optimizers_share_the_time_of_a_step(clock):
    """Both streams' samples count, the time once."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    watch = halfstep.Watch(model, every=1).attach([first, second])
    for _ in range(5):
        clock.now += 10
        model(torch.ones(2, 4)).sum().backward()
        first.step()
        second.step()
    watch.close()
    assert watch.cost.share == pytest.approx(8 / 18)


def test_without_two_steps_no_share_is_claimed():
    """Nothing, or one step, is no time to compare with."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = halfstep.Watch(model).attach(optimizer)
    assert watch.cost == WatchCost(0, 0.0)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert watch.cost.samples == 1
    assert watch.cost.share is None
    assert "known after two steps" in str(watch.cost)
    watch.close()


def test_a_share_is_never_above_one():
    """Rounding of two clocks must not show more than everything."""
    clock = StepClock(torch.device("cpu"))
    clock.mark()
    clock.mark()
    cost = cost_of([[0.0, 1e9]], [clock])
    assert cost.share == 1.0
    assert "100 %" in str(cost)


def test_a_long_run_on_a_gpu_records_few_events_and_counts_every_step(monkeypatch):
    """Of 464 steps the first 64 are timed, then every eighth; the time of a step is the same."""
    now, events = 0, []

    class Passed:
        """An event of a device that takes 3 ms for a step, and is never late."""

        def __init__(self, **_):
            events.append(self)

        def record(self):
            self.milliseconds = 3.0 * now

        def query(self):
            return True

        def elapsed_time(self, later):
            return later.milliseconds - self.milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Passed)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    clock = StepClock(torch.device("cuda"))
    for now in range(464):  # noqa: B007 - the events read it
        clock.mark()
    assert len(events) == 64 + 400 // 8
    seconds, steps = clock.elapsed()
    assert seconds / steps == pytest.approx(3e-3)
    assert steps == 463


@pytest.mark.gpu
def test_steps_are_timed_on_the_gpu_without_waiting():
    """Steps that sleep on the device for a known number of cycles have a time of at least that, and none waits."""
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    watch = halfstep.Watch(model, every=4).attach(optimizer)
    x = torch.randn(8, 64, device="cuda")
    for step in range(12):
        optimizer.zero_grad()
        model(x).sum().backward()
        if step < 4:
            optimizer.step()
            continue
        torch.cuda._sleep(20_000_000)  # about 10 ms
        with no_synchronisation():
            optimizer.step()
            watch.cost  # noqa: B018 - reading it must not wait either
    torch.cuda.synchronize()
    cost = watch.cost
    assert cost.seconds_per_step > 2e-3
    assert 0 < cost.share < 0.5
    watch.close()
