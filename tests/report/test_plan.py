"""A plan as text and as data."""

import json

import pytest

from halfstep.planning import MeasuredStep, plan
from halfstep.planning.finder import FoundBatch
from halfstep.report.plan import as_data, as_text, found_text, grouped, table, verified_data, verified_text
from halfstep.report.plan_page import render_plan_page
from planning_jobs import small_job


@pytest.fixture(scope="module")
def found():
    """A plan in two precisions."""
    return plan(small_job(), 64, precision=("fp32", "bf16"), memory="2GiB", name="small")


def test_text_has_every_precision_and_strategy(found):
    """The text names precisions, strategies, causes and the notes."""
    text = as_text(found)
    for word in ("fp32", "bf16", "ddp", "zero3", "sum = peak", "CUDA context", "hold the same"):
        assert word in text


def test_data_survives_json(found):
    """The data is plain values."""
    assert json.loads(json.dumps(as_data(found))) == as_data(found)


def test_modules_that_differ_in_numbers_are_one_row():
    """Layers of a stack are shown together, largest first."""
    rows = grouped({"blocks.0.mlp": 3, "blocks.11.mlp": 4, "head2": 5, "": 1})
    assert rows == [("blocks.*.mlp", 2, 7), ("head2", 1, 5), ("(outside any module)", 1, 1)]


def test_table_is_aligned():
    """The first column is to the left, the others to the right."""
    assert table(["a", "b"], [["long", "1"]]).splitlines() == ["  a     b", "  -------", "  long  1"]


def test_measured_stands_beside_predicted(found):
    """Predicted, measured and the error are in text and data."""
    entry = found.entries[0]
    seen = MeasuredStep(64, round(entry.peak_bytes / 1.02), 0, "a GPU")
    assert "+2.0%" in verified_text([(entry, seen)])
    assert verified_data([(entry, seen)])[0]["error"] == pytest.approx(0.02, abs=1e-6)


def test_trials_are_shown(found):
    """A confirmed batch lists its trials."""
    text = found_text(FoundBatch(8, "bf16", found.entries[1].estimate, confirmed=True, trials=((8, True), (9, False))))
    assert "8 fits, 9 does not" in text


def test_end_of_the_search_is_no_largest_batch():
    """Where even the last size that is tried fits, the text says so instead of calling it the largest."""
    roomy = plan(small_job(), 64, precision=("fp32",), memory="400GiB")
    largest = roomy.entries[0].largest
    assert f"{largest.batch} or more x 1" in as_text(roomy)
    assert f"{largest.batch} or more" in render_plan_page(roomy)
    assert "or more, where the search ends" in found_text(FoundBatch(largest.batch, "fp32", largest, confirmed=False))
    assert "or more" not in as_text(plan(small_job(), 64, precision=("fp32",), memory="1GiB"))
