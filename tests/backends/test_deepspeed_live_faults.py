"""Each live fault of DeepSpeed, shown on DeepSpeed itself and absent or rejected under Halfstep with the same configuration.

Where 0.19.8 no longer has a fault, or has it in a smaller form, the test asserts what 0.19.8 does. `SHOWN` has the test of
each row of the issue that is about behavior; docs/deepspeed.md names the same tests.
"""

import importlib.metadata
import math
from pathlib import Path

import pytest

from halfstep.precision.deepspeed_faults import FAULTS, faults
from rank_processes import DEEPSPEED, cases_of_ranks

TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "deepspeed_faults_program.py"
HERE, PEER = "backends/test_deepspeed_live_faults.py", "scaling/test_peer_deepspeed.py"
OTHER = "backends/test_deepspeed.py"
STAGES = (1, 2, 3)

SHOWN = {
    "D05": (HERE, "test_a_hysteresis_of_0_never_lowers_the_scale"),
    "D06": (HERE, "test_a_first_scale_below_the_minimum_ends_the_run"),
    "D07": (HERE, "test_a_first_scale_of_2_to_the_32_loses_17_steps"),
    "D08": (HERE, "test_hysteresis_is_ignored_without_zero"),
    "D09": (HERE, "test_an_overflow_at_the_minimum_ends_the_run_without_names"),
    "D10": (HERE, "test_overflows_at_the_minimum_are_skipped_for_ever_without_zero"),
    "D11": (OTHER, "test_bare_engines_are_described_with_their_factors"),
    "D12": (OTHER, "test_bare_engines_are_described_with_their_factors"),
    "D13": (HERE, "test_a_bare_backward_is_divided_by_a_static_scale"),
    "D14": (HERE, "test_a_bare_backward_raises_with_a_dynamic_scale"),
    "D15": (HERE, "test_a_replaced_scale_is_not_used_without_zero"),
    "D16": (OTHER, "test_no_step_is_taken_while_an_engine_is_built"),
    "D17": (HERE, "test_the_reported_norm_is_not_that_of_the_update"),
    "D18": (HERE, "test_experts_are_missing_from_the_norm"),
    "D19": (HERE, "test_the_norm_of_fp32_experts_is_a_mean_of_ranks"),
    "D20": (HERE, "test_the_fused_norm_has_the_gradients_of_experts"),
    "D21": (HERE, "test_bf16_overflows_are_skipped"),
    "D22": (HERE, "test_bf16_overflows_are_skipped"),
    "D23": (HERE, "test_bf16_overflows_are_skipped"),
    "D24": (HERE, "test_one_class_skips_without_a_log_line"),
    "D25": (HERE, "test_nan_gradients_are_applied_in_fp32_without_zero"),
    "D36": (OTHER, "test_gradients_are_added_up_in_fp32"),
    "D37": (HERE, "test_fp32_gradients_are_summed_in_bf16"),
    "D38": (HERE, "test_stage_1_with_fp32_sums_is_another_class"),
    "D39": (HERE, "test_bf16_gradients_overflow_in_fp16_sums"),
    "D40": (HERE, "test_gradients_cross_ranks_in_bf16"),
    "D41": (HERE, "test_fp16_reductions_lose_bf16_gradients"),
    "D61": (HERE, "test_autocast_without_a_dtype_has_no_scaler"),
    "D62": (OTHER, "test_bare_engines_are_described_with_their_factors"),
    "D63": (OTHER, "test_the_scale_falls_after_an_overflow"),
    "D64": (HERE, "test_a_group_is_divided_by_the_scale_of_the_group_before"),
    "D65": (HERE, "test_the_autocast_scale_is_not_saved"),
    "D66": (HERE, "test_two_scalers_divide_twice"),
    "D83": (OTHER, "test_a_resumed_run_keeps_its_own_clipping_norm"),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Every case of the program on two ranks, by name."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install halfstep[deepspeed]")
    version = importlib.metadata.version("deepspeed")
    if version.split("+")[0] != "0.19.8":
        pytest.skip(f"These tests describe DeepSpeed 0.19.8, and {version} is installed")
    lines = cases_of_ranks(PROGRAM, tmp_path_factory.mktemp("faults"), timeout=600, imports=DEEPSPEED)
    return {line[0]["case"]: line for line in map(list, zip(*lines, strict=True))}


