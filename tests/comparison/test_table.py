"""The table of a comparison."""

import pytest

from comparison_cases import write_case
from halfstep.comparison.estimate import Estimate
from halfstep.comparison.result import read_comparison
from halfstep.comparison.table import fit_columns, plain_table, show_bytes, show_interval, show_seconds, table_cells


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (show_seconds(2.5), "2.5 s"), (show_seconds(0.0123), "12.3 ms"), (show_seconds(4.5e-5), "45 us"),
        (show_bytes(10), "10 B"), (show_bytes(25.5 * 2**30), "25.5 GiB"), (show_bytes(411 * 2**20), "411 MiB"),
        (show_bytes(2048), "2 KiB"), (show_bytes(1010 * 2**20), "1,010 MiB"),
        (show_interval(None), "-"), (show_interval(Estimate(2, 2, 2, 1)), "2.00x"),
        (show_interval(Estimate(2, 1.9, 2.1, 3)), "2.00x (1.90 to 2.10)"),
    ],
)  # fmt: skip
def test_numbers_have_units_a_person_would_choose(shown, text):
    """Three digits and the nearest unit."""
    assert shown == text


def test_columns_line_up():
    """Every column begins at one place, and no line ends in blanks."""
    lines = plain_table(("a", "long heading", "c"), [("1", "2", "3"), ("wide cell", "x", "")]).splitlines()
    assert [line.find("long") for line in lines[:1]] == [lines[1].find("2")] == [lines[2].find("x")]
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_what_does_not_fit_is_left_out_and_named(tmp_path, width):
    """No cell is ever cut: whole columns go, the least telling first, and precision, speed and peak stay."""
    headings, cells = table_cells(read_comparison([write_case(tmp_path / "c")]).rows)
    kept, lines, dropped = fit_columns(headings, cells, width)
    assert max(map(len, plain_table(kept, lines).splitlines())) <= width
    assert sorted((*kept, *dropped)) == sorted(headings)
    assert {"precision", "speed", "peak"} <= set(kept)
    assert bool(dropped) is (width < 100)


def test_a_column_nobody_fills_is_left_out(tmp_path):
    """No cosine without gradients; a failed row still has its line."""
    rows = (("fp32", 0.01, {}), ("bf16", 0.01, {}))
    case = write_case(tmp_path / "c", rows, failures={"bf16": {"kind": "job", "reason": "x"}})
    headings, cells = table_cells(read_comparison([case]).rows)
    assert "cosine" not in headings
    assert cells[1][:2] == ("bf16", "failed")
    assert all(len(line) == len(headings) for line in cells)
