"""A model that the user wrapped in DistributedDataParallel, on real gloo ranks."""

from pathlib import Path

import pytest
from torch import nn

from halfstep.backends import WrappedDDP
from halfstep.errors import SettingError
from halfstep.precision.policy import Policy
from rank_processes import cases_of_ranks

PROGRAM = Path(__file__).parents[1] / "ddp_program.py"


@pytest.mark.parametrize("fine", ["fp32", "tf32", "bf16", "fp16"])
def test_presets_with_fp32_weights_pass(fine):
    """The wrapper's buckets are fp32, as the weights are."""
    WrappedDDP().check(nn.Linear(2, 2), Policy.parse(fine))


@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean", "bf16,reduce=bf16"])
def test_what_the_wrapper_cannot_carry_is_rejected(precision):
    """Casting its weights, or another format for its sums; "auto" chooses another backend then."""
    with pytest.raises(SettingError, match="needs more"):
        WrappedDDP().check(nn.Linear(2, 2), Policy.parse(precision))


@pytest.fixture(scope="module")
def ranks():
    """What two gloo ranks measured, by case: both run every case of the program in one process each."""
    lines = cases_of_ranks(PROGRAM)
    return {first["case"]: [first, second] for first, second in zip(*lines, strict=True)}


SKIPS = {  # of cases in which not every window is an update
    "zero_on_all_ranks": [True, False, True, False],
    "broken_weight": [True, False, True, False, False],
    "overflow_on_one_rank": [True, True, False],
    "edited_on_one_rank": [True, False],
}


@pytest.mark.parametrize(
    "case",
    [
        "unweighted", "short_on_all_ranks", "lengths_differ", "weights_differ", "tensor_weights", "numbers_here_and_tensors_there",
        "weights_on_one_rank", "weights_that_start_late", "one_micro_batch", "zero_on_one_rank", "zero_on_all_ranks", "broken_weight",
        "fp16_small_and_large", "bucket_views", "searching_for_unused", "static_graph_without_accumulation", "random_windows", "messages",
        "overflow_on_one_rank", "edited_on_one_rank", "unscaled_in_a_short_window", "forward_outside_the_wrapper",
    ],
)  # fmt: skip
def test_windows_are_the_mean_over_all_ranks_in_one_reduction(ranks, case):
    """Whatever the weights and lengths of the ranks' windows: the mean in float64, equal weights, one reduction each."""
    for rank in ranks[case]:
        assert rank["error"] < 2e-6
        assert rank["drift"] == 0
        assert rank["reductions"] == rank["windows"]
        assert rank["skips"] == SKIPS.get(case, [False] * rank["windows"])


@pytest.mark.parametrize(
    "case", ["two_losses", "two_forwards", "several_buckets", "without_the_block", "aborted_windows", "batch_norm"]
)
def test_what_reduces_more_than_once_is_still_the_mean(ranks, case):
    """Several losses, a forgotten block, dropped windows and broadcast buffers leave the same right weights on all ranks."""
    for rank in ranks[case]:
        assert rank["drift"] == 0
        assert rank.get("error", 0) < 2e-6
        assert rank.get("worst", 0) < 2e-5
        assert not any(rank.get("skips", ()))


def test_several_losses_cost_one_reduction_from_the_second_window_on(ranks):
    """The first window learns that there are several; a dropped window costs nothing in the next one."""
    assert [rank["reductions"] for rank in ranks["two_losses"]] == [3, 3]
    assert [rank["reductions"] for rank in ranks["two_forwards"]] == [4, 4]
    assert all(rank["reductions"] < 99 for rank in ranks["aborted_windows"])


def test_windows_without_weights_cost_one_small_message(ranks):
    """The first window finds out that no rank passes weights; a second message is sent only while one does."""
    for rank in ranks["messages"]:
        assert rank["messages"] == [2, 1, 1, 1, 2]


def test_a_flag_on_one_rank_is_a_flag_on_all(ranks):
    """Set by rank 0, by rank 1, by none."""
    assert [rank["flags"] for rank in ranks["flag_of_the_hook"]] == [[1, 1, 0]] * 2


def test_unscaled_gradients_are_those_of_all_ranks(ranks):
    """In a short window too, whose reduction is still due when unscale() is called."""
    assert all(rank["close"] for rank in ranks["unscaled_in_a_short_window"])


def test_parameters_that_no_rank_used_get_no_gradient(ranks):
    """Not even zeros, which would decay them; one that a single rank used gets its share."""
    for rank in ranks["unused_parameter_in_short_windows"]:
        assert rank["idle"] == [1.0] * 3
        assert rank["used"] == [0.5] * 3


@pytest.mark.parametrize(
    ("case", "reason"),
    [("join", "join"), ("static", "static_graph=True"), ("unused", "find_unused_parameters"), ("foreign", "outside")],
)
def test_what_cannot_be_right_is_rejected_on_every_rank(ranks, case, reason):
    """By name, and before the weights change."""
    assert all(reason in rank[case] for rank in ranks["rejections"])
