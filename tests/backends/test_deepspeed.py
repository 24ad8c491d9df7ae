"""ZeRO under the Engine, and DeepSpeed's own faults, on two gloo ranks; settings and rejections without DeepSpeed."""

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch

from halfstep.backends import make_backend
from halfstep.backends.deepspeed import DeepSpeed, ZeroStage0, deepspeed_backend
from halfstep.backends.deepspeed.checks import adapt_policy, check_optimizers
from halfstep.backends.deepspeed.library import require_version
from halfstep.backends.deepspeed.selftest import LIMIT, Reached, sample
from halfstep.backends.deepspeed.settings import engine_config, read_config, stage_of
from halfstep.errors import MissingError, SettingError
from halfstep.planning.ranks.shards import Part, count_parts
from halfstep.planning.ranks.zero import zero_bytes
from halfstep.precision.policy import Policy
from rank_processes import DEEPSPEED, cases_of_ranks

PROGRAM = Path(__file__).parents[1] / "deepspeed_program.py"
STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Every case of the program on two ranks, by name."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install halfstep[deepspeed]")
    lines = cases_of_ranks(PROGRAM, tmp_path_factory.mktemp("deepspeed"), timeout=1200, imports=DEEPSPEED)
    return {line[0]["case"]: line for line in map(list, zip(*lines, strict=True))}


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """A few cases on four ranks."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install halfstep[deepspeed]")
    names = ("few_elements", "windows", "overflows")
    lines = cases_of_ranks(PROGRAM, tmp_path_factory.mktemp("four"), *names, ranks=4, timeout=1200, imports=DEEPSPEED)
    return {line[0]["case"]: line for line in map(list, zip(*lines, strict=True))}


# --- the same numbers as one process ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_stage_trains_as_one_process(ranks):
    """Weights and norms of clipped runs with weighted windows; 16-bit weights differ by the rounding of single gradients."""
    for rank in ranks["curves"]:
        assert len(rank["far"]) == 5 * 2 * 4
        for setting, (weights, norms) in rank["far"].items():
            lean = "lean" in setting
            assert weights < (1e-3 if lean else 1e-6), setting
            assert norms < (1e-2 if lean else 1e-5), setting


@pytest.mark.slow
def test_the_optimizer_gets_the_gradient_of_one_process(ranks):
    """With betas of 0 the first moment is the gradient, at every stage, also on the step after the scale has grown."""
    for rank in ranks["first_moments"]:
        for setting, distances in rank["far"].items():
            assert max(distances) < (5e-3 if "lean" in setting else 1e-6), setting
        assert any(len(set(scales)) > 1 for scales in rank["scales"].values())


@pytest.mark.slow
def test_modules_compute_in_fp32_on_16_bit_weights(ranks):
    """`compute_fp32` works at every stage: gradients of one process, fp32 outputs, and weights that stay 16-bit."""
    for rank in ranks["fp32_on_16_bit_weights"]:
        assert len(rank["far"]) == 2 * 4
        assert max(rank["far"].values()) < 5e-3, rank["far"]
        for setting, (weights, outputs) in rank["formats"].items():
            assert outputs == ["torch.float32"], setting
            assert weights == ["torch.bfloat16" if setting.startswith("bf16") else "torch.float16"], setting


@pytest.mark.slow
def test_scales_and_skips_are_those_of_the_deepspeed_semantics(ranks):
    """An overflow on one rank or the other: every stage follows LossScaler(semantics="deepspeed"), on all ranks."""
    for rank in ranks["overflows"]:
        assert len(rank["outcomes"]) == 2 * 4
        for setting, outcomes in rank["outcomes"].items():
            assert outcomes == rank["expected"], setting


@pytest.mark.slow
def test_a_skipped_update_changes_nothing(ranks):
    """Weights, masters, moments, step counts and buffers have the same bits, and the next update happens."""
    for rank in ranks["skips_change_nothing"]:
        assert rank["equal"]
        assert all(outcome == [True, True, True] for outcome in rank["equal"].values()), rank


@pytest.mark.slow
def test_a_hard_stop_names_the_gradients_of_this_rank(ranks):
    """After max_skips skipped updates, at every stage."""
    for rank in ranks["hard_stops"]:
        assert len(rank["messages"]) == len(STAGES)
        for message in rank["messages"].values():
            assert "3 steps in a row were skipped" in message
            assert "Parameters with non-finite gradients: " in message


@pytest.mark.slow
def test_windows_are_those_of_one_process(ranks):
    """Short windows, two losses of one micro-batch, and a window that is dropped."""
    for rank in ranks["windows"]:
        assert max(rank["far"].values()) < 1e-6, rank


@pytest.mark.slow
def test_tied_and_frozen_weights_train_as_in_one_process(ranks):
    """With a recomputed layer, and a checkpoint that is saved and loaded on the way."""
    for rank in ranks["tied_and_frozen"]:
        for setting, far in rank["far"].items():
            assert far < (1e-3 if "lean" in setting else 1e-6), setting


@pytest.mark.slow
def test_four_ranks_train_as_one_process(four_ranks):
    """Also where some of them have nothing to step."""
    for few, windows, overflows in zip(
        *(four_ranks[name] for name in ("few_elements", "windows", "overflows")), strict=True
    ):
        assert max(few["far"].values()) < 1e-3
        assert max(windows["far"].values()) < 1e-6
        assert len(overflows["outcomes"]) == 4
        assert all(outcomes == overflows["expected"] for outcomes in overflows["outcomes"].values())


@pytest.mark.slow
def test_evaluation_and_ema_follow_one_process(ranks):
    """Validation on the EMA at stages 1 and 2, and validation between updates at stage 3."""
    for rank in ranks["evaluation_and_ema"]:
        assert max(rank["far"].values()) < 1e-6, rank


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(ranks):
    """Saved and resumed at stages 1 to 3, in fp32 and lean presets, on all ranks."""
    for rank in ranks["checkpoints"]:
        assert len(rank["exact"]) == 3 * 3
        assert all(rank["exact"].values()), rank["exact"]


@pytest.mark.slow
def test_checkpoints_move_between_backends(ranks):
    """One process, ddp and fsdp continue from a checkpoint of ZeRO, and another stage from theirs."""
    for rank in ranks["checkpoints"]:
        assert len(rank["far"]) == 6 * 4
        for setting, far in rank["far"].items():
            assert far < (1e-3 if "lean" in setting else 1e-6), setting


@pytest.mark.slow
def test_masters_and_states_on_the_cpu_train_as_one_process(ranks):
    """With clipping, a skipped update, weighted windows, unused parameters and a resume, which has the same bits."""
    for rank in ranks["offloaded"]:
        assert len(rank["far"]) == 3 * 3
        for setting, far in rank["far"].items():
            assert far < (1e-3 if "lean" in setting else 1e-6), setting
        assert rank["exact"] == {"1": True, "2": True, "3": True}
        assert set(rank["moved"].values()) == {0}
        assert rank["row"].endswith("on the CPU")


# --- watching ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_watch_sees_whole_gradients_and_updates(ranks):
    """Sizes, extremes and updates of all fragments together are those of one process; weights are the fp32 masters."""
    for rank in ranks["watched"]:
        assert len(rank["reports"]) == 2 * 3 + 1
        for setting, found in rank["reports"].items():
            lean = "lean" in setting
            assert found["numels"], setting
            assert found["moving"], setting
            assert found["same"], setting
            assert found["extremes"] < (2e-2 if lean else 1e-4), setting
            assert found["ratios"] < (2e-2 if lean else 1e-4), setting
            (step, message), (own_step, own_message) = found["skip"]
            assert own_step == step == 4
            assert own_message == message, setting


# --- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_planner_predicts_what_ranks_store(ranks):
    """Weights, gradients, masters and states of every stage, to the byte, with the whole gradients at stage 2 in fp32."""
    for number, rank in enumerate(ranks["stored_bytes"]):
        assert len(rank["stored"]) == 3 * 3
        surplus = 4 * elements_beyond(rank["sizes"], number, 2)
        assert surplus > 0
        for setting, stored in rank["stored"].items():
            precision, stage = setting.split()
            policy = Policy.parse(precision)
            shape, size = (sum(rank["sizes"]),), 4 if policy.params == "fp32" else 2
            parts = [Part("weights", shape, size), Part("gradients", shape, size), Part("states", shape, 8)]
            predicted = zero_bytes(count_parts(parts), int(stage), 2, weights=policy.params)
            predicted["gradients"] += surplus if setting == "fp32 2" else 0
            assert stored == predicted, (setting, number)


def elements_beyond(sizes, rank, num_ranks):
    """The elements that other ranks step, of parameters of which this rank steps a fragment."""
    share, beyond, at = sum(sizes) // num_ranks, 0, 0
    for size in sizes:
        own = min(at + size, (rank + 1) * share) - max(at, rank * share)
        beyond += size - own if own > 0 else 0
        at += size
    return beyond


# --- the first update -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_wrong_gradient_stops_the_run(ranks):
    """A factor of one half between reduction and optimizer is reported with the ratio, and no weight has moved."""
    for rank in ranks["wrong_gradients_stop"]:
        assert len(rank["found"]) == 3 * 2
        for setting, (message, moved) in rank["found"].items():
            assert "0.5 times the true gradient" in message, setting
            assert moved == 0, setting
        assert rank["row"].startswith("1 times the true gradient")


@pytest.mark.slow
def test_what_zero_cannot_do_is_rejected(ranks):
    """Each with its reason; nothing is accepted silently."""
    expected = {
        "batch norm": "stay in fp32",
        "two optimizers": "one optimizer",
        "adafactor": "zero_allow_untested_optimizer",
        "adagrad": "builds Adagrad again",
        "lean": "masters of its own",
        "8bit": "states=8bit",
        "keep_fp32": "keep_fp32=head",
        "compile": "compile=True",
        "ema": "stage 3 partitions the weights",
        "release": "gradient_release",
        "offload": "offload_optimizer",
        "clipping": "gradient_clipping",
        "precision": "fp16.enabled",
        "unscale": "param.grad",
        "optimizer.step": "in addition to engine.step()",
        "retain_graph": "retain_graph=True",
        "unfrozen": "were frozen",
    }
    for rank in ranks["rejections"]:
        assert rank["messages"].keys() == expected.keys()
        for name, words in expected.items():
            assert words in rank["messages"][name], name


# --- faults of DeepSpeed, and the same experiment here ----------------------------------------------------------------


@pytest.mark.slow
def test_bare_engines_are_described_with_their_factors(ranks):
    """D11: fp16 without ZeRO divides by a scale that was not applied; D12: halved when the scale grows; D62: clipped while scaled."""
    for rank in ranks["bare_factors"]:
        ratios, faults = rank["ratios"], rank["faults"]
        assert all(ratio < 0.1 for ratio in ratios["fp16 stage 0"])
        for stage in STAGES:
            assert ratios[f"fp16 stage {stage}"] == pytest.approx([1, 1, 0.5, 1], abs=LIMIT)
            assert "D12" in faults[f"fp16 stage {stage}"]
        for right in ("bf16 stage 1", "fp32 stage 0", "fp32 stage 2"):
            assert ratios[right] == pytest.approx([1] * 4, abs=LIMIT)
        assert all(ratio is not None and ratio < 0.5 for ratio in ratios["autocast fp16 clipped stage 2"])
        assert {"D11", "D16"} <= set(faults["fp16 stage 0"])
        assert {"D62", "D63"} <= set(faults["autocast fp16 clipped stage 2"])
        assert faults["fp32 stage 2"] == ["D83"]


@pytest.mark.slow
def test_gradients_are_added_up_in_fp32(ranks):
    """D36: the mean of 512 gradients of 1 is 0.5 in DeepSpeed's bf16 sums, and 1 here; 256 and 63 times 1 is 256 and 319."""
    for rank in ranks["sixteen_bit_sums"]:
        applied = rank["applied"]
        assert applied["bare 2"] == 0.5
        assert applied["true 2"] == 1
        for stage in STAGES:
            assert applied[f"bare {stage}"] < 0.85 * applied[f"true {stage}"]
            assert applied[f"halfstep {stage}"] == applied[f"true {stage}"]


