"""Images per second of loader and model."""

import time

import pytest
import torch

from halfstep.jobs.data import feed
from halfstep.jobs.data.feed import MOST, SKIPPED, Decoding, Feed, FeedMeter
from halfstep.train.shares import Share


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class Loader:
    """A loader with two workers that took half a second for each of its batches of ten images."""

    def __init__(self):
        self.decoding = Decoding(2)
        for _ in range(4):
            self.decoding.add(10, 0.5)


def batches(clock, num, seconds):
    """Batches of ten images that arrive after `seconds` each."""
    for number in range(num):
        clock.now += seconds
        yield number, Share(10, 10)


def measure(monkeypatch, num, *, waited, worked, loader=None):
    """A meter that has seen `num` batches, each waited for and worked on for some seconds."""
    clock = Clock()
    monkeypatch.setattr(feed, "time", clock)
    meter = FeedMeter(torch.device("cpu"))
    for _ in meter.watch(loader or Loader(), batches(clock, num, waited)):
        clock.now += worked
    return meter


def test_rates_are_measured_once(monkeypatch):
    """Loader: workers * images / seconds; model: images / time with the batch; returned once, after enough batches."""
    meter = measure(monkeypatch, SKIPPED + MOST, waited=0.1, worked=0.4)
    result = meter.result(wait=False)
    rounded = Feed(
        result.loader, round(result.model, 6), result.num_workers, round(result.waited, 6), result.num_batches
    )
    assert rounded == Feed(40.0, 25.0, 2, 0.2, MOST)
    assert meter.result(wait=True) is None


def test_the_slower_one_limits(monkeypatch):
    """40 images/s of the loader limit a model of 100, and feed one of 25; the sentence and the data name the limit."""
    for worked, limit in ((0.1, "loader"), (0.4, "model")):
        result = measure(monkeypatch, SKIPPED + MOST, waited=0.05, worked=worked).result(wait=False)
        assert result.limit == result.as_data()["limit"] == limit
        assert f"the {limit} limits" in str(result)
        assert "40 images/s with 2 worker(s)" in str(result)


def test_a_loader_that_does_not_measure_is_judged_by_the_waiting(monkeypatch):
    """Without the workers' seconds, more than a tenth of the time spent waiting means that the loader limits."""

    class Unmeasured:
        decoding = None

    for waited, limit in ((0.3, "loader"), (0.001, "model")):
        meter = measure(monkeypatch, SKIPPED + MOST, waited=waited, worked=0.4, loader=Unmeasured())
        result = meter.result(wait=False)
        assert (result.loader, result.limit) == (None, limit)


def test_short_runs_are_measured_at_their_end(monkeypatch):
    """Fewer batches than wanted are reported only at the end, and too few never; other loaders are not measured."""
    meter = measure(monkeypatch, SKIPPED + 4, waited=0.1, worked=0.4)
    assert meter.result(wait=False) is None
    assert meter.result(wait=True).num_batches == 4
    assert measure(monkeypatch, SKIPPED + 1, waited=0.1, worked=0.4).result(wait=True) is None
    assert measure(monkeypatch, 50, waited=0.1, worked=0.4, loader=object()).result(wait=True) is None


@pytest.mark.gpu
def test_the_model_is_measured_in_the_stream_of_a_gpu():
    """The host runs ahead of the device, so the model's time is taken from events: sleeping kernels, not their launches."""
    meter = FeedMeter(torch.device("cuda"))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in meter.watch(Loader(), batches(Clock(), SKIPPED + 4, 0.0)):
        torch.cuda._sleep(20_000_000)
    launched = time.perf_counter() - start
    result = meter.result(wait=True)
    total = time.perf_counter() - start
    assert launched < total / 2
    assert 40 / result.model == pytest.approx(total * 4 / (SKIPPED + 4), rel=0.3)
