"""What a DeepSpeed configuration decides: yes, no, or nothing."""

import json

import pytest

from halfstep.check.config.config import Config, read_configs
from halfstep.check.config.deepspeed_facts import DeepSpeed, version_text
from halfstep.check.files.source import Settings, Source
from halfstep.precision.node import Block, Span


def facts(values, **settings):
    text = json.dumps({"train_micro_batch_size_per_gpu": 1, "steps_per_print": 1, **values})
    (config,) = read_configs(Source("ds.json", text, "json"), Settings(**settings))
    return DeepSpeed(config)


@pytest.mark.parametrize(
    ("zero", "stage"),
    [({"stage": 3}, 3), ({}, 0), (True, 1), (False, 0), ({"stage": "2"}, 2), ({"stage": "auto"}, None), ([], None)],
)
def test_the_stage_is_read_in_every_form(zero, stage):
    """Blocks, booleans and numbers in quotes are stages; auto is not decided."""
    assert facts({"zero_optimization": zero}).stage == stage


def test_without_the_key_the_stage_is_zero():
    """ZeRO is off by default."""
    assert facts({}).stage == 0


@pytest.mark.parametrize(
    ("block", "on"),
    [
        ({"enabled": True}, True),
        ({"enabled": "true"}, True),
        ({}, False),
        (None, False),
        ({"enabled": "auto"}, None),
        (True, None),
    ],
)
def test_a_mode_is_on_off_or_undecided(block, on):
    """What DeepSpeed coerces counts as it counts there."""
    assert facts({"fp16": block}).fp16 is on


def test_the_old_name_of_bf16_counts_alone():
    """bfloat16 is read only if there is no bf16 block."""
    assert facts({"bfloat16": {"enabled": True}}).bf16
    assert facts({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}}).bf16 is False


@pytest.mark.parametrize(
    ("values", "weights"),
    [
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({}, "fp32"),
        ({"fp16": {"enabled": "auto"}}, None),
    ],
)
def test_the_format_of_the_weights_follows_the_mode(values, weights):
    """fp32 only where both modes are certainly off."""
    assert facts(values).weights == weights


@pytest.mark.parametrize(
    ("zero", "offloads"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, True),
        ({"offload_optimizer": {"device": "none"}}, False),
        ({"cpu_offload": True}, True),
        ({"offload_optimizer": {"device": "auto"}}, None),
        ({}, False),
    ],
)
def test_offloading_is_read_in_both_forms(zero, offloads):
    """The block and the flag before it."""
    assert facts({"zero_optimization": {"stage": 2, **zero}}).offloads_optimizer is offloads


def test_an_open_configuration_decides_nothing():
    """Where keys cannot be read, no mode is certainly off."""
    config = Config("deepspeed", Block(Span(0, 0), (), open=True), Source("x.py", "", "python"), Settings())
    deepspeed = DeepSpeed(config)
    assert (deepspeed.stage, deepspeed.fp16, deepspeed.bf16, deepspeed.weights) == (None, None, None, None)


def test_versions_are_compared_or_unknown():
    """Before, from, and not known."""
    assert facts({}, deepspeed=(0, 19, 8)).since(0, 19, 8) is True
    assert facts({}, deepspeed=(0, 9, 5)).since(0, 19, 8) is False
    assert facts({}).since(0, 19, 8) is None
    assert version_text((0, 19, 8)) == "0.19.8"


def test_a_file_of_gpt_neox_is_known_by_its_keys():
    """Both spellings of its keys; a plain configuration is not one."""
    assert facts({"pipe-parallel-size": 1, "num-layers": 12}).is_neox
    assert facts({"model_parallel_size": 2, "num_layers": 12}).is_neox
    assert not facts({"fp16": {"enabled": True}}).is_neox
