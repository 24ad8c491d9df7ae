"""Every key of a DeepSpeed configuration is read, set aside with a note, or rejected with the reason."""

import json
import logging
import math
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.check.registry import find_rule
from halfstep.errors import HalfstepError, SettingError
from halfstep.precision import policy as policy_module
from halfstep.precision.deepspeed_keys import BLOCKS, NOT_READ, READ, REJECTED
from halfstep.precision.policy import Policy, read_deepspeed

ROOT = Path(__file__).resolve().parents[2]
ON = {"enabled": True}


def fp16(**settings):
    """An fp16 configuration under ZeRO with nothing else left to note."""
    quiet = {"gradient_clipping": 1.0, "communication_data_type": "fp32", "gradient_accumulation_steps": 1}
    return {"fp16": {"enabled": True} | settings, "zero_optimization": {"stage": 2}} | quiet


MAPPED = [
    ({}, "fp32"),
    ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "fp32"),
    ({"bf16": ON}, "bf16-lean"),
    ({"bfloat16": ON}, "bf16-lean"),
    ({"bf16": None, "bfloat16": ON}, "bf16-lean"),
    ({"fp16": ON}, "fp16-lean"),
    (fp16(), "fp16-lean,reduce=fp32"),
    (fp16(loss_scale=0), "fp16-lean"),
    (fp16(loss_scale=128), "fp16-lean,loss_scale=128"),
    (fp16(hysteresis=1), "fp16-lean,loss_scale=dynamic(hysteresis=1)"),
    (fp16(initial_scale_power=12), "fp16-lean,loss_scale=dynamic(init_scale=4096)"),
    (fp16(initial_scale_power=32), "fp16-lean,loss_scale=dynamic(init_scale=16777216)"),
    (fp16(initial_scale_power=10**9), "fp16-lean,loss_scale=dynamic(init_scale=16777216)"),
    (fp16(loss_scale_window=500), "fp16-lean,loss_scale=dynamic(growth_interval=500)"),
    (fp16(loss_scale_window=500.0), "fp16-lean,loss_scale=dynamic(growth_interval=500)"),
    (fp16(min_loss_scale=4), "fp16-lean,loss_scale=dynamic(min_scale=4)"),
    (fp16(min_loss_scale=0.5), "fp16-lean,loss_scale=dynamic(min_scale=0.5)"),
    (fp16(consecutive_hysteresis=True), "fp16-lean,loss_scale=dynamic(semantics=deepspeed-consecutive)"),
    (fp16(fp16_master_weights_and_grads=True), "fp16-lean,master=none,grads=fp16"),
    ({"bf16": ON | {"bf16_master_weights_and_grads": True}}, "bf16-lean,master=none,grads=bf16"),
    (
        {"bf16": ON | {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        "bf16-lean,master=none,grads=bf16,states=bf16",
    ),
    ({"torch_autocast": ON | {"dtype": "bfloat16"}}, "bf16"),
    (
        {"torch_autocast": ON | {"dtype": "torch.float16"}},
        "fp16,loss_scale=dynamic(semantics=torch;growth_interval=2000)",
    ),
    ({"torch_autocast": ON | {"dtype": "bf16"}, "bf16": ON}, "bf16-lean"),
    ({"amp": ON | {"opt_level": "O0"}}, "fp32"),
    ({"amp": ON}, "fp16,loss_scale=dynamic(semantics=torch;growth_interval=2000)"),
    ({"amp": ON | {"opt_level": "O2", "loss_scale": 64}}, "fp16-lean,loss_scale=64"),
    (
        {"amp": ON | {"opt_level": "O3", "max_loss_scale": 1024, "min_loss_scale": 2}},
        "fp16-lean,loss_scale=dynamic(semantics=torch;growth_interval=2000;init_scale=1024;min_scale=2;max_scale=1024)",
    ),
    ({"bf16": ON, "communication_data_type": "BF16"}, "bf16-lean,reduce=bf16"),
    ({"fp16": ON, "communication_data_type": "fp16"}, "fp16-lean,reduce=fp16"),
    ({"bf16": ON, "data_types": {"grad_accum_dtype": "fp32"}}, "bf16-lean,grads=fp32"),
    ({"bf16": ON, "data_types": {"grad_accum_dtype": "bf16", "param_dtype": "bf16"}}, "bf16-lean,grads=bf16"),
    ({"data_types": {"grad_accum_dtype": "fp32"}}, "fp32"),
    ({"bf16": ON, "data_types": {"grad_accum_dtype": "fp32"}, "gradient_accumulation_steps": 4}, "bf16-lean"),
    (
        {"bf16": ON, "data_types": {"grad_accum_dtype": "bf16"}, "gradient_accumulation_steps": 4},
        "bf16-lean,grads=bf16",
    ),
    (
        {"bf16": ON, "data_types": {"grad_accum_dtype": "fp32"}, "gradient_accumulation_steps": 1},
        "bf16-lean,grads=fp32",
    ),
]


@pytest.mark.parametrize(("config", "text"), MAPPED, ids=[json.dumps(config) for config, _ in MAPPED])
def test_mode_maps_to_a_policy(config, text):
    """Each precision mode and its settings become the policy that means the same."""
    assert read_deepspeed(config).policy == Policy.parse(text)


NOTED = [
    ({}, "gradient_clipping: not set. Read as 1.0"),
    ({"bf16": ON}, "data_types.grad_accum_dtype: not set"),
    ({"bf16": ON}, "communication_data_type: not set"),
    ({"bfloat16": ON}, "bfloat16: DeepSpeed's old name"),
    (fp16(), "fp16: on a step where the scale grows"),
    ({"fp16": ON}, "fp16: without ZeRO"),
    (fp16(initial_scale_power=32), "fp16.initial_scale_power=32: read as 24"),
    (fp16(min_loss_scale=0.5), "fp16.min_loss_scale=0.5"),
    (fp16(loss_scale=128, hysteresis=2), "fp16.hysteresis: no effect"),
    (fp16(auto_cast=True), "fp16.auto_cast: not needed"),
    (fp16(fp16_master_weights_and_grads=True), "fp16.fp16_master_weights_and_grads: read as master=none"),
    ({"bf16": ON | {"bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads: read as"),
    ({"bfloat16": ON | {"check_grad_overflow": False}}, "bfloat16.check_grad_overflow=false"),
    ({"bf16": ON | {"immediate_grad_update": True}}, "bf16.immediate_grad_update"),
    ({"torch_autocast": ON | {"dtype": "fp16"}}, "torch_autocast.dtype=fp16: scaled by torch's rule"),
    ({"torch_autocast": ON | {"dtype": "bf16"}, "zero_optimization": {"stage": 1}}, "would reduce gradients in bf16"),
    ({"torch_autocast": ON | {"dtype": "bf16", "lower_precision_safe_modules": []}}, "lower_precision_safe_modules"),
    ({"torch_autocast": ON | {"dtype": "bf16"}, "bf16": ON}, "torch_autocast: redundant"),
    ({"amp": {"enabled": False}}, "amp: disabled"),
    ({"amp": ON | {"opt_level": "O2"}}, "amp.opt_level=O2: read as fp16-lean"),
    ({"amp": ON | {"opt_level": "O3"}}, "a master and a dynamic scale are added"),
    ({"amp": ON | {"verbosity": 0}}, "amp.verbosity: not read"),
    ({"amp": ON | {"opt_level": "O0", "loss_scale": 8}}, "amp.loss_scale: not read"),
    ({"data_types": {"buffer_dtype": "bf16"}}, "data_types.buffer_dtype"),
    ({"data_types": {"keep_in_fp32_modules": "auto"}}, "data_types.keep_in_fp32_modules"),
    ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage=3"),
    ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights"),
    ({"optimizer": {"type": "Adam"}}, "adam_w_mode"),
    ({"optimizer": {"type": "Lamb"}, "bf16": ON}, "bf16-lean supports Adam, AdamW and SGD; use bf16"),
    ({"optimizer": {"type": "OneBitAdam"}, "bf16": ON}, "under fp16 only"),
    ({"optimizer": {"type": "OneBitAdam"}, "fp16": ON}, "DeepSpeed 0.19.7 removed OneBitAdam"),
    (
        {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 0.5}}},
        "max_grad_norm=0.5: read as gradient_clipping",
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 0.5}}, "gradient_clipping": 2},
        "max_grad_norm=0.5: ignored, because gradient_clipping is set",
    ),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler: not read; pass a torch scheduler"),
    ({"steps_per_print": 10, "wandb": ON}, "steps_per_print, wandb: not read"),
    ({"gradient_predivide_factor": 2}, "gradient_predivide_factor: not read"),
    ({"prescale_gradients": True}, "prescale_gradients: not read"),
]


