"""Losses: spikes and NaN are reported with their batch, healthy runs are silent, and a resumed rule continues."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.watching.losses import LossRule


def events(values, fingerprint=None, samples=None, rule=None, start=0):
    """The events of a sequence of losses."""
    rule = rule or LossRule()
    sizes = samples or [None] * len(values)
    return [
        e
        for i, (v, n) in enumerate(zip(values, sizes, strict=True), start)
        for e in rule.observe(i, v, fingerprint and (lambda i=i: fingerprint(i)), n)
    ]


def noisy(count, seed=0, level=2.0, noise=0.1):
    """Losses around a level."""
    rng = random.Random(seed)
    return [level + rng.gauss(0, noise) for _ in range(count)]


# --- spikes -------------------------------------------------------------------------------------------------------------


def test_a_spike_is_reported_once_with_its_batch():
    """With the step at which it began, its peak, how long it lasted, and the batch, which is identified then and only then."""
    calls = []

    def fingerprint(step):
        calls.append(step)
        return f"batch {step}"

    (event,) = events([*noisy(60), 9.0, 9.5, *noisy(20, 1)], fingerprint)
    assert (event.kind, event.step, event.data["batch"]) == ("loss-spike", 60, "batch 60")
    assert (event.data["loss"], event.data["peak"], event.data["steps"]) == (9.0, 9.5, 2)
    assert event.data["median"] == pytest.approx(2.0, abs=0.1)
    assert "came down after 2 steps" in event.message
    assert "batch 60" in event.message
    assert calls == [60]


def test_the_identity_of_a_batch_may_be_an_object():
    """Its text is in the message, its plain values in the data."""

    class Identity:
        def as_data(self):
            return [{"epoch": 3}]

        def __str__(self):
            return "batch 1 of epoch 3"

    (event,) = events([*noisy(60), 9.0, 2.0], lambda step: Identity())
    assert event.data["batch"] == [{"epoch": 3}]
    assert "(batch 1 of epoch 3)" in event.message
    json.dumps(event.as_dict())


@pytest.mark.parametrize("num_up", [1, 2, 16])
def test_a_rise_that_ends_within_sixteen_losses_is_a_spike(num_up):
    """Its event comes with the first loss that is back."""
    (event,) = events([*noisy(60), *[9.0] * num_up, 2.0])
    assert event.data["steps"] == num_up


def test_a_spike_that_ends_in_nan_is_reported_before_it():
    """The batch that began it is the first one to look at."""
    assert [(e.kind, e.step) for e in events([*noisy(60), 9.0, math.nan])] == [("loss-spike", 60), ("nan-loss", 61)]


def test_two_spikes_of_the_same_size_within_the_window_are_one_report():
    """What the last 128 losses contain is not news; a larger one is."""
    values = [*noisy(60), 9.0, *noisy(20, 1), 9.0, *noisy(20, 2), 40.0, *noisy(20, 3)]
    assert [e.step for e in events(values)] == [60, 102]


def test_a_loss_that_stays_far_above_its_start_is_a_divergence():
    """More than twice the highest of the first losses, for longer than a spike; the advice is to go back."""
    (event,) = events([*noisy(20, level=3.0), *noisy(60, level=1.0), *noisy(40, level=30.0)])
    assert event.step == 80
    assert "The run diverges" in event.advice
    assert "stays above" in event.message


def test_a_nan_loss_is_reported_once_per_episode():
    """NaN, again after a finite loss, with the value and the batch; infinities count too."""
    found = events([1.0, math.nan, math.nan, 1.0, math.inf], str)
    assert [(e.kind, e.step, e.data["loss"], e.data["batch"]) for e in found] == [
        ("nan-loss", 1, "nan", "1"),
        ("nan-loss", 4, "inf", "4"),
    ]


# --- healthy runs -------------------------------------------------------------------------------------------------------


def warmup(rng, n):
    """A learning rate that warms up: flat, then falling."""
    return [4.6 + rng.gauss(0, 0.05) if i < 50 else 1.0 + 3.6 * math.exp(-(i - 50) / 80) for i in range(n)]


def plain(rng, n):
    """A falling loss with noise."""
    return [0.5 + 2 * math.exp(-i / 100) + rng.gauss(0, 0.1) for i in range(n)]


def curriculum(rng, n):
    """The task becomes harder twice: the loss steps up and falls again, slowly."""
    stage = [0, 150, 280]
    return [
        0.3 + 1.5 * math.exp(-(i - max(s for s in stage if s <= i)) / 60) * (1 + 0.03 * rng.gauss(0, 1))
        for i in range(n)
    ]


def restarts(rng, n):
    """A cosine schedule that restarts every 100 steps: the loss rises over some steps, and falls with the learning rate."""
    values, level = [], 2.5
    for i in range(n):
        lr = 0.5 * (1 + math.cos(math.pi * (i % 100) / 100))
        level += 0.15 * (0.3 + 0.9 * lr - level)
        values.append(level * math.exp(rng.gauss(0, 0.03)))
    return values


def heavy(rng, n):
    """Losses of single examples: an exponential distribution."""
    return [rng.expovariate(1.0) for _ in range(n)]


def mixture(rng, n):
    """A tenth of the batches are of a harder task."""
    return [(5.0 if rng.random() < 0.1 else 0.5) + rng.gauss(0, 0.03) for _ in range(n)]


def vanishing(rng, n):
    """The training set is memorised."""
    return [2.3 * math.exp(-i / 10) * math.exp(rng.gauss(0, 0.8)) for i in range(n)]


def likelihood(rng, n):
    """A negative log-likelihood that crosses zero."""
    return [3 - i / 60 + rng.gauss(0, 0.1) for i in range(n)]


HEALTHY = (warmup, plain, curriculum, restarts, heavy, mixture, vanishing, likelihood)


@pytest.mark.parametrize("course", HEALTHY, ids=lambda f: f.__name__)
def test_healthy_courses_of_a_loss_are_silent(course):
    """Five runs of 400 steps each."""
    for seed in range(5):
        assert not events(course(random.Random(seed), 400)), seed


@settings(max_examples=30)
@given(st.integers(0, 1000), st.floats(0.01, 0.3), st.floats(0.5, 10))
def test_noise_around_any_level_is_silent(seed, noise, level):
    """200 noisy losses report nothing."""
    assert not events(noisy(200, seed, level, noise * level / 4))


@pytest.mark.parametrize("course", [plain, restarts, curriculum], ids=lambda f: f.__name__)
def test_a_bad_batch_in_a_healthy_run_is_reported(course):
    """The same courses with one loss of ten times the level: silence is not blindness."""
    values = course(random.Random(1), 260)
    values[240] = 10 * values[240]
    assert [(e.kind, e.step) for e in events(values)] == [("loss-spike", 240)]


def test_the_first_losses_are_no_evidence():
    """Without fifty losses nothing is a spike."""
    assert not events([1.0] * 49 + [100.0, 1.0])


def test_short_batches_are_not_judged():
    """The mean of a few examples at the end of an epoch is noisy; NaN in it is NaN all the same."""
    values, sizes = [*noisy(60), 9.0, *noisy(5, 1)], [64] * 66
    assert len(events(values, samples=sizes)) == 1
    sizes[60] = 3
    assert not events(values, samples=sizes)
    values[60] = math.nan
    assert [e.kind for e in events(values, samples=sizes)] == ["nan-loss"]


# --- a resumed run ------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([1.0, 1.1, 0.9, 1.05, 9.0, 40.0, math.nan]), min_size=1, max_size=90),
    st.integers(0, 1000),
)
def test_a_rule_that_is_saved_anywhere_reports_the_same(values, where):
    """Any sequence, saved as JSON and loaded between any two losses, has the events of an uninterrupted one."""
    values = noisy(45, level=1.0, noise=0.02) + values
    at = where % len(values)
    first = LossRule()
    before = events(values[:at], str, rule=first)
    second = LossRule()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    after = events(values[at:], str, rule=second, start=at)
    assert [e.as_dict() for e in before + after] == [e.as_dict() for e in events(values, str)]
