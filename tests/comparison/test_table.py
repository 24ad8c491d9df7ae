"""The table of a comparison."""

import dataclasses

import pytest

from comparison_cases import write_case
from halfstep.comparison.estimate import Estimate
from halfstep.comparison.result import read_comparison
from halfstep.comparison.table import fit_columns, show_interval, show_layer, show_share, table_cells
from halfstep.hardware.tables import plain_table


@pytest.mark.parametrize(
    ("estimate", "text"),
    [(None, "-"), (Estimate(2, 2, 2, 1), "2.00x"), (Estimate(2, 1.9, 2.1, 3), "2.00x (1.90 to 2.10)")],
)
def test_a_ratio_is_shown_with_its_interval(estimate, text):
    """A ratio without an interval is one number, a missing one a dash."""
    assert show_interval(estimate) == text


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_columns_that_do_not_fit_are_dropped_and_named(tmp_path, width):
    """Complete columns are dropped, never parts of cells, and precision, speed and peak stay."""
    headings, cells = table_cells(read_comparison([write_case(tmp_path / "c")]).rows)
    shown, lines, dropped = fit_columns(headings, cells, width)
    assert max(map(len, plain_table(shown, lines).splitlines())) <= width
    assert sorted((*shown, *dropped)) == sorted(headings)
    assert {"precision", "speed", "peak"} <= set(shown)
    assert bool(dropped) is (width < 140)


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0 %"), (1e-9, "<0.01 %"), (1e-4, "0.01 %"), (0.125, "12.5 %"), (1.0, "100 %")]
)
def test_a_small_share_never_looks_like_none(share, text):
    """Three digits of a percentage, and 0 only for 0."""
    assert show_share(share) == text


def test_the_worst_layer_is_shown_with_what_is_wrong(tmp_path):
    """Its share or its overflow; in the table a long name loses its beginning, and a row without one has a dash."""
    row = read_comparison([write_case(tmp_path / "c")]).row("fp16")
    assert show_layer(row) == "blocks.1.fc 50 %"
    long = dataclasses.replace(row, worst_layer="model.decoder.layers.11.mlp.down_proj")
    lines = [row, long, dataclasses.replace(long, overflowed="forward"), dataclasses.replace(row, worst_layer=None)]
    assert [cells[-1] for cells in table_cells(lines)[1]] == [
        "blocks.1.fc",
        "..ayers.11.mlp.down_proj",
        "..ayers.11.mlp.down_proj: forward overflow",
        "-",
    ]
    for kind, text in (("forward", "forward overflow"), ("data", "inf or NaN in the data"), ("later", "later")):
        assert show_layer(dataclasses.replace(row, overflowed=kind)) == f"blocks.1.fc: {text}"
    assert show_layer(dataclasses.replace(row, worst_layer=None)) == "-"


def test_values_of_a_row_that_was_cut_short_name_their_step(tmp_path):
    """Loss, gap and metric of another step than the other rows' never stand without it."""
    row = read_comparison([write_case(tmp_path / "c")]).row("bf16")
    headings, (complete, short) = table_cells([row, dataclasses.replace(row, cut_at=42)])
    for name in ("loss", "gap to fp32", "metric"):
        assert "step" not in complete[headings.index(name)]
        assert short[headings.index(name)].endswith(" at step 42")
    assert short[headings.index("GPU peak")] == "70 MiB"


def test_empty_columns_are_left_out(tmp_path):
    """There is no cosine column without gradients, and a failed row still has its line."""
    rows = (("fp32", 0.01, {}), ("bf16", 0.01, {}))
    case = write_case(tmp_path / "c", rows, failures={"bf16": {"kind": "job", "reason": "x"}})
    headings, cells = table_cells(read_comparison([case]).rows)
    assert "cosine" not in headings
    assert cells[1][:2] == ("bf16", "failed")
    assert all(len(line) == len(headings) for line in cells)