@pytest.mark.slow
def test_the_scale_falls_after_an_overflow(ranks):
    """D63: torch_autocast fp16 of DeepSpeed skips for ever, as its scale never falls; D71: later engines inherit its scaler."""
    for rank in ranks["endless_skips"]:
        assert rank["applied"]["bare"] == [False] * 8
        ours = rank["applied"]["halfstep"]
        assert not ours[0]
        assert ours[-4:] == [True] * 4
        assert "torch_autocast" in rank["message"]


@pytest.mark.slow
def test_no_step_is_taken_while_an_engine_is_built(ranks):
    """D16: DeepSpeed's 16-bit stage 0 starts with a step count of 1."""
    for rank in ranks["phantom_steps"]:
        assert rank["steps"] == {"bare": 1, "halfstep": 0}


@pytest.mark.slow
def test_schedules_of_a_configuration_are_those_of_deepspeed(ranks):
    """The rate of every update, from the first on."""
    for rank in ranks["schedules"]:
        assert max(rank["far"]) < 1e-12


@pytest.mark.slow
def test_a_resumed_run_keeps_its_own_clipping_norm(ranks):
    """D83: DeepSpeed replaces the configured norm by that of the checkpoint."""
    for rank in ranks["resumed_settings"]:
        assert rank["norms"] == {"bare": 1.0, "halfstep": 0.25}


