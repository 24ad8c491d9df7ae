"""The compressed optimizers on real gloo ranks: tests/onebit_program.py runs the cases, one launch for all of them."""

from pathlib import Path

import pytest

from rank_processes import cases_of_ranks

PROGRAM = Path(__file__).parents[2] / "onebit_program.py"


def check(ranks):
    """What must be true of every case on every rank."""
    for reports in ranks:
        by_name = {report["case"]: report for report in reports}
        assert set(by_name) == {"adam", "zero_one", "lamb", "subgroups", "overflow", "several_buckets"}
        for name in ("adam", "zero_one", "lamb", "subgroups"):
            assert by_name[name]["closest"] > 1e-6 or len(ranks) == 1, name
            assert by_name[name]["worst"] < 3e-6, name
        assert by_name["overflow"]["unchanged"]
        assert by_name["overflow"]["same"]
        assert by_name["overflow"]["steps"] == 5
        assert by_name["several_buckets"]["equal"]


def test_two_ranks():
    """Every optimizer against its paper, skips, process groups of one rank, several messages at once."""
    check(cases_of_ranks(PROGRAM, ranks=2))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks(ranks):
    """The same, where process groups have two ranks and one."""
    check(cases_of_ranks(PROGRAM, ranks=ranks))
