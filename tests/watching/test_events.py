"""Events: each only where the evidence supports it."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import halfstep
from engine_models import batches, build, train_step
from halfstep.engine.steps import Decision
from halfstep.kernels.exponents import count_exponents
from halfstep.watching.events import DriftRule, Event, LostUpdateRule, OutcomeRule
from halfstep.watching.losses import LossRule
from halfstep.watching.sample import Header, Sample, by_module
from halfstep.watching.updates import UpdateStats

EMPTY = Header().rows(np.zeros((0, 261), dtype=np.int64))


def rows(**tensors):
    """Rows of tensors, as they arrive from a device."""
    dtypes = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
    header = Header(
        tuple(tensors), tuple(t.numel() for t in tensors.values()), tuple(dtypes[t.dtype] for t in tensors.values())
    )
    return header.rows(count_exponents(list(tensors.values())).table.numpy())


def sample(step, *, updates=None, skipped=False, gradients=EMPTY, weights=EMPTY, activations=EMPTY, idle=()):
    """A sample with some of its parts."""
    return Sample(step, skipped, 1.0, gradients, weights, activations, updates or {}, frozenset(idle))


def update(stuck, since=0, *, master=False, moving=1000, dtype="bf16"):
    """The update of a tensor called w."""
    return {"w": UpdateStats("w", dtype, master, 0.0, moving, stuck, stuck, since)}


# --- lost updates -------------------------------------------------------------------------------------------------------


def run_lost(*samples):
    """The events of samples one after the other."""
    rule = LostUpdateRule()
    return [event for each in samples for event in rule.observe(each)]


def test_two_intervals_without_movement_are_reported_once():
    """The second complete interval reports the tensor, and no later one does."""
    events = run_lost(*(sample(8 * i, updates=update(0.9, 8 * (i - 1))) for i in range(1, 6)))
    (event,) = events
    assert event.step == 16
    assert event.data["parameters"] == {"w": 0.9}
    assert "0.002 of its weight" in event.advice


@pytest.mark.parametrize(
    "second",
    [
        sample(16, updates=update(0.5, 8)),  # not more than half
        sample(16, updates=update(0.9, 8, master=True)),
        sample(16, updates=update(0.9, 8, moving=15)),  # too few elements
        sample(16, updates=update(0.9, 8), idle=["w"]),  # a learning rate of 0
        sample(16, updates=update(0.9, 8), skipped=True),
        sample(16, updates=update(0.9, 8), gradients=rows(w=torch.tensor([math.nan]))),
        sample(12, updates=update(0.9, 8)),  # the interval is too short
    ],
)
def test_weaker_evidence_is_not_reported(second):
    """Each condition alone prevents the report."""
    assert not run_lost(sample(8, updates=update(0.9)), second)


@given(st.lists(st.floats(0, 1), max_size=12))
def test_a_report_needs_two_intervals_in_a_row(shares):
    """For any sequence of shares: an event if and only if two neighbours are above one half."""
    events = run_lost(*(sample(8 * i + 8, updates=update(s, 8 * i)) for i, s in enumerate(shares)))
    expected = any(a > 0.5 and b > 0.5 for a, b in pairwise(shares))
    assert bool(events) == expected


# --- drift --------------------------------------------------------------------------------------------------------------


def drift(values, dtype=torch.float16, kind="activations"):
    """The events of a tensor whose largest value takes these values."""
    rule = DriftRule()
    return [
        e
        for i, v in enumerate(values)
        for e in rule.observe(sample(i, **{kind: rows(x=torch.tensor([v], dtype=dtype))}))
    ]


@pytest.mark.parametrize("kind", ["activations", "weights"])
def test_growth_towards_the_end_of_fp16_is_reported_once(kind):
    """Three samples of growth by more than 4, the last within a factor of 4 of 65504."""
    (event,) = drift([2000.0, 8000.0, 16000.0, 30000.0, 40000.0], kind=kind)
    assert event.step == 3
    assert list(event.data["largest"].values()) == [30000.0]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([2000.0, 8000.0, 16000.0, 30000.0], torch.bfloat16),  # no limit near
        ([2000.0, 8000.0, 16000.0, 30000.0], torch.float32),
        ([30000.0] * 8, torch.float16),  # large and constant
        ([1.0, 10.0, 100.0, 1000.0], torch.float16),  # far from the end
        ([20000.0, 21000.0, 22000.0, 23000.0], torch.float16),  # slow
        ([2000.0, 30000.0, 2000.0, 30000.0, 2000.0, 30000.0], torch.float16),  # no trend
    ],
)
def test_no_trend_is_no_drift(values, dtype):
    """Growth, nearness and fp16 are all needed."""
    assert not drift(values, dtype)


# --- outcomes -----------------------------------------------------------------------------------------------------------


def test_parameters_of_every_skip_before_a_backoff_are_responsible():
    """With hysteresis several skips lead to one backoff; a clean step in between clears the list."""
    rule = OutcomeRule()
    steps = [(True, 8.0, {"a": 1}), (False, 8.0, {}), (True, 8.0, {"b": 2}), (True, 8.0, {"c": None}), (False, 4.0, {})]
    events = [
        e for i, (s, scale, bad) in enumerate(steps) for e in rule.observe(i, skipped=s, scale=scale, nonfinite=bad)
    ]
    assert [(e.kind, e.step) for e in events] == [("skip", 0), ("skip", 2), ("skip", 3), ("scale", 4)]
    assert events[-1].data == {"before": 8.0, "after": 4.0, "parameters": {"b": 2, "c": None}}
    assert [e.data["consecutive"] for e in events[:3]] == [1, 1, 2]


def test_a_skip_without_a_loss_scale_does_not_advise_about_it():
    """The advice depends on whether there is a scale that will be lowered."""
    (plain,) = OutcomeRule().observe(1, skipped=True, scale=1.0, nonfinite={})
    (scaled,) = OutcomeRule().observe(1, skipped=True, scale=8.0, nonfinite={})
    assert "no loss scale" in plain.advice
    assert not scaled.advice


def test_sums_of_squares_name_the_parameters_without_reading_gradients():
    """On a GPU the sums of a skipped step are what is left of its gradients."""
    watch = halfstep.Watch()
    model, _, engine = build("fp32", watch=watch, schedule=False)
    decided = watch.decided

    def with_sums(gradients, decision):
        sums = torch.stack([g.square().sum() for g in gradients.values()])
        decided(gradients, Decision(decision.found_inf, decision.norm, decision.divisor, sums))

    watch.decided = with_sums
    engine.params["head.bias"].register_hook(lambda g: g * math.nan)
    for batch in batches(2):
        train_step(model, engine, batch)
    engine.close()
    assert [e.data["parameters"] for e in watch.events] == [{"head.bias": None}] * 2


# --- the value ----------------------------------------------------------------------------------------------------------


def test_an_event_is_plain_data_and_a_sentence():
    """It can be written to a run file, and prints what happened and what to do."""
    (event,) = LossRule().observe(1, math.nan)
    assert json.loads(json.dumps(event.as_dict()))["kind"] == "nan-loss"
    assert str(event).startswith("step 1: the loss is nan. The forward pass overflowed")
    assert str(Event("scale", 3, "m.")) == "step 3: m."


def test_parameters_add_up_by_module():
    """The statistics of a module are those of its own parameters."""
    table = rows(
        **{"a.weight": torch.tensor([1.0, 2.0]), "a.bias": torch.tensor([0.0, math.nan]), "b.weight": torch.ones(3)}
    )
    merged = by_module(table.by_name())
    assert merged.keys() == {"a", "b"}
    assert (merged["a"].numel, merged["a"].nan, merged["a"].zeros, merged["a"].largest) == (4, 1, 1, 2.0)
