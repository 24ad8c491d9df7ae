"""What FSDP2 runs leave behind: nothing after a skip or a rejection, and the same state on every number of ranks."""

from pathlib import Path

import pytest

from rank_processes import cases_of_ranks

PROGRAM = Path(__file__).parents[1] / "fsdp_laws_program.py"


def by_case(lines):
    """What each rank measured, by case."""
    return {line[0]["case"]: line for line in map(list, zip(*lines, strict=True))}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The quick cases on two ranks."""
    return by_case(cases_of_ranks(PROGRAM, tmp_path_factory.mktemp("laws")))


def test_a_skip_changes_nothing_on_any_rank(ranks):
    """Weights, masters, moments, EMA and buffers, by hash; copies on several ranks stay equal, and decisions agree."""
    for rank in ranks["skips_leave_nothing"]:
        assert rank["trouble"] == []
        assert rank["skips"] >= 50


def test_ranks_start_and_stay_equal(ranks):
    """Weights are rank 0's at the start, and buffers after every update."""
    for rank in ranks["ranks_start_and_stay_equal"]:
        assert rank["trouble"] == []


def test_a_rejected_model_is_as_it_was(ranks):
    """Neither sharded nor cast nor hooked, and no rank waits for one that was rejected alone."""
    for rank in ranks["rejections_change_nothing"]:
        assert rank["trouble"] == []


@pytest.mark.slow
def test_four_ranks_skip_and_start_alike(tmp_path):
    """The same laws on four ranks."""
    names = ("skips_leave_nothing", "ranks_start_and_stay_equal", "rejections_change_nothing")
    for lines in by_case(cases_of_ranks(PROGRAM, tmp_path, *names, ranks=4, timeout=1200)).values():
        assert [line["trouble"] for line in lines] == [[]] * 4


@pytest.fixture(scope="module")
def moves(tmp_path_factory):
    """Runs whose checkpoints another number of ranks continues, by both numbers: 1 to 2, 2 to 4, 4 to 2 and 2 to 1."""
    folder, lines = tmp_path_factory.mktemp("moves"), {}
    for source, ranks in ((None, 1), (1, 2), (2, 4), (4, 2), (2, 1)):
        cases = ["load_from_other_ranks"] * (source is not None) + ["save_for_other_ranks"] * ((source or 0) < ranks)
        result = cases_of_ranks(PROGRAM, folder, *cases, ranks=ranks, timeout=1200, variables={"SAVED_BY": str(source)})
        lines[source, ranks] = [rank[0] for rank in result]
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 4), (4, 2), (2, 1)])
def test_checkpoints_move_between_numbers_of_ranks(moves, first, then):
    """Masters, moments, EMA and scaler are found in equal bits; 8-bit moments are rounded once. The run continues as before."""
    for line in moves[first, then]:
        assert line["case"] == "load_from_other_ranks"
        assert line["trouble"] == []
        for precision, far in line["far"].items():
            assert far["moments"] < 0.02, precision
            assert far["norms"] < (0.02 if precision[:4] != "fp32" else 1e-5), precision
            assert far["masters"] < (2e-3 if precision[:4] != "fp32" else 1e-5), precision
