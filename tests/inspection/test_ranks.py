"""Loops on two gloo ranks: DDP, FSDP2, the Engine and DeepSpeed (tests/inspection_program.py)."""

from pathlib import Path

import pytest

from rank_processes import cases_of_ranks

PROGRAM = Path(__file__).resolve().parents[1] / "inspection_program.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cases():
    """What each rank reported, by case."""
    ranks = cases_of_ranks(PROGRAM, timeout=300)
    return {line["case"]: [rank[i] for rank in ranks] for i, line in enumerate(ranks[0])}


@pytest.fixture(scope="module")
def deepspeed_cases():
    """The same for DeepSpeed."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install halfstep[deepspeed]")
    ranks = cases_of_ranks(PROGRAM, "slow", timeout=600)
    return {line["case"]: [rank[i] for rank in ranks] for i, line in enumerate(ranks[0])}


@pytest.mark.parametrize("name", ["plain_ddp", "mixed_fsdp", "engine_on_ranks"])
def test_correct_runs_are_silent(cases, name):
    """DDP and FSDP2 over fp32 weights, and a lean Engine, are as expected on both ranks."""
    assert [report["error"] for report in cases[name]] == ["", ""]


@pytest.mark.parametrize("name", ["plain_ddp", "compressed_ddp", "mixed_fsdp"])
def test_an_observed_step_has_the_same_bits(cases, name):
    """The weights after a step do not depend on whether it was observed, and ranks stay equal."""
    assert all(report["undisturbed"] and report["same"] for report in cases[name])


def test_a_compressing_hook_is_observed(cases):
    """What DDP sends is fp16, though its gradients are fp32 before and after."""
    for report in cases["compressed_ddp"]:
        assert report["formats"]["reduce"] == {"fp16": 244}
        assert report["formats"]["grads"] == {"fp32": 244}
        assert [line.split()[0] for line in report["error"].splitlines()[2:]] == ["reduce"]


def test_fsdp2_with_16_bit_parameters_is_reported(cases):
    """No master, 16-bit states, reduction and accumulation; counts are of the whole parameters."""
    for report in cases["narrow_fsdp"]:
        rows = {line.split()[0]: line.split()[2] for line in report["error"].splitlines()[2:6]}
        assert rows == {"master": "none", "states": "bf16", "reduce": "bf16", "accumulate": "bf16"}
        assert report["size"] == 244


def test_deepspeed_without_fp32_accumulation_is_reported(deepspeed_cases):
    """Before any step and after one; masters and states are DeepSpeed's fp32 partitions."""
    for report in deepspeed_cases["deepspeed_in_16_bits"]:
        for text in (report["early"], report["error"]):
            assert [line.split()[:3] for line in text.splitlines()[2:3]] == [["accumulate", "fp32", "bf16"]]
            assert len(text.splitlines()) == 4
        assert report["formats"]["reduce"] == {"bf16": 244}
        assert not report["whole"]  # without ZeRO the masters are in one flat tensor


def test_the_engine_on_deepspeed_is_silent(deepspeed_cases):
    """Halfstep's Engine accumulates in fp32 over ZeRO stage 2."""
    assert [report["error"] for report in deepspeed_cases["deepspeed_under_the_engine"]] == ["", ""]


def test_deepspeed_with_fp32_accumulation_is_silent(deepspeed_cases):
    """ZeRO stages 1, 2 and 3 are as expected, layers that DeepSpeed computes by a function of its own included."""
    for report in deepspeed_cases["deepspeed_in_fp32"]:
        assert {stage: each["error"] for stage, each in report["stages"].items()} == {"1": "", "2": "", "3": ""}
