"""The compressed optimizers in an Engine: tests/onebit_engine_program.py runs the cases, one launch for all of them."""

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from halfstep import Engine
from halfstep.errors import SettingError
from halfstep.optim import OneBitAdam
from halfstep.optim.onebit.allreduce import compressed_bytes, server_bytes
from rank_processes import cases_of_ranks

PROGRAM = Path(__file__).parents[1] / "onebit_engine_program.py"
SIZES = (128, 16, 48, 3)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each of two ranks reported, by case."""
    folder = tmp_path_factory.mktemp("onebit")
    ranks = cases_of_ranks(PROGRAM, folder, ranks=2)
    return folder, [{report["case"]: report for report in rank} for rank in ranks]


@pytest.mark.slow
def test_no_dense_reduction_while_compressed(reports):
    """The backend reduces in dense steps only, all ranks have the same weights, and the table shows it."""
    for rank in reports[1]:
        found = rank["dense_reductions"]
        assert {kind: found[kind]["dense"] for kind in ("adam", "lamb", "zero_one")} == {
            "adam": 4,
            "lamb": 4,
            "zero_one": 3,
        }
        assert all(found[kind]["same"] for kind in ("adam", "lamb", "zero_one"))
        assert found["adam"]["last"] == compressed_bytes(SIZES, 2)
        assert found["lamb"]["last"] == compressed_bytes([sum(SIZES)], 2)
        rows = found["adam"]["truth"]
        assert "compressed since step 4" in rows["communication"]
        assert "of this rank's gradients" in rows["clipping norm"]
        assert "in dense steps only" in rows["reduction"]
        errors = 4 * sum(SIZES) + server_bytes(SIZES, 2)
        states = 4 * 2 * sum(SIZES) + errors
        assert float(rows["bytes per parameter"]) == pytest.approx((8 * sum(SIZES) + states) / sum(SIZES), abs=0.2)
        assert len(found["adam"]["waived"]) == 1
        assert "weights over ranks" not in rows
        own = "are not the same" if not found["zero_one"]["synchronized"] else "are the same"
        assert found["zero_one"]["truth"]["weights over ranks"].startswith(own)


@pytest.mark.slow
def test_overflow_on_one_rank_skips_on_all(reports):
    """Weights, moments, compression errors and schedule stay what they were; the rank that overflowed is known."""
    for rank in reports[1]:
        for kind in ("adam", "lamb", "zero_one"):
            assert rank["overflow"][kind] == {"skipped": True, "unchanged": True, "ranks": [1], "scale": True}, kind


@pytest.mark.slow
def test_the_engine_trains_what_the_optimizer_alone_does(reports):
    """The same trajectory up to the order of sums in dense steps; fp32 is recorded as unverified."""
    for rank in reports[1]:
        assert rank["engine_equals_own_loop"]["worst"] < 1e-6
        assert "unverified with fp32 compute" in rank["engine_equals_own_loop"]["unverified"]


@pytest.mark.slow
def test_weighted_windows(reports):
    """Micro-batches of different sizes give the mean over all examples of all ranks."""
    for rank in reports[1]:
        assert rank["windows"]["worst"] < 1e-5
        assert rank["windows"]["dense"] == 4


@pytest.mark.slow
def test_clipping_by_the_global_norm_then_by_the_local_one(reports):
    """The norm that clips is the same on all ranks up to the freeze, and differs after it."""
    for rank in reports[1]:
        assert rank["clipping"]["same"] == [True, True, True, True, False, False]


@pytest.mark.slow
def test_a_wrapped_model_is_not_reduced_either(reports):
    """The reducer of DistributedDataParallel is off, and ours runs in dense steps."""
    for rank in reports[1]:
        assert rank["wrapped"]["dense"] == 2
        assert rank["wrapped"]["same"]


@pytest.mark.slow
def test_rejections(reports):
    """Unverified precisions, shards, one process of several, other optimizers and schedules that differ."""
    for rank in reports[1]:
        texts = rank["rejections"]["texts"]
        for name in ("bf16", "fp32"):
            assert "allow_unverified=True" in texts[name]
        assert "backend='fsdp'" in texts["fsdp"]
        assert "exchanges values with 2 ranks" in texts["single"]
        assert "Leave compute out" in texts["compute"]
        assert f"process_group with the ranks [{rank['rejections']['rank']}]" in texts["group"]
        assert texts["group"].endswith("torch.float32"), "the model was cast before the rejection"
        assert "gradient_release" in texts["release"]
        assert "one optimizer" in texts["mixed"]
        assert "freeze_step" in texts["schedule"]


@pytest.mark.slow
def test_resume_is_bit_exact(reports):
    """Errors, schedules, EMA, and the weights of each rank between two synchronizations are in the checkpoint."""
    for rank in reports[1]:
        found = {name: value for name, value in rank["resume"].items() if " " in name}
        assert len(found) == 6
        assert all(value["equal"] and value["errors"] for value in found.values())
        assert not found["zero_one fp16"]["synchronized"]


@pytest.mark.slow
def test_resume_after_a_kill(reports):
    """Each optimizer, killed two steps after a save in its compressed stage, trains the undisturbed run's bits from there."""
    folder, expected = reports[0], dict.fromkeys(("frozen", "errors", "equal", "schedules"), True)
    cases_of_ranks(PROGRAM, folder, "killed", ranks=2, code=-signal.SIGKILL)
    for (report,) in cases_of_ranks(PROGRAM, folder, "after_kill", ranks=2):
        assert report["kinds"] == dict.fromkeys(("adam", "lamb", "zero_one"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks(reports, ranks):
    """Errors start at zero, the schedule continues, and all ranks have the same weights."""
    for (report,) in cases_of_ranks(PROGRAM, reports[0], "other_ranks", ranks=ranks):
        assert report["errors"] == 0
        assert report["frozen"] == 4
        assert report["same"]
        assert report["dense"] == 0


def test_one_process():
    """Without a process group it trains on this process alone, and the Engine sets what it computes in."""
    model = nn.Linear(4, 2)
    optimizer = OneBitAdam(model.parameters(), freeze_step=2)
    with Engine(model, optimizer, "fp16") as engine:
        for _ in range(4):
            with engine.forward():
                loss = model(torch.randn(3, 4)).float().square().mean()
            engine.backward(loss)
            engine.step()
        assert optimizer.compute == "fp16"
        assert "wire bytes" not in dict(engine.truth().rows)
    assert optimizer.compute is None
    with pytest.raises(SettingError, match="allow_unverified"):
        Engine(nn.Linear(4, 2), OneBitAdam(nn.Linear(4, 2).parameters()), "bf16")
