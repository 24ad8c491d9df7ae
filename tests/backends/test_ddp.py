"""`Engine(backend="ddp")` on real gloo ranks: the reducer, windows, equality with one process, options, rejections."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfstep
from halfstep.backends import DataParallel
from rank_processes import cases_of_ranks

PROGRAM = Path(__file__).parents[1] / "data_parallel_program.py"
WINDOWS = (
    "unweighted", "short_on_all_ranks", "lengths_differ", "weights_differ", "tensor_weights", "numbers_here_and_tensors_there",
    "weights_on_one_rank", "weights_that_start_late", "one_micro_batch", "zero_on_one_rank", "zero_on_all_ranks", "broken_weight",
    "fp16_small_and_large", "random_windows", "messages", "overflow_on_one_rank", "edited_on_one_rank", "unscaled_in_a_short_window",
    "forward_outside_the_wrapper", "two_losses", "two_forwards", "several_buckets", "without_the_block",
)  # fmt: skip
SKIPS = {  # of cases in which not every window is an update
    "zero_on_all_ranks": [True, False, True, False],
    "broken_weight": [True, False, True, False, False],
    "overflow_on_one_rank": [True, True, False],
    "edited_on_one_rank": [True, False],
}
# Of the gradients, relative to the largest: both runs round sums of 16-bit numbers in another order.
BOUNDS = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 2e-3, "bf16-lean": 1e-2, "fp16-lean": 2e-3}


def by_case(lines):
    """What every rank reported, by case."""
    return {reports[0]["case"]: list(reports) for reports in zip(*lines, strict=True)}


@pytest.fixture(scope="module")
def ranks():
    """What two gloo ranks measured: both run every case in one process each."""
    return by_case(cases_of_ranks(PROGRAM))


def test_messages_have_the_same_order_whatever_order_gradients_arrive_in(ranks):
    """Random orders, different on every rank, some gradients missing: the exact mean, and buckets sent in one order."""
    first, second = ranks["arrival_order"]
    assert first["orders"] == second["orders"]
    for rank in (first, second):
        assert rank["worst"] < 1e-6
        assert rank["count"] == 30
        assert rank["early"] == rank["buckets"] == 4  # all were sent before backward had ended


def test_every_dtype_of_gradients_and_messages(ranks):
    """The mean is exact where both formats can represent it, and has the gradient's dtype and layout."""
    for rank in ranks["formats"]:
        assert len(rank["all"]) == 21
        assert rank["worst"] == 0


def test_fp16_sums_do_not_overflow(ranks):
    """60000 on two ranks has the mean 60000, and the sum is above fp16's range."""
    assert [(rank["sum"], rank["error"]) for rank in ranks["fp16_does_not_overflow"]] == [(120000, 0)] * 2


def test_a_gradient_that_arrives_after_it_was_sent_is_reduced_again(ranks):
    """By the reducer, and in an Engine over re-entrant checkpoints of a shared weight."""
    for rank in ranks["late_gradient"]:
        assert rank["late"]
        assert rank["error"] == 0
    for rank in ranks["re_entrant_checkpoints"]:
        assert rank["error"] < 1e-6
        assert rank["same"]
        assert rank["reductions"] == 5  # of four windows: the first late gradient costs one more


@pytest.mark.parametrize("case", WINDOWS)
def test_windows_are_the_mean_over_all_ranks_in_one_reduction(ranks, case):
    """Whatever weights, lengths and losses the ranks' windows have: the mean in float64, equal weights, one reduction each."""
    for rank in ranks[case]:
        assert rank["error"] < 2e-6
        assert rank["drift"] == 0
        assert rank["reductions"] == rank["windows"]
        assert rank["skips"] == SKIPS.get(case, [False] * rank["windows"])
        assert rank.get("worst", 0) < 2e-5


def test_dropped_windows_leave_no_trace(ranks):
    """After a forward, in the middle, and after a reduction."""
    for rank in ranks["aborted_windows"]:
        assert rank["error"] < 2e-6
        assert rank["drift"] == 0
        assert rank["reductions"] < 99


def test_windows_without_weights_cost_one_small_message(ranks):
    """The first window finds out that no rank passes weights; a second message is sent only while one does."""
    assert [rank["messages"] for rank in ranks["messages"]] == [[2, 1, 1, 1, 2]] * 2


def test_parameters_that_no_rank_used_get_no_gradient(ranks):
    """Not even zeros, which would decay them; one that a single rank used gets its share, without a search for unused ones."""
    for rank in ranks["unused_parameter"]:
        assert rank["idle"] == [1.0] * 3
        assert rank["used"] == [0.0] * 3
        assert rank["drift"] == 0


