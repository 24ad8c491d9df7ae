"""Parameters that FSDP2 sharded, in raw loops, Accelerate and the Trainer, on two gloo ranks (tests/monitor_shards_program.py)."""

from pathlib import Path

import pytest

from rank_processes import cases_of_ranks

PROGRAM = Path(__file__).resolve().parents[1] / "monitor_shards_program.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """What each rank reported, by case."""
    pytest.importorskip("transformers", reason="Requires: [transformers]")
    pytest.importorskip("accelerate", reason="Requires: [accelerate]")
    ranks = cases_of_ranks(PROGRAM, tmp_path_factory.mktemp("trainer"), timeout=300)
    return {line["case"]: [rank[i] for rank in ranks] for i, line in enumerate(ranks[0])}


@pytest.mark.parametrize("name", ["unscaled", "torch_scaler", "own_scaler"])
def test_samples_are_those_of_the_whole_parameters(cases, name):
    """Gradients, weights and updates are those of one process that trains on the batches of both ranks, whatever the loss scale."""
    expected = cases["whole"][0]["samples"]
    for report in cases[name]:
        assert report["same"]
        assert report["moved"] == [True, False, True, True]
        taken = [sample for sample in report["samples"] if not sample["skipped"]]
        assert [sample["step"] for sample in report["samples"]] == [1, 2, 3, 4]
        for sample, whole in zip(taken, expected, strict=True):
            for kind in ("gradients", "weights"):
                for stats, other in zip(sample[kind], whole[kind], strict=True):
                    assert (stats["name"], stats["numel"]) == (other["name"], other["numel"])
                    assert stats["largest"] == pytest.approx(other["largest"], rel=1e-4)
                    assert stats["smallest"] == pytest.approx(other["smallest"], rel=1e-3)
            assert sample["ratios"] == pytest.approx(whole["ratios"], rel=1e-2)


def test_a_nan_loss_is_an_event_of_its_own_rank(cases):
    """The skip is everybody's, the loss that of rank 1."""
    assert [report["losses"] for report in cases["unscaled"]] == [[], [2]]
    assert all(["skip", 2] in report["events"] for report in cases["unscaled"])


def test_all_ranks_stop_at_the_same_step(cases):
    """With a Guard, torch's scaler and ours, though only rank 1 overflows; each names its own parts without a message."""
    for report in cases["stops"]:
        for kind in ("guard", "torch", "own"):
            assert report[kind]["moved"] == [True, False], kind
            assert report[kind]["same"]
            assert "2 steps" in report[kind]["error"]
            assert ("on this rank" if kind == "own" else "first.weight") in report[kind]["error"], kind
    assert [("second.weight" in report["guard"]["error"]) for report in cases["stops"]] == [True, False]


@pytest.mark.parametrize("name", ["accelerate", "accelerate_scaled"])
def test_accelerate_with_fsdp2_is_watched_and_stopped(cases, name):
    """Skips, samples, the truth table and the hard stop, the same on both ranks."""
    for report in cases[name]:
        assert report["same"]
        assert report["moved"] == [True, False, True, False]
        assert [step for kind, step in report["events"] if kind == "skip"] == [2, 4, 5]
        assert report["samples"][0]["scale"] == (256.0 if name == "accelerate_scaled" else 1.0)
        assert [stats["numel"] for stats in report["samples"][0]["gradients"]] == [20, 5, 5, 1]
        assert "2 steps" in report["error"]
        assert report["master"] == {"fp32": 31}


def test_the_trainer_with_fsdp2_is_watched_and_stopped(cases):
    """As in Accelerate; no NaN reaches the weights."""
    for report in cases["trainer"]:
        assert report["same"]
        assert report["finite"]
        assert [step for kind, step in report["events"] if kind == "skip"] == [2, 4, 5]
        assert "2 steps" in report["error"]
        assert report["weights"] == {"fp32": 31}


def test_a_guard_in_another_loop_agrees_over_its_group(cases):
    """Optimizers that skip on the device and others; without a group sharded parameters are rejected."""
    assert all(report["right"] for report in cases["guard_of_another_loop"])


def test_what_would_hang_is_rejected_on_every_rank(cases):
    """Ranks that sample other steps, and a replay on one rank."""
    assert all("every=2" in report["error"] for report in cases["other_settings"])
    assert all("sharded" in report["error"] for report in cases["no_replay"])


def test_the_first_fsdp_skips_on_all_ranks(cases):
    """Its parameters look like plain tensors, and each rank has others."""
    assert all(report["finite"] and report["skips"] == [1] for report in cases["first_fsdp"])
