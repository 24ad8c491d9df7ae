"""FSDP2 under the Engine, on real gloo ranks."""

from pathlib import Path

import pytest
import torch
from torch import nn

import halfstep
from halfstep.backends import FSDP
from halfstep.errors import SettingError
from rank_processes import cases_of_ranks

PROGRAM = Path(__file__).parents[1] / "fsdp_program.py"
SLOW = (
    "every_optimizer_in_every_preset", "checkpoints_move_between_one_process_and_shards", "meshes_of_fully_shard", "sixteen_bit_reductions",
    "recomputed_blocks", "several_modules", "modules_in_fp32", "shared_weights", "forwards_between_training_steps",
    "dropped_windows_leave_nothing", "compiled_models", "fp32_on_16_bit_weights",
)  # fmt: skip


def by_case(lines):
    """What each rank measured, by case."""
    return {line[0]["case"]: line for line in map(list, zip(*lines, strict=True))}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The quick cases on two ranks."""
    return by_case(cases_of_ranks(PROGRAM, tmp_path_factory.mktemp("quick")))


@pytest.fixture(scope="module")
def slow_ranks(tmp_path_factory):
    """The slow cases on two ranks."""
    return by_case(cases_of_ranks(PROGRAM, tmp_path_factory.mktemp("slow"), *SLOW, timeout=1200))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """Placements and meshes on four ranks."""
    cases = (
        "meshes_of_fully_shard", "tensor_parallel_and_sharded", "norms_count_every_value_once", "one_bad_number_skips_everywhere",
        "losses_stay_together", "overflows_are_those_of_one_process", "resume_is_exact",
        "replicas_are_summed_as_the_truth_table_shows",
    )  # fmt: skip
    return by_case(cases_of_ranks(PROGRAM, tmp_path_factory.mktemp("four"), *cases, ranks=4, timeout=1200))


# --- the same numbers as one process ----------------------------------------------------------------------------------


def test_gradients_are_those_of_one_process(ranks):
    """Weighted windows in every preset; 16-bit ones differ by roundings of the reduction to the weights' dtype."""
    bounds = {"fp32 3 True": 1e-6, "fp32 1 False": 1e-6, "bf16-lean 1 False": 2**-8}
    for rank in ranks["gradients_are_those_of_one_process"]:
        for setting, far in rank["far"].items():
            assert far <= bounds.get(setting, 1e-5), setting


def check_curve(rank):
    """fp32 losses and norms over 50 clipped updates."""
    assert rank["losses"] < 1e-4
    assert rank["norms"] < 1e-3


def test_losses_stay_those_of_one_process(ranks):
    """50 updates in fp32 with clipping."""
    for rank in ranks["losses_stay_together"]:
        check_curve(rank)


def check_overflows(rank):
    """Equal skips and scales, and both kinds of steps."""
    for outcomes in rank["outcomes"].values():
        assert all(outcome == outcomes["single"] for outcome in outcomes.values())
        assert {skipped for skipped, _ in outcomes["single"]} == {True, False}


def test_overflows_are_those_of_one_process(ranks):
    """Infinite losses on one rank or another: scales and skips are identical to the single run's."""
    for rank in ranks["overflows_are_those_of_one_process"]:
        check_overflows(rank)


@pytest.mark.slow
def test_every_optimizer_trains_in_every_preset(slow_ranks):
    """Adopted ones, and one that is decided on the host, over fp32 masters in lean presets."""
    for rank in slow_ranks["every_optimizer_in_every_preset"]:
        assert max(rank["far"].values()) < 1e-4, rank


# --- windows ----------------------------------------------------------------------------------------------------------


def test_a_window_is_reduced_once(ranks):
    """Three units, so three reductions; one small message, and another only while weights may be passed."""
    for rank in ranks["one_reduction_per_window"]:
        assert rank["counts"] == [[3, 2], [3, 1], [3, 1], [3, 1]]
        assert rank["several"] == [6, 3, 3]


def test_short_weighted_windows_are_the_mean(ranks):
    """Windows of other lengths, weighted by rank."""
    for rank in ranks["short_windows_and_two_losses_are_the_mean"]:
        assert max(rank["far"].values()) < 1e-5


def test_edits_after_unscale_count(ranks):
    """A NaN that one rank writes skips the step on both."""
    for rank in ranks["gradients_can_be_edited_after_unscale"]:
        assert rank["skips"] == [False, True, False]
        assert rank["far"] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dropped_windows_leave_nothing", "forwards_between_training_steps"])