# --- the list ---------------------------------------------------------------------------------------------------------


def test_every_fault_has_a_test_that_exists():
    """The rows D05-D25, D36-D41 and D61-D66 of the issue, and D83, each with a test in a file of this suite."""
    expected = [*range(5, 26), *range(36, 42), *range(61, 67), 83]
    assert list(SHOWN) == [f"D{number:02}" for number in expected] == [fault.id for fault in FAULTS]
    for fault, (path, name) in SHOWN.items():
        text = (TESTS / path).read_text()
        assert f"\ndef {name}(" in text, fault
        assert fault in text.split(f"\ndef {name}(")[1].split('"""')[1], (
            f"the docstring of {name} does not name {fault}"
        )


def test_docs_name_the_tests():
    """The table of docs/deepspeed.md ends each row with the test that shows it."""
    page = (TESTS.parent / "docs" / "deepspeed.md").read_text().splitlines()
    for fault, (_, name) in SHOWN.items():
        (row,) = [line for line in page if line.startswith(f"| {fault} |")]
        assert row.endswith(f" | `{name}` |"), fault


# --- the loss scale ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hysteresis_of_0_never_lowers_the_scale(ranks):
    """D05: a gradient that needs a scale of 4 is skipped for ever at 16; Halfstep rejects 0, and 1 trains on both sides."""
    for rank in ranks["endless_hysteresis"]:
        assert rank["bare"] == {"applied": [0] * 8, "scales": [16] * 8, "skipped": 8}
        assert "HS213" in rank["rejection"]
        for side in rank["one"].values():
            assert side["applied"] == [0, 0] + [8192] * 6


@pytest.mark.slow
def test_a_first_scale_below_the_minimum_ends_the_run(ranks):
    """D06: the first overflow raises the scale from 16 to 1024, and the second is a bare Exception; Halfstep rejects it."""
    for rank in ranks["scale_below_minimum"]:
        assert rank["scales"] == [1024]
        assert rank["error"].startswith("Exception: Current loss scale already at minimum")
        assert "HS214" in rank["rejection"]


@pytest.mark.slow
def test_a_first_scale_of_2_to_the_32_loses_17_steps(ranks):
    """D07: gradients of 1 fit at 2^15; Halfstep starts at 2^24 and loses 9 steps."""
    for rank in ranks["large_first_scale"]:
        assert rank["bare"]["applied"] == [0] * 17 + [1] * 3
        assert rank["halfstep"]["applied"] == [0] * 9 + [1] * 11


@pytest.mark.slow
def test_hysteresis_is_ignored_without_zero(ranks):
    """D08: with a hysteresis of 4 three overflows lower the scale to 2, and not at stage 1 or under Halfstep."""
    for rank in ranks["ignored_hysteresis"]:
        scales = {
            f"{stage} {side}": run["scales"] for stage, runs in rank["runs"].items() for side, run in runs.items()
        }
        kept = [16] * 3
        assert scales == {"0 bare": [8, 4, 2], "0 halfstep": kept, "1 bare": kept, "1 halfstep": kept}


@pytest.mark.slow
def test_an_overflow_at_the_minimum_ends_the_run_without_names(ranks):
    """D09: DeepSpeed raises a bare Exception at the second overflow; Halfstep stops after 100 and names the parameter."""
    for rank in ranks["overflows_at_the_minimum"]:
        error, skipped, scale = rank["results"]["bare 1"]
        assert error == (
            "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
        )
        assert (skipped, scale) == (1, 1)
        _check_stop(rank["results"]["halfstep 1"], rank["results"]["scale 1"])


