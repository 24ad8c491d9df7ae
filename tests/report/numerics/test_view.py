"""A run file as values: points, events, the last sample, and what a format would make of its exponents."""

import json

import pytest

from halfstep.checkpoint.runlog import RunLog, read_runlog
from halfstep.report.numerics.view import view_of, worst


def stats(bins, *, numel=100, **counts):
    return {
        "numel": numel,
        "nan": 0,
        "inf": 0,
        "zeros": 0,
        "largest": 1.0,
        "smallest": 1e-3,
        "exponents": bins,
    } | counts


@pytest.fixture
def log(tmp_path):
    with RunLog.create(
        tmp_path / "run.jsonl",
        command=["halfstep", "train"],
        policy="fp16",
        truth={},
        environment={},
        config={"steps": 9},
    ) as log:
        yield log


def step(log, number, **values):
    log.step(micro_batch=number, attempted=number, applied=number, loss=1.0 / number, scale=2.0**16, **values)


def test_steps_and_skips_are_counted(log):
    """Each step line is a point, and its loss and scale are numbers even where they are not finite."""
    step(log, 1)
    log.step(micro_batch=2, attempted=2, applied=1, loss=float("nan"), scale=2.0**15, skipped=True)
    view = view_of(read_runlog(log.path))
    assert [(p.step, p.scale, p.skipped) for p in view.points] == [(1, 65536.0, False), (2, 32768.0, True)]
    assert view.points[1].loss != view.points[1].loss
    assert (view.skips, view.total_steps, view.command) == (1, 9, "halfstep train")


def test_the_last_sample_is_shown_in_the_format_of_the_run(log):
    """fp16 makes zero of what is below 2^-25 and has fewer bits below 2^-14; zeros do not count as flushed."""
    step(log, 1)
    log.event("numerics", step=1, gradients={"old": stats({"0": 1})})
    bins = {"-30": 10, "-26": 10, "-25": 10, "-15": 10, "-14": 20, "3": 20}
    log.event("numerics", step=1, gradients={"w": stats(bins, zeros=20, nan=1, inf=2)}, weights={"w": stats({"0": 5})})
    rows = {(row.name, row.kind): row for row in view_of(read_runlog(log.path)).rows}
    assert rows.keys() == {("w", "gradient"), ("w", "weight")}
    gradient = rows["w", "gradient"]
    assert gradient.flushed == pytest.approx(20 / 80)
    assert gradient.subnormal == pytest.approx(20 / 80)
    assert (gradient.zeros, gradient.nonfinite) == (0.2, 3)


def test_updates_belong_to_weights(log):
    """The ratio and the lost share are shown with the weight, not with its gradient."""
    step(log, 1)
    sample = {"gradients": {"w": stats({"0": 1})}, "weights": {"w": stats({"0": 1})}}
    log.event("numerics", step=1, **sample, updates={"w": {"ratio": 1e-3, "lost": 0.5}})
    rows = view_of(read_runlog(log.path)).rows
    assert [(row.kind, row.lost) for row in rows] == [("gradient", None), ("weight", 0.5)]


def test_the_worst_tensor_comes_first(log):
    """Elements that are not finite outrank lost updates, and those outrank underflow."""
    step(log, 1)
    weights = {
        "fine": stats({"0": 10}),
        "lost": stats({"0": 10}),
        "nan": stats({"0": 10}, nan=1),
        "small": stats({"-40": 10}),
    }
    log.event("numerics", step=1, weights=weights, updates={"lost": {"ratio": 0.0, "lost": 0.9}})
    rows = view_of(read_runlog(log.path)).rows
    assert [row.name for row in worst(rows, 3)] == ["nan", "lost", "small"]


def test_reports_of_problems_are_events_and_routine_is_not(log):
    """Saves and truth tables stay out; an event without a text shows its fields."""
    step(log, 1)
    log.event("saved", path="step-1")
    log.event("skip", step=1, text="it overflowed", advice="lower the scale")
    log.event("nonfinite", parameters=["w"])
    events = view_of(read_runlog(log.path)).events
    assert [(e.step, e.kind, e.text, e.advice) for e in events] == [
        (1, "skip", "it overflowed", "lower the scale"),
        (1, "nonfinite", "parameters=['w']", ""),
    ]


def test_a_run_has_ended_until_it_is_resumed(log):
    """The last record of an end counts, unless the run was resumed after it."""
    step(log, 1)
    assert not view_of(read_runlog(log.path)).ended
    log.event("ended")
    assert view_of(read_runlog(log.path)).ended
    with log.path.open("a") as file:
        file.write(json.dumps({"kind": "resume", "time": 4e9, "attempted": 1, "applied": 1}) + "\n")
    assert not view_of(read_runlog(log.path)).ended


def test_a_policy_of_a_later_version_is_shown_as_it_is(tmp_path):
    """An unknown policy does not stop the view; its format counts as fp32."""
    path = tmp_path / "run.jsonl"
    RunLog.create(path, command="x", policy="fp6-magic", truth={}, environment={}).close()
    view = view_of(read_runlog(path))
    assert (view.policy, view.format, view.points) == ("fp6-magic", "fp32", ())


def test_a_run_that_has_not_ended_shows_when_it_was_last_heard_of(log):
    """A run that was killed leaves no end, only an old last record."""
    step(log, 1)
    view = view_of(read_runlog(log.path))
    assert view.state(view.last_time + 5) == "last record 5 s ago"
    assert view.state(view.last_time + 3600) == "last record 60 min ago: stopped?"
    log.event("ended")
    assert view_of(read_runlog(log.path)).state(0.0) == "ended"