def test_nothing_is_left_from_a_forward_or_window(slow_ranks, case):
    """Gradients that were not reduced are dropped, and weights that a forward gathered are not used after an update."""
    for rank in slow_ranks[case]:
        assert rank["far"] == 0


def test_evaluation_on_the_ema(ranks):
    """Each forward uses its own weights: EMA and trained ones by turns."""
    for rank in ranks["evaluation_uses_its_weights_and_training_its_own"]:
        assert rank["outputs"]["engine"] == pytest.approx(rank["outputs"]["single"], rel=0.05)
        first, second, third, _ = rank["outputs"]["engine"]
        assert first == third != second


# --- placements -------------------------------------------------------------------------------------------------------


def check_norms(rank):
    """Norms over placements, relative to whole tensors."""
    assert max(map(abs, rank["wrong"].values())) < 1e-6
    assert rank["backend"] == "fsdp"  # which "auto" has chosen


def test_norms_count_every_value_once(ranks):
    """Replicated, sharded, plain and empty parts on several meshes."""
    for rank in ranks["norms_count_every_value_once"]:
        check_norms(rank)


def test_one_bad_number_skips_on_all_ranks(ranks):
    """On a random rank and parameter, whatever the placements: the same decision and scale, and finite weights."""
    for rank in ranks["one_bad_number_skips_everywhere"]:
        assert rank["trouble"] == []
        assert rank["skipped"] > 30


def test_stock_scaler_desynchronises(ranks):
    """F4: with a replicated parameter first, torch's GradScaler gives the ranks different scales."""
    for rank in ranks["stock_scaler_looks_at_the_first_placement"]:
        assert rank["scales"] == {"replicate": [4.0, 2.0], "shard": [2.0, 2.0]}


def check_meshes(rank):
    """Weights and norms on every mesh; tensor parallelism rounds 16-bit partial sums."""
    assert rank["far"].get("fp32", 0) < 1e-6
    assert max(rank["far"].values()) < 1e-3
    assert max(rank["norms"].values()) < 1e-3


@pytest.mark.slow
def test_meshes(slow_ranks):
    """HSDP, partly sharded models and ignored parameters."""
    for rank in slow_ranks["meshes_of_fully_shard"]:
        check_meshes(rank)


@pytest.mark.slow
def test_four_ranks(four_ranks):
    """The same laws on four ranks, with HSDP of 2 x 2 and tensor parallelism next to FSDP2."""
    for rank in four_ranks["meshes_of_fully_shard"] + four_ranks["tensor_parallel_and_sharded"]:
        check_meshes(rank)
    for rank in four_ranks["norms_count_every_value_once"]:
        check_norms(rank)
    for rank in four_ranks["one_bad_number_skips_everywhere"]:
        assert rank["trouble"] == []
    for rank in four_ranks["losses_stay_together"]:
        check_curve(rank)
    for rank in four_ranks["overflows_are_those_of_one_process"]:
        check_overflows(rank)
    for rank in four_ranks["replicas_are_summed_as_the_truth_table_shows"]:
        check_replicas(rank)
    for rank in four_ranks["resume_is_exact"]:
        assert all(rank["equal"].values())


# --- models and options -----------------------------------------------------------------------------------------------


def test_units_and_groups(ranks):
    """Named units, groups rebound by name, and a scheduler that keeps working."""
    for rank in ranks["units_and_optimizers"]:
        assert rank["units"] == rank["by_class"] == ["", "blocks.0", "blocks.1"]
        assert rank["lr"] == [0.05, 0.025]
        assert rank["rebound"]


@pytest.mark.slow
def test_modules_in_fp32(slow_ranks):
    """Batch norms are replicated and equal on all ranks; `keep_fp32` makes a unit."""
    for rank in slow_ranks["modules_in_fp32"]:
        assert rank["kinds"]["norm.weight"] == ["torch.float32", False]
        assert rank["kinds"]["head.weight"] == ["torch.float32", True]
        assert rank["kinds"]["blocks.0.up.weight"] == ["torch.bfloat16", True]
        assert rank["sums"][0] == rank["sums"][1]


@pytest.mark.slow
def test_modules_in_fp32_on_16_bit_weights(slow_ranks):
    """`compute_fp32`: gradients are those of one process, outputs fp32, and what is stored and gathered stays bf16."""
    for rank in slow_ranks["fp32_on_16_bit_weights"]:
        assert {tuple(found) for found in rank["formats"].values()} == {("torch.float32",)}
        assert {tuple(found) for found in rank["dtypes"].values()} == {("torch.bfloat16",)}
        assert len(rank["far"]) == 5
        assert max(rank["far"].values()) < 2**-6, rank["far"]  # FSDP2 rounds the gradient of each micro-batch to bf16