@pytest.mark.slow
def test_overflows_at_the_minimum_are_skipped_for_ever_without_zero(ranks):
    """D10: 20 of 20 steps are skipped without an error; Halfstep stops after 100."""
    for rank in ranks["overflows_at_the_minimum"]:
        assert rank["results"]["bare 0"] == ["", 20, 1]
        _check_stop(rank["results"]["halfstep 0"], rank["results"]["scale 0"])


def _check_stop(message, scale):
    assert message.startswith("OverflowStop: 100 steps in a row were skipped")
    assert "Parameters with non-finite gradients: w" in message
    assert scale == 1


@pytest.mark.slow
def test_a_bare_backward_is_divided_by_a_static_scale(ranks):
    """D13: a gradient of 1 becomes 1/128; Halfstep raises and moves nothing."""
    for rank in ranks["backward_without_the_engine"]:
        assert rank["results"]["bare static"] == ["", 1 / 128]
        message, moved = rank["results"]["halfstep static"]
        assert "write engine.backward(loss)" in message
        assert moved == 0


@pytest.mark.slow
def test_a_bare_backward_raises_with_a_dynamic_scale(ranks):
    """D14: DeepSpeed raises, and so does Halfstep."""
    for rank in ranks["backward_without_the_engine"]:
        message, moved = rank["results"]["bare dynamic"]
        assert message.startswith("RuntimeError: Loss scaling is required")
        own_message, own_moved = rank["results"]["halfstep dynamic"]
        assert "write engine.backward(loss)" in own_message
        assert moved == own_moved == 0


@pytest.mark.slow
def test_a_replaced_scale_is_not_used_without_zero(ranks):
    """D15: stage 0 reports a scale of 2 and divides by 16 what it never scaled; ZeRO and Halfstep use the new scale."""
    for rank in ranks["replaced_scale"]:
        reported = {"reported 0": 2, "reported 1": 2, "reported halfstep": 2}
        assert rank["applied"] == reported | {"bare 0": 1 / 16, "bare 1": 1, "halfstep": 1}
        assert rank["direct"].startswith("RuntimeError: Direct calls")  # the wrapper's own backward, which would scale


@pytest.mark.slow
def test_the_reported_norm_is_not_that_of_the_update(ranks):
    """D17: with a scale of 128 the reported norm is 128 times that of the applied gradient; under Halfstep they are equal."""
    for rank in ranks["reported_norm"]:
        norm, applied = rank["norms"]["bare"]
        assert norm / applied == pytest.approx(128)
        assert rank["norms"]["halfstep"] == pytest.approx([math.sqrt(8)] * 2)


@pytest.mark.slow
def test_fp16_starts_on_every_cpu(ranks):
    """DeepSpeed rejects fp16 (D32) where oneDNN has no fp16 products; Halfstep trains there, and leaves DeepSpeed's answer as it is."""
    for rank in ranks["cpu_without_fp16_products"]:
        assert rank["error"].startswith("ValueError: Type fp16 is not supported")
        assert rank["applied"] == [1]
        assert rank["kept"] is False


# --- mixture of experts -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_experts_are_missing_from_the_norm(ranks):
    """D18: the norm is that of the dense weight, 1, so a clipping norm of 1 clips nothing, and the update has 2.69."""
    for rank in ranks["expert_norms"]:
        assert rank["norms"]["unfused bf16"] == pytest.approx(1)
        assert rank["sizes"]["unfused bf16"] == pytest.approx(_expert_norm(), rel=1e-2)
        _check_experts_rejected(rank)


@pytest.mark.slow
def test_the_norm_of_fp32_experts_is_a_mean_of_ranks(ranks):
    """D19: the update is longer than the clipping norm of 1 by the true norm over the mean of those of the ranks."""
    for rank in ranks["expert_norms"]:
        mean = (math.hypot(1, 1.5) + math.hypot(1, 2)) / 2
        assert rank["sizes"]["fp32"] == pytest.approx(_expert_norm() / mean, rel=1e-4)
        _check_experts_rejected(rank)