@pytest.mark.parametrize(("config", "note"), NOTED, ids=[note for _, note in NOTED])
def test_note_names_the_key(config, note):
    """What is mapped, set aside or different by default is noted under its key path."""
    assert [text for text in read_deepspeed(config).notes if note in text]


@pytest.mark.parametrize("key", NOT_READ)
def test_every_key_set_aside_is_noted_when_it_has_an_effect(key):
    """Every key that Halfstep does not read has a note, unless its value has no effect."""
    value = {"enabled": True} if key in {"wandb", "elasticity"} else 7
    assert [note for note in read_deepspeed({key: value}).notes if note.startswith(key)]
    for nothing in (None, False, {}, {"enabled": False}):
        assert read_deepspeed({key: nothing}).notes == read_deepspeed({}).notes


def test_complete_configuration_under_zero_has_little_to_note():
    """A configuration that sets everything gets no note about defaults."""
    notes = read_deepspeed(fp16()).notes
    assert [note.split(":")[0] for note in notes] == ["fp16", "zero_optimization.stage=2"]


MISTAKES = [
    ({"fp16": ON, "bf16": ON}, "fp16 and bf16 are enabled together"),
    ({"fp16": ON, "torch_autocast": ON | {"dtype": "fp16"}}, "fp16 and torch_autocast"),
    ({"bf16": ON, "torch_autocast": ON | {"dtype": "fp16"}}, "bf16 and torch_autocast"),
    ({"amp": ON, "bf16": ON}, "bf16 and amp"),
    ({"bf16": ON, "bfloat16": ON}, "name the same block"),
    ({"amp": ON, "zero_optimization": {"stage": 1}}, "does not work with ZeRO"),
    ({"amp": ON | {"opt_level": "O4"}}, "amp.opt_level"),
    ({"amp": ON | {"opt_level": 2}}, "amp.opt_level"),
    ({"amp": ON | {"keep_batchnorm_fp32": True}}, "amp.keep_batchnorm_fp32"),
    ({"amp": ON | {"loss_scale": 0}}, "amp.loss_scale"),
    ({"amp": ON | {"loss_scale": []}}, "amp.loss_scale"),
    (fp16(loss_scale=True), "fp16.loss_scale=True: it must be a number"),
    (fp16(loss_scale=-1), "fp16.loss_scale=-1"),
    (fp16(loss_scale=math.nan), "fp16.loss_scale=nan"),
    (fp16(loss_scale=math.inf), "fp16.loss_scale=inf"),
    (fp16(loss_scale=10**400), "does not fit in fp32"),
    (fp16(loss_scale="128"), "it must be a number"),
    (fp16(hysteresis=0), "the scale would never decrease"),
    (fp16(hysteresis=-1), "fp16.hysteresis=-1"),
    (fp16(hysteresis=1.5), "whole number"),
    (fp16(loss_scale_window=0), "fp16.loss_scale_window=0"),
    (fp16(min_loss_scale=0), "fp16.min_loss_scale=0"),
    (fp16(min_loss_scale=2**25), "fp16.min_loss_scale"),
    (fp16(initial_scale_power=4, min_loss_scale=1024), "first overflow would raise"),
    (fp16(enabled="auto"), "write the value"),
    (fp16(enabled=1), "fp16.enabled=1: it must be true or false"),
    (fp16(enabeld=True), "Did you mean 'enabled'"),
    ({"fp16": {"auto_cast": True}}, "fp16.auto_cast=True: fp16 is off"),
    ({"fp16": True}, "it must be a block"),
    ({"bf16": ON | {"loss_scale": 0}}, "block bf16"),
    ({"bf16": ON | {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
    ({"torch_autocast": ON}, "torch_autocast.dtype=None: it is missing"),
    ({"torch_autocast": ON | {"dtype": "float32"}}, "no effect"),
    ({"torch_autocast": ON | {"dtype": "int8"}}, "torch_autocast.dtype"),
    ({"bf16": ON, "communication_data_type": "fp16"}, "communication_data_type='fp16': bf16 gradients"),
    ({"communication_data_type": "fp16"}, "communication_data_type='fp16': fp32 gradients"),
    ({"communication_data_type": "fp64"}, "communication_data_type"),
    ({"communication_data_type": ["fp32"]}, "communication_data_type"),
    ({"bf16": ON, "data_types": {"grad_accum_dtype": "fp16"}}, "data_types.grad_accum_dtype"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype"),
    (fp16(fp16_master_weights_and_grads=True) | {"data_types": {"grad_accum_dtype": "fp32"}}, "remove one of the two"),
    ({"bf16": ON, "data_types": {"param_dtype": "fp32"}}, "data_types.param_dtype"),
    ({"data_types": {"grad_dtype": "fp32"}}, "Did you mean"),
    ({"gradient_clipping": "auto"}, "gradient_clipping='auto'"),
    ({"gradient_clipping": -1}, "gradient_clipping=-1"),
    ({"gradient_clipping": True}, "gradient_clipping=True"),
    ({"gradient_accumulation_steps": 0}, "1 or more"),
    ({"gradient_accumulation_steps": "auto"}, "write the value"),
    ({"gradient_allreduce_op": "sum"}, "averages over ranks"),
    ({"gradient_allreduce_op": ["mean"]}, "averages over ranks"),
    ({"gradient_cliping": 1.0}, "Did you mean 'gradient_clipping'"),
    ({"fp_16": {}}, "Did you mean 'fp16'"),
    ({3: 4}, "Unknown DeepSpeed key 3"),
    ({"zero_optimization": 2}, "it must be a block"),
    ({"zero_optimization": {"stage": 4}}, "0, 1, 2 or 3"),
    ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": -1}}}, "optimizer.params.max_grad_norm=-1"),
    ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": "auto"}}}, "optimizer.params.max_grad_norm='auto'"),
    ({"optimizer": {"type": ["AdamW"]}}, "it must be a block such as"),
    ({"optimizer": {"type": "OneBitAdam"}, "zero_optimization": True}, "shards them"),
    ({"compression_training": {"weight_quantization": {}}}, "cannot express"),
    ({"fp32_allreduce": True}, '"communication_data_type": "fp32"'),
]


@pytest.mark.parametrize(("config", "reason"), MISTAKES, ids=[reason for _, reason in MISTAKES])
def test_mistake_is_rejected_with_its_key(config, reason):
    """What cannot work, or DeepSpeed would ignore, is rejected with the key and the way out."""
    with pytest.raises(SettingError) as caught:
        read_deepspeed(config)
    assert reason in str(caught.value)


@pytest.mark.parametrize("block", BLOCKS)
def test_unknown_key_in_any_block_is_rejected(block):
    """A misspelt key inside a block is rejected with the nearest one."""
    name = BLOCKS[block][0]
    with pytest.raises(SettingError, match=f"Did you mean '{name}'"):
        read_deepspeed({block: {name + "s": True}})


def test_every_key_has_one_fate():
    """No key is in two tables."""
    assert len({*READ, *NOT_READ, *REJECTED}) == len(READ) + len(NOT_READ) + len(REJECTED)


@pytest.mark.parametrize(
    ("config", "max_norm", "accumulate"),
    [
        ({}, 1.0, None),
        ({"gradient_clipping": 0}, None, None),
        ({"gradient_clipping": 0.5, "gradient_accumulation_steps": 8}, 0.5, 8),
        ({"train_micro_batch_size_per_gpu": 4}, 1.0, 1),
        ({"train_batch_size": 64}, 1.0, 1),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 0.5}}}, 0.5, None),
        ({"optimizer": {"params": {"max_grad_norm": 0.5}}, "gradient_clipping": 0}, None, None),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 1.0, None),
    ],
)
def test_clipping_and_accumulation_are_read(config, max_norm, accumulate):
    """The norm and the number of micro-batches come back, None where there is none or it is open."""
    reading = read_deepspeed(config)
    assert (reading.max_norm, reading.accumulate) == (max_norm, accumulate)