@pytest.mark.slow
def test_an_unused_parameter_does_not_move(ranks):
    """Stage 3 of DeepSpeed gives a parameter that a window does not use its gradient of the window before."""
    for rank in ranks["unused_parameters"]:
        moved = rank["moved"]
        assert moved["bare 3"] > 0.01
        assert [moved[f"halfstep {stage}"] for stage in STAGES] == [0, 0, 0]


# --- settings, without DeepSpeed --------------------------------------------------------------------------------------


def test_the_stage_comes_from_the_argument_or_the_configuration(tmp_path):
    """They must agree; the default is 2, and stage 0 is Halfstep's own data parallelism."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    assert stage_of(read_config(path), None) == 3
    assert stage_of({}, 1) == 1
    assert stage_of({}, None) == 2
    assert stage_of({"zero_optimization": True}, None) == 1  # the form of older releases
    assert stage_of({"gradient_clipping": 1.0}, None) == 0  # as in DeepSpeed
    with pytest.raises(SettingError, match=r"stage=1.*stage=3"):
        stage_of(read_config(path), 1)
    with pytest.raises(SettingError, match="must be 0, 1, 2 or 3"):
        stage_of({"zero_optimization": {"stage": 4}}, None)
    assert isinstance(deepspeed_backend(stage=0), ZeroStage0)
    with pytest.raises(SettingError, match="stage 0 partitions nothing"):
        DeepSpeed(stage=0)
    backend = make_backend("deepspeed", torch.nn.Linear(1, 1))
    assert isinstance(backend, DeepSpeed)
    assert backend.stage == 2


def test_an_old_or_missing_deepspeed_is_named(monkeypatch):
    """With the line that installs it."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.18.2")
    with pytest.raises(SettingError, match=r"0\.18\.2.*deepspeed>=0\.19\.8"):
        require_version()
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.20.0+cpu")
    assert require_version() == "0.20.0+cpu"

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(MissingError, match=r"halfstep\[deepspeed\]"):
        require_version()


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """A missing file, and one that is not an object."""
    with pytest.raises(SettingError, match=r"missing\.json"):
        read_config(tmp_path / "missing.json")
    path = tmp_path / "list.json"
    path.write_text("[1]")
    with pytest.raises(SettingError, match="not an object"):
        read_config(path)