@pytest.mark.slow
def test_reductions_in_16_bits(slow_ranks):
    """The messages have 16 bits, and gradients are those of one process to 16 bits."""
    for rank in slow_ranks["sixteen_bit_reductions"]:
        for setting, dtypes in rank["sent"].items():
            assert dtypes == ["torch.bfloat16" if setting.startswith("bf16") else "torch.float16"]
        assert max(rank["far"].values()) < 2**-7


def check_replicas(rank):
    """The truth table has the format in which the replicas of HSDP are summed."""
    for name, row in rank["rows"].items():
        replicas, shards = map(int, name.split()[0].split("x"))
        dtype = "bf16" if name.endswith(" 1") else "fp32"  # with several micro-batches FSDP2 accumulates in fp32
        parts = [f"bf16 over {shards} ranks, to shards"] * (shards > 1) + [f"{dtype} over {replicas} replicas"]
        assert row == "; ".join(parts)
        assert rank["sent"][name] == ["torch.bfloat16" if dtype == "bf16" else "torch.float32"]


def test_replicas_are_summed_as_the_truth_table_shows(ranks):
    """In the weights' 16 bits without accumulation, else in fp32 whatever `reduce` is."""
    for rank in ranks["replicas_are_summed_as_the_truth_table_shows"]:
        check_replicas(rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "bound"),
    [("several_modules", 1e-5), ("shared_weights", 1e-5), ("recomputed_blocks", 0), ("compiled_models", 1e-3)],
)
def test_models_and_options(slow_ranks, case, bound):
    """Several modules, shared weights, recomputation and compilation train as one process does, or as without them."""
    for rank in slow_ranks[case]:
        far = rank["far"] if isinstance(rank["far"], dict) else {case: rank["far"]}
        assert max(far.values()) <= bound


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("param_dtype", ("param_dtype=bf16", "in fp32")),
        ("reduce_dtype", ("reduce_dtype=bf16", "in fp32")),
        ("lean_dtype", ("param_dtype=bf16", "in fp16")),
        ("output_dtype", ("output_dtype=fp32",)),
        ("offload", ("CPUOffloadPolicy",)),
        ("state", ("AdamW already has a state",)),
        ("mixed", ("2 weights that stay fp32", "weight, bias")),
        ("divide", ("set_gradient_divide_factor(2.0)",)),
        ("run", ("has run before the Engine",)),
        ("shard", ("no effect",)),
        ("unknown", ("'layers.*'",)),
        ("mp_policy", ("mp_policy",)),
        ("release", ("gradient_release",)),
        ("graphs", ("CUDA graphs",)),
        ("single", ("DTensor", 'backend="fsdp"')),
        ("adafactor", ("Adafactor", "halfstep.optim")),
    ],
)
def test_what_does_not_work_is_rejected(ranks, kind, words):
    """On every rank, with the values seen and what to do."""
    for rank in ranks["rejections"]:
        assert rank["messages"][kind] is not None
        assert all(word in rank["messages"][kind] for word in words), rank["messages"][kind]


def test_without_a_process_group_the_launcher_is_named():
    """One process needs torchrun and init_process_group."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for backend in ("fsdp", FSDP()):
        with pytest.raises(SettingError, match="torchrun"):
            halfstep.Engine(model, optimizer, "fp32", backend=backend)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_resume_is_exact(ranks):
    """At the same number of ranks; saving and loading do not advance the loss scale (accelerate#4289)."""
    for rank in ranks["resume_is_exact"]:
        assert all(rank["equal"].values()), rank


@pytest.mark.slow
def test_checkpoints_move_between_one_process_and_shards(slow_ranks):
    """In every layout; 8-bit moments are rounded once, as the blocks of shards are others."""
    for rank in slow_ranks["checkpoints_move_between_one_process_and_shards"]:
        assert all(rank["equal"].values()), rank
        for setting, far in rank["far"].items():
            assert far < (0.01 if "8bit" in setting else 1e-6), setting


def test_a_save_that_fails_raises_on_every_rank(ranks):
    """Rank 0 has the reason, and the others do not wait for ever."""
    first, second = ranks["a_save_that_fails_raises_on_every_rank"]
    assert "could not be saved" in first["text"]
    assert "rank 0" in second["text"]