def test_gradients_are_those_of_one_process(ranks):
    """The first moment with beta1 = beta2 = 0, in every preset and reduce format, weighted and accumulated or not."""
    for rank in ranks["gradients"]:
        assert len(rank["errors"]) == 14
        for name, error in rank["errors"].items():
            bound = 2e-2 if "reduce=bf16" in name else BOUNDS[name.partition(",")[0].partition(" ")[0]]
            assert error < bound, name
        assert rank["row"] == "fp16 over 2 ranks, 508 B per step"  # 244 gradients with padding and 6 shares, of 2 bytes


def test_fifty_steps_in_fp32_are_those_of_one_process(ranks):
    """Norms and weights agree at the end, and every window was reduced once."""
    for rank in ranks["loss_curve"]:
        assert rank["norms"] < 1e-5
        assert rank["weights"] < 1e-5
        assert rank["same"]
        assert rank["reductions"] == 50
        assert rank["bytes"] == 50 * 1000


def test_overflows_on_any_rank_give_the_scales_and_skips_of_one_process(ranks):
    """An injected trace, in fp16 and fp16-lean."""
    for rank in ranks["overflow_trace"]:
        assert [trace["equal"] and trace["same"] for trace in rank["traces"]] == [True, True]
        assert all(trace["skips"] > 5 and trace["scales"] > 3 for trace in rank["traces"])


def test_an_inf_on_one_rank_skips_all_and_no_bit_differs(ranks):
    """Sixty windows with a random rank, parameter and micro-batch, compared by hash after each."""
    assert [rank["wrong"] for rank in ranks["inf_on_one_rank"]] == [[0, 0, 0]] * 2


def test_ranks_agree_in_natural_overflows(ranks):
    """Skips, scales and every number of the state."""
    for rank in ranks["natural_overflows"]:
        assert rank["equal"]
        assert 0 < rank["skips"] < 20


def test_all_ranks_start_from_rank_0(ranks):
    """Parameters and buffers are broadcast; rank 0 keeps its own."""
    assert all(rank["same"] for rank in ranks["rank_0_decides"])
    assert [rank["kept"] for rank in ranks["rank_0_decides"]] == [True, False]


def test_a_plain_model_in_a_group_is_trained_by_ddp(ranks):
    """Replicas that nobody synchronises would drift apart without an error."""
    assert all((rank["name"], rank["ranks"]) == ("DataParallel", 2) for rank in ranks["auto"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shape", "parameter weight: float32 (4, 8) on rank 0, float32 (5, 8) on rank 1"),
        ("precision", "precision: fp32 on rank 0, bf16 on rank 1"),
        ("accumulate", "accumulate: 2 on rank 0, 3 on rank 1"),
        ("max_norm", "max_norm: None on rank 0, 1.0 on rank 1"),
        ("class", "optimizer 0: AdamW on rank 0, SGD on rank 1"),
        ("lr", "lr=0.2"),
        ("frozen", "parameter 0.bias: float32 (16,) on rank 0, float32 (16,), frozen on rank 1"),
        ("state", "state of 0.weight"),
    ],
)
def test_ranks_that_differ_raise_the_same_error(ranks, name, text):
    """With both values, on every rank."""
    for rank in ranks["differences"]:
        assert text in rank["messages"][name]
        assert rank["same"]


def test_a_state_that_is_equal_on_all_ranks_is_continued(ranks):
    """Three steps after one that the optimizer had taken before."""
    assert all(rank["same"] and rank["steps"] == [4.0] for rank in ranks["optimizer_state"])


def test_batch_norm_statistics_are_those_of_rank_0(ranks):
    """After each window; a skipped one leaves them as they were on every rank."""
    assert all(rank["fine"] for rank in ranks["batch_norm"])


def test_frozen_parameters_are_not_sent(ranks):
    """Also when requires_grad changes during the run."""
    for rank in ranks["frozen_and_unfrozen"]:
        assert rank["fine"]
        assert rank["sent"] == [416, 416, 1000, 1000, 416]


def test_a_wrapper_of_the_user_changes_nothing(ranks):
    """Lean presets and reduce=bf16 on DistributedDataParallel: its reducer is off, every bit is that of the plain model."""
    for rank in ranks["wrapped_by_the_user"]:
        assert len(rank["outcomes"]) == 3
        assert all(outcome == [True, True, "DataParallel", 3, True] for outcome in rank["outcomes"].values())
        assert "a communication hook" in rank["hook"]
        assert "static_graph=True" in rank["static"]


def test_what_is_not_supported_is_rejected_by_name(ranks):
    """Sparse gradients at set-up, or later where no module declares them, and gradient release."""
    for rank in ranks["rejections"]:
        assert "sparse gradients" in rank["sparse"]
        assert "averaged over ranks" in rank["release"]
        assert "Parameter table has a sparse gradient" in rank["late"]


def test_options_of_the_engine_work_on_ranks(ranks):
    """EMA, recomputation, a schedule, unscale, evaluate, save and load: one state on all ranks, written once."""
    for rank in ranks["engine_options"]:
        assert all(rank[name] for name in ("unscaled", "evaluated", "restored", "same"))
        assert rank["row"].startswith("fp32 over 2 ranks, ")