def test_max_grad_norm_has_one_story():
    """The rule HS241 and the note of a reading use the same words for what DeepSpeed does with the key."""
    notes = read_deepspeed({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 0.5}}}).notes
    reason = find_rule("HS241").reason
    assert [note for note in notes if reason in note]
    assert "0.19.5" in reason


def test_text_and_file_are_read_alike(tmp_path):
    """A dictionary, JSON text with comments and a file give the same reading."""
    text = '{"bf16": {"enabled": true,}, // mode\n "gradient_clipping": 0.5}'
    path = tmp_path / "ds.json"
    path.write_text(text)
    expected = read_deepspeed({"bf16": {"enabled": True}, "gradient_clipping": 0.5})
    assert read_deepspeed(text) == read_deepspeed(path) == read_deepspeed(str(path)) == expected


@pytest.mark.parametrize("config", ["\n[1]", 3, None, [], "nothing.json"])
def test_what_is_no_configuration_is_rejected(config):
    """Lists, numbers and missing files are rejected in words."""
    with pytest.raises(SettingError):
        read_deepspeed(config)


def test_policy_from_deepspeed_says_its_notes_once(caplog, monkeypatch):
    """`Policy.from_deepspeed` returns the policy and logs every note, once per process."""
    monkeypatch.setattr(policy_module, "_LOGGED", set())
    config = {"bf16": {"enabled": True}, "steps_per_print": 10}
    with caplog.at_level(logging.INFO, logger="halfstep"):
        assert Policy.from_deepspeed(config) == Policy.from_deepspeed(config) == Policy.parse("bf16-lean")
    assert tuple(record.getMessage() for record in caplog.records) == read_deepspeed(config).notes


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(["auto", "fp16", "bf16", "float32", "dynamic", "O1", "O2", "mean", "Adam", "OneBitAdam"]),
    st.text(max_size=5),
)
anything = st.recursive(
    leaves, lambda v: st.lists(v, max_size=2) | st.dictionaries(st.text(max_size=4), v, max_size=2), max_leaves=4
)
good = st.sampled_from([True, False, 1, 2, 16, 0.5, "fp16", "bf16", "fp32", None])