@pytest.mark.slow
def test_the_fused_norm_has_the_gradients_of_experts(ranks):
    """D20: 0.19.8 computes it from gradients, and the update has the clipping norm; up to 0.19.7 it was that of weights."""
    for rank in ranks["expert_norms"]:
        assert rank["norms"]["fused bf16"] == pytest.approx(_expert_norm(), rel=1e-5)
        assert rank["sizes"]["fused bf16"] == pytest.approx(1, rel=1e-2)
        _check_experts_rejected(rank)


def _expert_norm():
    """The norm of the dense gradient and of the experts' on both ranks, which DeepSpeed divides by the number of ranks."""
    return math.hypot(1, 3 / 2, 4 / 2)


def _check_experts_rejected(rank):
    assert rank["messages"].keys() == {"ddp", "fsdp", "deepspeed"}
    for message in rank["messages"].values():
        assert message.startswith("SettingError: ")
        assert "marked as experts of this rank" in message


# --- overflows without a scale ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bf16_overflows_are_skipped(ranks):
    """D21, D22, D23: 0.19.8 skips and counts a NaN, and zero gradients are no error; up to 0.19.7 they were applied or raised."""
    classes = {"D21": "FP16_Optimizer", "D22": "DeepSpeedZeroOptimizer_Stage3", "D23": "BF16_Optimizer"}
    for rank in ranks["overflows_without_scaling"]:
        for name, optimizer in classes.items():
            result = rank["results"][name]
            assert result["class"] == optimizer
            assert result["bare"] == result["halfstep"] == [0, 0, 1]
            assert result["skipped"] == result["halfstep skipped"] == 1


@pytest.mark.slow
def test_one_class_skips_without_a_log_line(ranks):
    """D24: 0.19.8 logs a skipped step of ZeRO on rank 0, and BF16_Optimizer still does not; Halfstep counts both."""
    logged = [
        {name: rank["results"][name]["logged"] for name in rank["results"]}
        for rank in ranks["overflows_without_scaling"]
    ]
    assert logged[0]["D24 1"]
    assert logged[0]["D24 2"]
    assert not any(each["D23"] for each in logged)
    for rank in ranks["overflows_without_scaling"]:
        assert {result["halfstep skipped"] for result in rank["results"].values()} == {1}
    sums = {"data_types": {"grad_accum_dtype": "fp32"}}
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    assert "D24" in {fault.id for fault in faults("0.19.8", config | sums)}
    assert "D24" not in {fault.id for fault in faults("0.19.8", config)}


@pytest.mark.slow
def test_nan_gradients_are_applied_in_fp32_without_zero(ranks):
    """D25: the weight is NaN from then on, and no step was skipped; Halfstep skips one."""
    for rank in ranks["overflows_without_scaling"]:
        result = rank["results"]["D25"]
        assert result["bare"] == [None] * 3
        assert result["skipped"] == 0
        assert result["halfstep"] == [0, 0, 1]
        assert result["halfstep skipped"] == 1


# --- sums and reductions ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fp32_gradients_are_summed_in_bf16(ranks):
    """D37: 256 and 63 times 1 is 256 at stages 1 and 3; stage 2 ignores the setting; Halfstep rejects it at each."""
    for rank in ranks["sixteen_bit_sums_of_fp32"]:
        means = {stage: rank["results"][f"D37 {stage}"][0] for stage in STAGES}
        assert means == {1: 256 / 64, 2: rank["true"], 3: 256 / 64}
        assert all("HS223" in rank["results"][f"D37 {stage}"][1] for stage in STAGES)


@pytest.mark.slow
def test_bf16_gradients_overflow_in_fp16_sums(ranks):
    """D39: gradients of 2^18 skip the step at stages 1 and 3, without an error; stage 2 ignores the setting; Halfstep rejects it."""
    for rank in ranks["sixteen_bit_sums_of_fp32"]:
        outcomes = {stage: rank["results"][f"D39 {stage}"][:3] for stage in STAGES}
        assert outcomes == {1: ["", 0, 1], 2: ["", 2**18, 0], 3: ["", 0, 1]}
        assert all("HS222" in rank["results"][f"D39 {stage}"][3] for stage in STAGES)


