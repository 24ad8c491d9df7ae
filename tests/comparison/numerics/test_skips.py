"""What a comparison reports about skipped steps."""

import dataclasses
import math

import pytest

from comparison_cases import write_case
from halfstep.comparison.measurements import GradientDifference, SkipCause
from halfstep.comparison.numerics.skips import root_cause, skip_notes
from halfstep.comparison.record import read_run, run_files

OVERFLOW = GradientDifference(math.nan, math.nan, 0)
FORWARD = SkipCause(1, "forward", "head", "linear in module head overflowed in the forward pass.", 65536.0)
DATA = SkipCause(1, "data", "0", "a tensor entered module 0 with nan in it.", 65536.0)
WEIGHTS = SkipCause(1, "weights", "0", "0.weight contains nan.", 65536.0)
SCALE = SkipCause(1, "backward", "2", "addmm gave inf at the loss scale 65536.", 65536.0, scale_too_high=True)
GRADIENT = SkipCause(1, "backward", "2", "sqrt gave inf: the scale 65536 is not to blame.", 65536.0)


@pytest.fixture
def healthy(tmp_path):
    (path, *_) = (p for p in run_files(write_case(tmp_path / "c", repeats=1)) if p.name.startswith("fp16"))
    return read_run(path)


def case(run, causes=(), *, skipped=(), nonfinite=(), gradients=None):
    """A run with these causes, steps skipped and losses not finite, counted from 1."""
    measured = dataclasses.replace(run.measured, skip_causes=tuple(causes) or None, gradients=gradients)
    steps = range(1, len(run.loss) + 1)
    loss = tuple(math.nan if i in nonfinite else value for i, value in zip(steps, run.loss, strict=True))
    return dataclasses.replace(run, measured=measured, loss=loss, skipped=tuple(i in skipped for i in steps))


def test_a_healthy_run_has_no_note(healthy):
    """Steps that a dynamic loss scale skips with a finite loss are normal."""
    assert skip_notes([case(healthy, skipped={3, 9})]) == ()


@pytest.mark.parametrize("cause", [FORWARD, DATA, WEIGHTS, GRADIENT], ids=lambda c: c.cause)
def test_the_scale_is_not_blamed_for_another_cause(healthy, cause):
    """The note has the sentence of the cause, and not that the scale is too high."""
    run = case(healthy, [cause], skipped={1}, nonfinite={1}, gradients=OVERFLOW)
    (note,) = skip_notes([run])
    assert cause.sentence.rstrip(".") in note
    assert note.startswith("step 1 was skipped: ")
    assert "no cosine" in note
    assert "initial loss scale" not in note
    assert root_cause(run) == cause.sentence.rstrip(".")


def test_the_scale_is_blamed_where_it_was_tried_without_it(healthy):
    """The gradients are finite without loss scaling, so the initial scale is too high; the run has no root cause."""
    run = case(healthy, [SCALE], skipped={1}, gradients=OVERFLOW)
    (note,) = skip_notes([run])
    assert note.startswith("the gradients of the first step overflowed at the initial loss scale 65536: ")
    assert root_cause(run) == ""


def test_without_evidence_only_the_observation_is_reported(healthy):
    """A finite loss leaves the cause open, another rules the scale out; neither note names a cause."""
    (finite,) = skip_notes([case(healthy, skipped={1}, gradients=OVERFLOW)])
    assert finite.endswith("they are not finite, although its loss is; the cause is not known")
    notes = skip_notes([case(healthy, skipped={1}, nonfinite={1}, gradients=OVERFLOW)])
    assert "its loss is not finite, so the loss scale is not the cause" in notes[0]
    assert len(notes) == 2  # the second one counts the step


def test_skipped_steps_that_were_not_examined_are_counted(healthy):
    """Those with a loss that is not finite, over all runs; examined ones are not counted again."""
    runs = [
        case(healthy, [FORWARD], skipped={1, 5, 9}, nonfinite={1, 5}),
        case(healthy, skipped={7}, nonfinite={7}),
    ]
    notes = skip_notes(runs)
    assert len(notes) == 2
    assert notes[1].startswith("2 further steps were skipped with a loss that is not finite")


def test_each_cause_is_reported_once(healthy):
    """The same module again is no news; another one is, and so is a step after training."""
    again = [dataclasses.replace(FORWARD, step=step) for step in (2, 3)]
    later = SkipCause(41, "data", "stem", "a tensor entered module stem with inf in it.", 1.0)
    other_seed = case(healthy, [dataclasses.replace(FORWARD, sentence="the same in other words.")], skipped={1})
    notes = skip_notes([case(healthy, [FORWARD, *again, later], skipped={1, 2, 3}), other_seed])
    assert [note.partition(":")[0] for note in notes] == [
        "step 1 was skipped",
        "step 41 (after training) was skipped",
    ]