def unless_rejected(config):
    """The reading, or None when Halfstep raises; any other exception passes through."""
    try:
        return read_deepspeed(config)
    except HalfstepError:
        return None


def block_of(name):
    """Blocks with known keys and mostly plausible values."""
    return st.dictionaries(st.sampled_from(BLOCKS[name]), st.one_of(good, anything), max_size=4)


configs = st.fixed_dictionaries(
    {},
    optional={name: st.one_of(block_of(name), anything) for name in BLOCKS}
    | {key: st.one_of(good, anything) for key in (*READ[len(BLOCKS) :], *NOT_READ, *REJECTED)},
)


@given(st.one_of(configs, st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), anything, max_size=3)))
def test_any_dictionary_is_read_or_raises_only_our_error(config):
    """A configuration of any shape gives a whole reading or one of Halfstep's errors."""
    reading = unless_rejected(config)
    assert reading is None or Policy.parse(str(reading.policy)) == reading.policy


@given(st.sampled_from(["fp16", "bf16", "torch_autocast", "amp"]).flatmap(lambda n: st.tuples(st.just(n), block_of(n))))
def test_any_enabled_block_is_read_or_raises_only_our_error(named):
    """One precision block that is on, with any values, is read or rejected."""
    name, block = named
    reading = unless_rejected({name: block | {"enabled": True}})
    assert reading is None or reading.policy.compute in {"fp32", "bf16", "fp16"}


def test_example_runs(capsys):
    """The example reads the configuration it writes and shows the policy."""
    runpy.run_path(str(ROOT / "examples" / "read_deepspeed_config.py"), run_name="__main__")
    assert "fp16-lean" in capsys.readouterr().out
