"""Counts and names are recognized in any wording, and not by coincidence."""

import pytest

from halfstep.learning.practice.printed import named_layer, numbers, prints_count


@pytest.mark.parametrize(
    "line",
    [
        "skipped steps: {n}",
        "{n} step{s} skipped of 8",
        "epoch 1: skipped={n}, scale=1024.0",
        "{{'skipped': {n}}}",
        "step 7\rskips {n}.0",
    ],
)
def test_a_count_is_found_in_any_wording(line):
    """The same number of the same line equals the count in every run."""
    runs = [("loss 0.5\n" + line.format(n=n, s="s" * (n != 1)), n) for n in (0, 1, 3)]
    assert prints_count(runs)


def test_a_number_that_does_not_follow_the_count_is_none():
    """A constant, an index, or a count that is off by one is not the count."""
    assert not prints_count([("skipped 0", 0), ("skipped 0", 1), ("skipped 0", 3)])
    assert not prints_count([("step 1\nstep 3", 0), ("step 1\nstep 3", 1), ("step 1\nstep 3", 3)])
    assert not prints_count([("skipped 1", 0), ("skipped 2", 1), ("skipped 4", 3)])
    assert not prints_count([("skipped 0", 0), ("skipped 0", 0)])


def test_a_count_may_be_a_word():
    """The line "one step was skipped" is "3 steps were skipped" with another count."""
    lines = {0: "No step was skipped.", 1: "One step was skipped.", 3: "3 steps were skipped."}
    assert prints_count([(line, count) for count, line in lines.items()])
    assert not prints_count([("one step was skipped", count) for count in (0, 1, 3)])


def test_a_count_may_be_printed_only_if_there_is_one():
    """Without a skipped step the line may be missing."""
    assert prints_count([("done", 0), ("1 skipped", 1), ("3 skipped", 3)])


NAMES = ["body.0", "body.1", "head", "stem"]


@pytest.mark.parametrize(
    ("output", "named"),
    [
        ("unstable layer: body.1", "body.1"),
        ("overflow in body.1.weight", "body.1"),
        ("unstable layer: head", "head"),
        ("nothing", None),
        ("stem 1.0\nbody.0 2.0\nbody.1 inf\nhead nan", "body.1"),
        ("stem 1.0\nbody.0 2.0\nbody.1 3.0\nhead 4.0", None),
        ("stem 1.0\nbody.0 2.0\nbody.1 inf\nhead nan\nso the unstable one is head", "head"),
    ],
)
def test_the_layer_that_is_named(output, named):
    """A verdict counts; in a table, the first row that is not finite."""
    assert named_layer(output, ["body.1"], NAMES) == named


def test_numbers_of_a_text():
    """Numbers inside words are none."""
    assert numbers("fp16: 1.5 s, -2e-3, x2 7") == [1.5, -0.002, 7.0]