@pytest.mark.slow
def test_stage_1_with_fp32_sums_is_another_class(ranks):
    """D38: it has no loss scaler, and other keys in its files; Halfstep shows the class, and stages read each other's checkpoints."""
    for rank in ranks["another_optimizer_class"]:
        assert rank["classes"] == {"1": ["BF16_Optimizer", False], "2": ["DeepSpeedZeroOptimizer", True]}
        assert set(rank["files"]["2"]) - set(rank["files"]["1"]) >= {"loss_scaler", "overflow", "zero_stage"}
        assert rank["rows"]["1"].endswith("ZeRO stage 1, BF16_Optimizer")
        assert rank["rows"]["2"].endswith("ZeRO stage 2, DeepSpeedZeroOptimizer")
        assert rank["rows"]["1 to 2"] == rank["rows"]["2 to 1"] == 1


@pytest.mark.slow
def test_gradients_cross_ranks_in_bf16(ranks):
    """D40: the mean of 256 and 1 is 128 with DeepSpeed's default, and 128.5 with its fp32 setting and under Halfstep."""
    for rank in ranks["reductions"]:
        for stage in STAGES:
            assert rank["results"][f"D40 {stage}"] == [128, 128.5, 128.5]


@pytest.mark.slow
def test_fp16_reductions_lose_bf16_gradients(ranks):
    """D41: 2^17 is skipped, and 2^-30 is applied as 0; Halfstep rejects fp16 reductions and applies both by default."""
    for rank in ranks["reductions"]:
        for stage in STAGES:
            values, own, rejection = rank["results"][f"D41 {stage}"]
            assert values == [0, 1, 0, 0]  # applied and skipped, twice
            assert own == [2**17, 2**-30]
            assert "HS222" in rejection


# --- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_autocast_without_a_dtype_has_no_scaler(ranks):
    """D61: at no stage, although torch runs fp16 on a GPU by default; Halfstep rejects it. What a GPU trains is not shown here."""
    for rank in ranks["autocast_without_a_dtype"]:
        stages = (0, 2, 3)
        assert rank["scalers"] == {f"none {s}": False for s in stages} | {f"float16 {s}": True for s in stages}
        assert rank["cuda"] == "torch.float16"
        assert "HS203" in rank["rejection"]


@pytest.mark.slow
def test_a_group_is_divided_by_the_scale_of_the_group_before(ranks):
    """D64: the counter of growth is updated twice a step, and the second group gets half of its gradient when the scale grew."""
    for rank in ranks["autocast_groups"]:
        assert rank["bare"] == [[1, 1], [1, 0.5], [1, 1]]
        assert rank["scale"] == 2**18  # grown twice in three steps, with a growth interval of 3
        assert rank["halfstep"] == [[1, 1]] * 3
        assert rank["halfstep scale"] == 2**7  # grown in each of three steps


@pytest.mark.slow
def test_the_autocast_scale_is_not_saved(ranks):
    """D65: it is 65536 again after a resume; Halfstep's is that of the checkpoint."""
    for rank in ranks["autocast_resume"]:
        assert rank["scales"]["bare 0"] == [32768, 65536]
        assert rank["scales"]["bare 2"] == [131072, 65536]
        for stage in (0, 2):
            before, after = rank["scales"][f"halfstep {stage}"]
            assert before == after < 65536


@pytest.mark.slow
def test_two_scalers_divide_twice(ranks):
    """D66: with scales of 65536 and 256 the update is 256 times too small, and the norm 256 times too large; Halfstep rejects it."""
    for rank in ranks["two_scalers"]:
        assert rank["applied"] == 1 / 256
        assert rank["norm"] == pytest.approx(65536 / 256)
        assert "HS202" in rank["rejection"]
