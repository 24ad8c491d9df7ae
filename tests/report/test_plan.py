"""A plan as text and as data."""

import json

import pytest

from halfstep.planning import MeasuredStep, plan
from halfstep.planning.finder import FoundBatch
from halfstep.report.plan import as_data, as_text, batch_text, grouped, table, verified_data, verified_text
from halfstep.report.plan_page import render_plan_page
from planning_jobs import small_job


@pytest.fixture(scope="module")
def small_plan():
    """A plan in two precisions."""
    return plan(small_job(), 64, precision=("fp32", "bf16"), memory="2GiB", name="small")


def test_text_has_every_precision_and_strategy(small_plan):
    """The text names precisions, strategies, categories and the notes."""
    text = as_text(small_plan)
    for word in ("fp32", "bf16", "ddp", "zero3", "sum = peak", "CUDA context", "Uncertainty"):
        assert word in text


def test_data_survives_json(small_plan):
    """The data is plain values that JSON returns unchanged."""
    assert json.loads(json.dumps(as_data(small_plan))) == as_data(small_plan)


def test_modules_that_differ_in_numbers_are_one_row():
    """Layers of a stack are shown together, largest first."""
    rows = grouped({"blocks.0.mlp": 3, "blocks.11.mlp": 4, "head2": 5, "": 1})
    assert rows == [("blocks.*.mlp", 2, 7), ("head2", 1, 5), ("(outside any module)", 1, 1)]


def test_table_is_aligned():
    """The first column is left-aligned, the others are right-aligned."""
    assert table(["a", "b"], [["long", "1"]]).splitlines() == ["  a     b", "  -------", "  long  1"]


def test_measured_stands_next_to_predicted(small_plan):
    """Predicted, measured and the error are in text and data."""
    entry = small_plan.entries[0]
    measured = MeasuredStep(64, round(entry.peak_bytes / 1.02), 0, "a GPU")
    assert "+2.0%" in verified_text([(entry, measured)])
    assert verified_data([(entry, measured)])[0]["error"] == pytest.approx(0.02, abs=1e-6)


def test_trials_are_shown(small_plan):
    """A confirmed batch lists its trials."""
    text = batch_text(
        FoundBatch(8, "bf16", small_plan.entries[1].estimate, confirmed=True, trials=((8, True), (9, False)))
    )
    assert "8 fits, 9 does not fit" in text


def test_end_of_the_search_is_not_the_largest_batch():
    """If even the last size of the search fits, the text shows "or more" instead of calling it the largest."""
    roomy = plan(small_job(), 64, precision=("fp32",), memory="400GiB")
    largest = roomy.entries[0].largest
    assert f"{largest.batch} or more x 1" in as_text(roomy)
    assert f"{largest.batch} or more" in render_plan_page(roomy)
    assert "or more (end of the search)" in batch_text(FoundBatch(largest.batch, "fp32", largest, confirmed=False))
    assert "or more" not in as_text(plan(small_job(), 64, precision=("fp32",), memory="1GiB"))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_a_table_fits_its_terminal(width):
    """Headings are broken first, then columns follow in a further table; every cell is there once, next to its row's name."""
    head = ["precision", "peak", "model state", "activations", "one GPU", "min GPUs", "largest micro-batch"]
    rows = [[name, *(f"{name[-1]}{i}.25" for i in range(6))] for name in ("fp32", "bf16-lean")]
    text = table(head, rows, width)
    assert max(map(len, text.splitlines())) <= width
    assert all(text.count(cell) == 1 for row in rows for cell in row[1:])
    assert all(word in text for heading in head for word in heading.split())
    for line in text.splitlines():
        cells = line.split()
        assert not any(cell in row[1:] for row in rows for cell in cells if cells[0] != row[0])


def test_a_wide_cell_is_not_cut():
    """A table of two columns stays as wide as it has to be."""
    assert "x" * 90 in table(["a", "b"], [["c", "x" * 90]], 40)