def config_of(config, precision="bf16-lean", stage=2, max_norm=None, accumulate=1):
    """The configuration for DeepSpeed."""
    return engine_config(config, Policy.parse(precision), stage, max_norm=max_norm, accumulate=accumulate).config


def test_halfstep_decides_scale_clipping_and_formats():
    """A static scale of 1, no clipping, fp32 sums and the policy's reduction, whatever is left out."""
    config = config_of({}, "fp16-lean")
    assert config["fp16"] == {"enabled": True, "loss_scale": 1.0}
    assert config["gradient_clipping"] == 0
    assert config["data_types"]["grad_accum_dtype"] == "fp32"
    assert config["communication_data_type"] == "fp32"
    assert config_of({}, "bf16-lean,reduce=bf16")["communication_data_type"] == "bf16"
    assert "fp16" not in config_of({}, "fp16")  # autocast is Halfstep's
    assert config_of({}, stage=1)["zero_optimization"] == {"stage": 1, "overlap_comm": False}


def test_keys_that_agree_are_accepted_and_others_passed_on():
    """Equal values and "auto" are dropped, ZeRO's tuning reaches DeepSpeed."""
    config = {
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": "auto",
        "train_batch_size": 64,
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "offload_optimizer": {"device": "none"}},
        "wall_clock_breakdown": False,
    }
    merged = config_of(config, max_norm=1.0, accumulate=4)
    assert merged["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}
    assert merged["wall_clock_breakdown"] is False
    assert merged["train_micro_batch_size_per_gpu"] == 16
    assert merged["gradient_accumulation_steps"] == 1
    assert "train_batch_size" not in merged


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fp16": {"enabled": True}}, "fp16-lean"),
        ({"torch_autocast": {"enabled": True}}, "autocast"),
        ({"amp": {"enabled": True}}, "removed Apex AMP"),
        ({"gradient_clipping": 1.0}, "gradient_clipping=1.0"),
        ({"gradient_accumulation_steps": 8}, "gradient_accumulation_steps=8"),
        ({"communication_data_type": "fp16"}, "communication_data_type='fp16'"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "stagnate"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "nvme"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients"),
        ({"zero_optimization": [2]}, "must be an object"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_keys_that_contradict_the_engine_are_errors(config, words):
    """With the key, its value and what to write instead."""
    with pytest.raises(SettingError, match=words):
        config_of(config)


def test_offloading_is_to_the_cpu_and_of_everything():
    """A disabled block is dropped, the CPU is passed on, and a part of the states is rejected at stage 3 (HS234 before it)."""
    cpu = {"device": "cpu", "pin_memory": True}
    merged = config_of({"zero_optimization": {"offload_optimizer": cpu}})
    assert merged["zero_optimization"]["offload_optimizer"] == cpu
    assert merged["zero_force_ds_cpu_optimizer"] is False
    with pytest.raises(SettingError, match=r"ratio=0\.5"):
        config_of({"zero_optimization": {"offload_optimizer": cpu | {"ratio": 0.5}}}, stage=3)


def test_policies_become_what_zero_stores():
    """Split masters become fp32 partitions; other states, no masters and 16-bit sums are rejected."""
    assert adapt_policy(Policy.parse("bf16-lean"), 2).master == "fp32"
    assert adapt_policy(Policy.parse("fp16"), 2) == Policy.parse("fp16")
    assert adapt_policy(Policy.parse("bf16-lean,compute_fp32=head"), 2).compute_fp32 == ("head",)
    for text in ("bf16-lean,states=8bit", "bf16-lean,master=none", "bf16-lean,keep_fp32=head", "bf16-lean,grads=bf16"):
        with pytest.raises(SettingError, match="deepspeed"):
            adapt_policy(Policy.parse(text), 2)


def test_an_unknown_optimizer_needs_the_flag(caplog):
    """DeepSpeed's own flag accepts it, with a warning about what it sees."""

    class Mine(torch.optim.SGD):
        pass

    optimizer = Mine([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(SettingError, match="zero_allow_untested_optimizer"):
        check_optimizers([optimizer], {})
    check_optimizers([optimizer], {"zero_allow_untested_optimizer": True})
    assert "flat 1/N parts" in caplog.text


def test_samples_reach_from_the_first_parameter_to_the_last():
    """Few of many, and one of a model whose parameters are all large."""
    params = {f"p{i}": torch.empty(3) for i in range(100)}
    chosen = list(sample(params))
    assert chosen[0] == "p0"
    assert chosen[-1] == "p99"
    assert len(chosen) == 4
    large = {"a": torch.empty(2**23, device="meta"), "b": torch.empty(2**24, device="meta")}
    assert list(sample(large)) == ["a"]
    assert len(sample({"only": torch.empty(1)})) == 1


def test_a_comparison_keeps_the_worse_part():
    """Two groups of one step are one outcome."""
    right, wrong = Reached(1.0, 1e-7, 10), Reached(0.5, 0.5, 4)
    assert right.is_right
    assert right.joined(wrong) == Reached(0.5, 0.5, 14)
    assert not right.joined(wrong).is_right