def test_every_rank_continues_with_its_own_random_numbers(ranks):
    """Bit for bit from a checkpoint of as many ranks, with each rank's `extra`; from another number with new ones, distinct."""
    for rank in ranks["random_numbers_of_each_rank"]:
        assert len(rank["fine"]) == 11
        assert all(rank["fine"].values()), rank["fine"]


def check_synchronised(ranks):
    """Weights and statistics of a synchronised batch norm are those of one process on the whole batches."""
    for rank in ranks:
        assert rank["same"]
        assert rank["weights"] < 1e-5
        assert rank["statistics"] < 1e-5


def test_synchronised_batch_norm_is_that_of_the_whole_batch(ranks):
    """A model that sends messages in its forward and backward, with accumulation."""
    check_synchronised(ranks["synchronised_batch_norm"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="nn.SyncBatchNorm takes GPU tensors only")
def test_sync_batch_norm_of_torch_is_that_of_the_whole_batch():
    """nn.SyncBatchNorm on two ranks that share a GPU, over gloo."""
    check_synchronised(by_case(cases_of_ranks(PROGRAM, "sync_batch_norm_of_torch"))["sync_batch_norm_of_torch"])


def test_batch_norm_of_equal_batches_is_that_of_the_whole_batch(ranks):
    """Running mean, variance (but for its n / (n - 1)) and weights; each rank counts its own batches."""
    for rank in ranks["batch_norm_of_equal_batches"]:
        assert rank["same"]
        assert max(rank["weights"], rank["mean"], rank["variance"]) < 1e-5
        assert rank["batches"] == [6, 6]


def test_a_watch_does_not_wait_for_other_ranks(ranks):
    """A step that rank 1 alone overflows is computed again there, and reported on every rank."""
    for rank in ranks["watched"]:
        assert rank["fine"]
        assert len(rank["sentences"]) == 1
        assert "the loss function" in rank["sentences"][0]


@pytest.fixture(scope="module")
def slow_ranks():
    """The slow cases of two ranks, in one launch."""
    return by_case(cases_of_ranks(PROGRAM, "sharded_scaler_of_torch", "compiled"))


@pytest.mark.slow
def test_where_the_scaler_of_torch_lets_ranks_drift_apart_the_engine_does_not(slow_ranks):
    """ShardedGradScaler with a fused optimizer: one rank skips alone, and after unscale_() it raises (pytorch#140514)."""
    for rank in slow_ranks["sharded_scaler_of_torch"]:
        assert rank["apart"]
        assert "broadcast shape" in rank["error"]
        assert rank["skips"] == [True, False]
        assert rank["together"]
        assert rank["scale"] == 2.0


@pytest.mark.slow
def test_hooks_survive_compilation(slow_ranks):
    """Of the whole model and of its blocks: the update of the eager run, one reduction per window."""
    for rank in slow_ranks["compiled"]:
        assert len(rank["errors"]) == 3
        assert max(rank["errors"].values()) < 1e-5


@pytest.mark.slow
def test_four_ranks():
    """The laws on twice as many ranks."""
    names = (
        "arrival_order",
        "formats",
        "fp16_does_not_overflow",
        "gradients",
        "loss_curve",
        "overflow_trace",
        "inf_on_one_rank",
    )
    ranks = by_case(cases_of_ranks(PROGRAM, *names, ranks=4))
    assert all(rank["worst"] < 1e-6 for rank in (*ranks["arrival_order"], *ranks["formats"]))
    assert all((rank["sum"], rank["error"]) == (120000, 0) for rank in ranks["fp16_does_not_overflow"])
    assert max(error for rank in ranks["gradients"] for error in rank["errors"].values()) < 2e-2
    assert all(rank["errors"]["fp32 1"] < 1e-6 for rank in ranks["gradients"])
    assert all(rank["same"] and rank["weights"] < 1e-5 for rank in ranks["loss_curve"])
    assert all(trace["equal"] and trace["same"] for rank in ranks["overflow_trace"] for trace in rank["traces"])
    assert all(rank["wrong"] == [0, 0, 0] for rank in ranks["inf_on_one_rank"])


def test_one_rank_sends_nothing_and_has_no_hooks(tmp_path):
    """A process group of one rank costs nothing, and the update is that of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        weights = []
        for backend in ("ddp", "single"):
            torch.manual_seed(0)
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with halfstep.Engine(model, optimizer, "fp32", backend=backend) as engine:
                for _ in range(2):
                    with engine.forward():
                        loss = model(torch.ones(2, 3)).pow(2).mean()
                    engine.backward(loss)
                    engine.step()
                if backend == "ddp":
                    assert isinstance(engine.backend, DataParallel)
                    assert engine.backend.reductions.count == 0
                    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
                    assert dict(engine.truth().rows)["reduction"] == "none, one rank"
            weights.append(model.weight.detach().clone())
        assert torch.equal(*weights)
    finally:
        dist.destroy_process_group()
