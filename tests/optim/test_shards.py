"""Optimizers on parameters that FSDP2 or tensor parallelism has sharded, on real gloo ranks."""

from pathlib import Path

import pytest

from rank_processes import cases_of_ranks

PROGRAM = Path(__file__).parents[1] / "sharding_program.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the ranks save."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder):
    """What two ranks printed, by case."""
    lines = cases_of_ranks(PROGRAM, folder)
    return {first["case"]: [first, second] for first, second in zip(*lines, strict=True)}


def test_each_rank_steps_its_part_as_a_plain_tensor(ranks):
    """Bit for bit in every layout, with a skipped step; on one rank the last bias has no elements."""
    assert [rank["wrong"] for rank in ranks["steps_are_those_of_the_parts"]] == [[], []]
    assert [rank["sizes"][-1] for rank in ranks["steps_are_those_of_the_parts"]] == [1, 0]


@pytest.mark.slow
def test_kernels_step_the_parts(tmp_path):
    """All of them in one launch, in Triton's interpreter."""
    pytest.importorskip("triton")
    for (line,) in cases_of_ranks(PROGRAM, tmp_path, "kernels_step_the_parts", variables={"TRITON_INTERPRET": "1"}):
        assert line["wrong"] == []
        assert line["launched"] == line["stepped"] > 0


def test_training_under_fsdp2_is_that_of_one_process(ranks):
    """The ranks have halves of the batch, so only roundings differ."""
    for rank in ranks["training_is_that_of_one_process"]:
        assert max(rank["far"].values()) < 1e-5, rank


@pytest.mark.parametrize(
    "case",
    [
        "a_checkpoint_of_torch_continues_bit_for_bit",
        "a_mesh_that_replicates_and_shards",
        "a_full_state_dict_has_whole_tensors",
        "masters_are_read_and_set_as_wholes",
    ],
)
def test_states_are_saved_and_loaded_as_wholes(ranks, case):
    """By torch's own functions; 8-bit moments come back bit for bit."""
    assert [rank["wrong"] for rank in ranks[case]] == [[], []]


@pytest.mark.usefixtures("ranks")
def test_a_checkpoint_of_two_ranks_continues_on_one(folder):
    """Weights, masters and moments."""
    ((line,),) = cases_of_ranks(PROGRAM, folder, "a_checkpoint_of_two_ranks_continues", ranks=1)
    assert line["wrong"] == []
    assert line["loaded"] > 5


def test_a_gradient_that_is_still_a_sum_over_ranks_is_summed(ranks):
    """1 - 0.1 * (1 + 2)."""
    for rank in ranks["unreduced_gradients_are_reduced"]:
        assert rank["weights"] == pytest.approx([0.7] * 5)


@pytest.mark.slow
def test_accelerate_with_fsdp2_trains_as_one_process():
    """Accelerate shards the model and rebinds the optimizer's groups; the Engine is not involved."""
    pytest.importorskip("accelerate")
    for (line,) in cases_of_ranks(PROGRAM.with_name("hf_fsdp_program.py")):
        assert line["sharded"]
        assert line["far"] < 1e-6


@pytest.mark.slow
def test_checkpoints_of_accelerate_with_fsdp2(tmp_path):
    """Weights and moments come back in equal bits; its load_state() advances the loss scaler (#4289), and the Engine's does not."""
    pytest.importorskip("accelerate")
    lines = [line for (line,) in cases_of_ranks(PROGRAM.with_name("hf_fsdp_resume_program.py"), tmp_path)]
    for line in lines:
        assert line["optim"]["equal"]
        assert line["optim"]["tensors"] == 16
        assert line["engine"]["loaded"] == line["engine"]["saved"]
    if all(line["stock"]["loaded"] == line["stock"]["saved"] for line in lines):
        pytest.skip("this Accelerate restores the loss scaler")
    for line in lines:
        assert (line["stock"]["saved"]["scale"], line["stock"]["loaded"]["scale"]) == (1024.0, 2048.0)


@pytest.mark.slow
def test_the_trainer_of_transformers_with_fsdp2_trains_as_one_process(tmp_path):
    """With `optimizer_cls_and_kwargs`, as the Trainer does not take an optimizer there; gradients are clipped by it."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    for (line,) in cases_of_ranks(PROGRAM.with_name("hf_trainer_fsdp_program.py"), tmp_path):
        assert line["sharded"]
        assert line["steps"] == 4
        assert line["far"] < 1e-6
