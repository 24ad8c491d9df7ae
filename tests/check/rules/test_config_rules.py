"""Configuration rules beyond their cases: DeepSpeed versions, GPUs, several findings, and silence."""

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.check.config.config import case_source, read_configs
from halfstep.check.config.joint import configs_in_script
from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings, Source
from halfstep.check.pins import Pin
from halfstep.check.registry import rules_of
from halfstep.check.rule import ConfigRule
from halfstep.check.runner import check_document
from halfstep.check.select import Selection
from halfstep.errors import SettingError
from halfstep.hardware.devices import find_devices
from halfstep.precision.policy import PRESETS

RULES = [rule for group in ("config", "hardware") for rule in rules_of(group) if issubclass(rule, ConfigRule)]
BASE = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}


def check(text, *, deepspeed=None, gpu=None):
    settings = Settings(deepspeed=deepspeed, gpu=find_devices(gpu)[0] if gpu else None)
    source = text if isinstance(text, Source) else case_source(text)
    is_python = source.language == "python"
    configs = (
        configs_in_script(ast.parse(source.text), source, settings) if is_python else read_configs(source, settings)
    )
    return [finding for config in configs for rule in RULES for finding in rule().check(config)]


def codes(text, **settings):
    return {f.code: f.severity for f in check(text if isinstance(text, str) else json.dumps(text), **settings)}


def problems(text, **settings):
    """The codes of errors and warnings."""
    return sorted(code for code, severity in codes(text, **settings).items() if severity != "advice")


@pytest.mark.parametrize(
    ("version", "severity"), [(None, "warning"), ((0, 18, 2), None), ((0, 18, 3), "error"), ((0, 19, 8), "error")]
)
def test_fp16_without_zero_depends_on_the_version(version, severity):
    """0.18.2 scales the loss at stage 0, later releases do not, and without a version the message covers both."""
    config = {"train_batch_size": 8, "fp16": {"enabled": True}}
    assert codes(config, deepspeed=version).get("HS208") == severity
    if version is None:
        (finding,) = [f for f in check(json.dumps(config)) if f.code == "HS208"]
        assert "0.18.3" in finding.message
        assert "0.18.2" in finding.message


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ((0, 19, 6), {"HS245": "warning"}),
        ((0, 19, 7), {"HS246": "error"}),
        (None, {"HS245": "warning", "HS246": "warning"}),
    ],
)
def test_one_bit_optimizers_depend_on_the_version(version, expected):
    """The 1-bit optimizers are verified with fp16 only up to 0.19.6, and removed in 0.19.7."""
    config = {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1}},
    }
    severities = codes(config, deepspeed=version)
    assert {code: severities[code] for code in severities if code in {"HS244", "HS245", "HS246"}} == expected


@pytest.mark.parametrize(("version", "severity"), [((0, 19, 7), None), ((0, 19, 8), "error"), (None, "advice")])
def test_amp_block_depends_on_the_version(version, severity):
    """0.19.8 rejects an amp block even if it is disabled."""
    assert codes(BASE | {"amp": {"enabled": False}}, deepspeed=version).get("HS206") == severity


def test_one_mistake_is_one_finding():
    """A combination that one rule reports is not reported again by related rules."""
    assert problems(BASE | {"fp16": {"enabled": True}, "bf16": {"enabled": True}}) == ["HS201"]
    assert problems({"train_batch_size": 8, "fp16": {"enabled": True}, "bf16": {"enabled": True}}) == ["HS201"]
    assert problems(BASE | {"amp": {"enabled": True}}) == ["HS205"]
    one_bit = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}, "fp16": {"enabled": True}}
    assert problems(BASE | one_bit) == ["HS244"]
    autocast = {"torch_autocast": {"enabled": True}, "fp16": {"enabled": True}}
    assert problems(BASE | autocast) == ["HS202"]


def test_explicit_defaults_are_silent():
    """DeepSpeed's own defaults, spelled out, give no finding: 2^16, 1000, hysteresis 2."""
    fp16 = {
        "enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1,
    }  # fmt: skip
    assert problems(BASE | {"fp16": fp16}) == []


@pytest.mark.parametrize("value", ["auto", "${X}", "{{ x }}", "<x>"])
def test_undecided_values_are_silent(value):
    """`auto` and placeholders give no finding in any key."""
    config = {
        "train_batch_size": value,
        "train_micro_batch_size_per_gpu": value,
        "gradient_accumulation_steps": value,
        "gradient_clipping": value,
        "zero_optimization": {"stage": value, "overlap_comm": value, "reduce_bucket_size": value},
        "fp16": {"enabled": value, "loss_scale": value, "hysteresis": value, "min_loss_scale": value},
        "bf16": {"enabled": value},
        "optimizer": {"type": "AdamW", "params": {"lr": value, "betas": value, "eps": value, "weight_decay": value}},
        "communication_data_type": value,
    }
    assert problems(config) == []


@pytest.mark.parametrize("zero", [True, {"stage": 1}, {"stage": "2"}, {"stage": 3, "offload_param": None}])
def test_every_form_of_zero_is_accepted(zero):
    """A boolean, a quoted number and null blocks, which DeepSpeed accepts, give no finding."""
    assert problems({"train_batch_size": 8, "zero_optimization": zero, "fp16": {"enabled": True}}) == []


@pytest.mark.parametrize("key", ["_comment", "//", "comments", "#note", "$schema"])
def test_comments_as_keys_are_silent(key):
    """Keys that serve as comments in JSON give no finding."""
    assert problems(BASE | {key: "tuned by hand"}) == []


def test_duplicate_key_names_both_lines():
    """The finding is at the second key and names the line of the first."""
    text = '{\n  "zero_optimization": {"stage": 2},\n  "fp16": {"enabled": true},\n  "fp16": {"enabled": false}\n}'
    (finding,) = [f for f in check(text) if f.code == "HS254"]
    assert (finding.line, finding.column) == (4, 3)
    assert "line 3" in finding.message


def test_templated_key_makes_the_others_undecided():
    """A templated key in YAML may be any key, so no rule reports a missing one."""
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n"
        "  deepspeed_config_file: ds.json\n  zero_${X}: 2\nnum_processes: 8\n"
    )
    assert codes(text) == {}


def test_unknown_key_is_not_a_misspelling():
    """A key unlike any known one is reported as ignored, not as a typo."""
    severities = codes(BASE | {"disable_fused_adam": True})
    assert "HS250" in severities
    assert "HS252" not in severities


@pytest.mark.parametrize(
    ("gpu", "bf16", "fp16"),
    [("t4", "warning", None), ("v100", "warning", None), ("p100", "warning", "error"), ("a100", None, None)],
)
def test_formats_are_compared_with_the_gpu(gpu, bf16, fp16):
    """bf16 before Ampere and fp16 before Volta are reported; an A100 supports both."""
    assert codes(BASE | {"bf16": {"enabled": True}}, gpu=gpu).get("HS301") == bf16
    assert codes(BASE | {"fp16": {"enabled": True}}, gpu=gpu).get("HS302") == fp16


def test_hardware_rules_need_a_gpu():
    """Without a GPU no hardware rule reports anything."""
    assert not [code for code in codes(BASE | {"bf16": {"enabled": True}}) if code.startswith("HS3")]


def test_formats_of_scripts_are_compared_with_the_gpu():
    """The default of autocast on CUDA is fp16, which is fast on a T4 but not on a P100."""
    text = "import torch\n\nwith torch.cuda.amp.autocast():\n    loss = model(x)\n"
    assert "HS302" not in codes(text, gpu="t4")
    assert codes(text, gpu="p100")["HS302"] == "warning"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_compared_with_the_gpu(name):
    """Every preset that computes in bf16 is reported on a T4, and no other; text that is no policy is not."""
    text = "import halfstep\n\nengine = halfstep.Engine(model, optimizer, precision={!r})\n"
    assert ("HS301" in codes(text.format(name), gpu="t4")) == (PRESETS[name].compute == "bf16")
    assert "HS301" in codes(text.format("bf16,keep_fp32=head"), gpu="t4")
    assert not [code for code in codes(text.format("auto"), gpu="t4") if code.startswith("HS3")]


def test_message_names_the_origin_of_the_gpu():
    """The message mentions nvidia-smi if the GPU was detected with it."""
    settings = Settings(gpu=find_devices("t4")[0], gpu_origin="nvidia-smi")
    source = case_source(json.dumps(BASE | {"bf16": {"enabled": True}}))
    (config,) = read_configs(source, settings)
    messages = [f.message for rule in RULES for f in rule().check(config) if f.code == "HS301"]
    assert ["nvidia-smi" in message for message in messages] == [True]


def test_disabled_autocast_is_silent():
    """autocast(enabled=False) gives no hardware finding."""
    text = "import torch\n\nwith torch.autocast('cuda', dtype=torch.bfloat16, enabled=False):\n    loss = model(x)\n"
    assert codes(text, gpu="t4") == {}


KEYS = st.sampled_from(
    ["fp16", "bf16", "zero_optimization", "optimizer", "amp", "torch_autocast", "data_types", "gradient_clipping", "x"]
)
INNER = st.sampled_from(
    ["enabled", "stage", "loss_scale", "dtype", "type", "params", "hysteresis", "min_loss_scale", "lr", "offload_param"]
)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.integers(), max_size=2)
)
ANY = st.dictionaries(
    KEYS, LEAVES | st.dictionaries(INNER, LEAVES | st.dictionaries(INNER, LEAVES, max_size=2), max_size=4)
)


@given(ANY, st.sampled_from([None, (0, 18, 2), (0, 19, 8)]), st.sampled_from([None, "t4", "mi250x"]))
def test_no_values_crash_a_rule(values, version, gpu):
    """Any values under DeepSpeed's keys give findings or silence, but no crash."""
    text = json.dumps({"train_micro_batch_size_per_gpu": 1, "steps_per_print": 1, **values})
    try:
        findings = check(Source("ds.json", text, "json"), deepspeed=version, gpu=gpu)
    except SettingError:
        return
    for finding in findings:
        assert 1 <= finding.line <= text.count("\n") + 1
        assert finding.message


def test_fp8_preset_is_rejected_for_the_engine_only():
    """fp8 is a valid policy that the Engine does not run yet."""
    assert codes("import halfstep\n\nhalfstep.Engine(m, o, precision='fp8')\n") == {"HS286": "error"}
    assert codes("import halfstep\n\nhalfstep.Policy.parse('fp8')\n") == {}


@pytest.mark.parametrize(("version", "expected"), [(None, {"HS205"}), ((0, 19, 7), {"HS205"}), ((0, 19, 8), {"HS206"})])
def test_an_amp_block_with_zero_is_one_error(version, expected):
    """Where DeepSpeed has no Apex support left, that is the error; before, it is the combination."""
    severities = codes(BASE | {"amp": {"enabled": True}}, deepspeed=version)
    assert {code for code in severities if code in {"HS205", "HS206"}} == expected
    assert severities[expected.pop()] == "error"


def test_settings_without_effect_are_advice():
    """A static loss scale trains, so the dynamic settings next to it are worth a look and no more."""
    assert codes(BASE | {"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 4}})["HS216"] == "advice"


@pytest.mark.parametrize(("value", "advice"), [(0.01, "Remove it; the default is 1."), (12.5, "12")])
def test_a_fraction_has_no_fix(value, advice):
    """No integer means what 0.01 means, so its author has to decide."""
    (finding,) = [f for f in check(json.dumps(BASE | {"fp16": {"min_loss_scale": value}})) if f.code == "HS212"]
    assert finding.fix is None
    assert advice in finding.instead


@pytest.mark.parametrize(("kind", "fixable"), [("SGD", True), ("RMSprop", True), ("Lamb", False), ("Adafactor", False)])
def test_the_check_of_optimizers_is_disabled_only_for_elementwise_ones(kind, fixable):
    """The flag lets SGD train as at stage 0; LAMB and Adafactor would train otherwise, which HS240 reports."""
    config = BASE | {"optimizer": {"type": kind, "params": {"lr": 0.1}}}
    (finding,) = [f for f in check(json.dumps(config)) if f.code == "HS242"]
    assert (finding.fix is not None) == fixable
    allowed = codes(config | {"zero_allow_untested_optimizer": True})
    assert ("HS240" in allowed) == (not fixable)
    assert "HS242" not in allowed


@pytest.mark.parametrize("extra", [{}, {"steps_per_print": 10, "gradient_accumulation_steps": "auto", "bf16": {}}])
def test_a_part_of_a_configuration_may_leave_clipping_to_the_rest(extra):
    """Without a version, only a complete configuration is reported for its missing clipping."""
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": True}} | extra
    assert ("HS239" in codes(config)) == bool(extra)
    assert "HS239" in codes(config, deepspeed=(0, 19, 8))
    assert "HS239" not in codes(config, deepspeed=(0, 19, 2))


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("ds_config.json", {"train_batch_size": 8, "steps_per_print": 9, "zero_optimization": {"stage": 1}}, True),
        ("deepspeed_config.json", {"train_batch_size": 8, "pipeline": {}, "zero_optimization": {"stage": 1}}, True),
        ("ds_config.json", {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}, False),
        ("ds_config.json", {"train_batch_size": 8, "zero_optimization": {"stage": 1}}, False),
        ("ds_config.json", {"steps_per_print": 9, "wall_clock_breakdown": False, "zero_optimization": {}}, False),
        ("zero3.json", {"train_batch_size": 8, "steps_per_print": 9, "zero_optimization": {"stage": 1}}, False),
    ],
)
def test_a_short_file_named_for_deepspeed_is_a_configuration(name, config, expected):
    """A file with a batch size and ZeRO settings that is named for DeepSpeed needs no precision mode to be complete."""
    document = read_document(name, json.dumps(config).encode(), "json")
    results = check_document(document, Settings(deepspeed=(0, 19, 8)), Selection())
    assert ("HS239" in [f.code for f in results]) == expected


def test_a_file_that_trains_nothing_needs_no_clipping():
    """A ZeRO file for inference has neither an optimizer nor a precision mode."""
    assert "HS239" not in codes({"train_batch_size": 1, "zero_optimization": {"stage": 3}}, deepspeed=(0, 19, 8))


def test_accelerate_reads_no_deepspeed_settings_in_its_own_file():
    """Each ignored block is reported at its key, and nothing is judged as if DeepSpeed read it."""
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: fp16\ndeepspeed_config:\n"
        "  zero_stage: 2\n  fp16:\n    enabled: true\n    hysteresis: 0\n  optimizer:\n    type: Nadam\n"
    )
    assert [(f.code, f.line) for f in check(text)] == [("HS266", 6), ("HS266", 9)]


@pytest.mark.parametrize(
    ("block", "lines"),
    [
        (" {zero/ds_config.json}", [3]),
        ("\n  ds_config.json:", [4]),
        ("\n  zero_stage: 3\n  ds_config.yaml: {}", [5]),
        (" {deepspeed_config_file: zero/ds_config.json}", []),
        ("\n  zero_stage: 3\n  deepspeed_hostfile: hosts.json", []),
    ],
)
def test_a_file_that_is_a_key_of_the_block_is_not_used(block, lines):
    """Braces around a path make a mapping of it, with no value; the file has to be the value of its own key."""
    head = f"compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:{block}\n"
    findings = check(f"{head}mixed_precision: bf16\nnum_processes: 8\n")
    assert [f.line for f in findings if f.code == "HS266"] == lines


PADDLE = "output_dir: o\nnum_train_epochs: 1\nper_device_train_batch_size: 1\n"


@pytest.mark.parametrize(
    "text",
    [
        PADDLE + "bf16: true\nfp16_opt_level: O2\n",
        PADDLE + "fp16: true\nfp16_opt_level: O2\nrecompute: true\n",
        PADDLE + "fp16: false\nfp16_opt_level: O2\n",
        '{"num_train_epochs": 3, "per_device_train_batch_size": 8, "fp16": true, "fp16_opt_level": "O1",'
        ' "fp16_backend": "auto", "half_precision_backend": "cuda_amp"}',
    ],
)
def test_a_file_without_apex_is_not_reported_for_apex(text):
    """Defaults that `to_json_string` writes, unused levels and PaddlePaddle's option of the same name are silent."""
    assert "HS274" not in codes(text)


@pytest.mark.parametrize("key", ["half_precision_backend: apex", "fp16_backend: apex", "fp16_opt_level: O3"])
def test_a_file_with_apex_is_reported(key):
    """An Apex argument with a value that only Apex reads is reported."""
    assert codes(f"{PADDLE}fp16: true\n{key}\n")["HS274"] == "warning"


@pytest.mark.parametrize(
    ("extra", "reported"),
    [
        ("", True),
        ("use_peft: false\n", True),
        ("use_peft: true\n", False),
        ("lora_r: 16\n", False),
        ("load_in_4bit: true\n", False),
        ("deepspeed: zero2.json\n", False),
        ("# Full fine-tuning, FSDP (full shard), bf16.\n", False),
        ("seed: 1  # launched with deepspeed\n", False),
        ("# deepspeed: zero2.json\n", True),
        ("# one GPU, no FSDP\n", True),
    ],
)
def test_a_file_that_loads_bf16_weights_is_reported_if_it_trains_them(extra, reported):
    """TRL's files name the dtype of the model next to the trainer's arguments."""
    text = f"model_name_or_path: a/b\ntorch_dtype: bfloat16\nbf16: true\n{PADDLE}{extra}"
    assert ("HS278" in codes(text)) == reported


@pytest.mark.parametrize(
    ("model", "reported"),
    [
        ("meta-llama/Llama-3.1-8B", True),
        ("Qwen/Qwen3-4B-Base", True),
        ("models/sft_8b_llama70b_best", True),
        ("models/llama-8b-of-70b", True),
        ("org/net-0.5b", True),
        ("org/net70bis", True),
        ("meta-llama/Llama-3.1-70B-Instruct", False),
        ("mistralai/Mixtral-8x7B-v0.1", False),
        ("org/poro-34b-chat", False),
    ],
)
def test_a_model_that_no_gpu_can_train_alone_is_left_to_the_launcher(model, reported):
    """bf16 weights, gradients and two moments of 30 billion parameters are 240 GB: DeepSpeed or FSDP has to shard them."""
    text = f"model_name_or_path: {model}\ntorch_dtype: bfloat16\nbf16: true\n{PADDLE}"
    assert ("HS278" in codes(text)) == reported


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e999", "16.5"])
def test_a_precision_that_is_no_number_of_bits_is_unknown(value):
    """Any number in the file is compared as text; none stops a rule."""
    assert "HS281" in codes(f"accelerator: gpu\ndevices: 8\nmax_epochs: 9\nprecision: {value}\n")


def test_fp16_without_zero_in_one_arm_is_reported():
    """`0 if single else 3` is stage 0 in some runs, and 1 or 3 is not."""
    text = "import deepspeed\nds_config = {{'fp16': {{'enabled': True}}, 'zero_optimization': {{'stage': {} if single else 3}}}}\n"
    assert "HS208" in problems(text.format(0))
    assert "HS208" not in problems(text.format(1))


def test_a_file_of_gpt_neox_has_another_deepspeed():
    """It runs its own fork, so what DeepSpeed changed at stage 0 says nothing about it."""
    config = {"train_batch_size": 8, "fp16": {"enabled": True}}
    assert "HS208" in problems(config)
    assert "HS208" not in problems({**config, "pipe-parallel-size": 1, "num-layers": 12})


@pytest.mark.parametrize(
    ("path", "count"), [("dpo.yaml", 1), ("kto_deepspeed.yaml", 0), ("sft_zero3.yaml", 0), ("fsdp-sft.yaml", 0)]
)
def test_a_file_named_after_an_engine_has_its_copies(path, count):
    """The name says what the launcher adds."""
    text = "model_name_or_path: x\ntorch_dtype: float16\nfp16: true\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-5\n"
    assert [f.code for f in check(Source(path, text, "yaml"))].count("HS279") == count


@pytest.mark.parametrize(
    ("strategy", "count"),
    [("lightning.pytorch.strategies", 1), ("pytorch_lightning.strategies", 1), ("mine", 0)],
)
def test_auto_is_not_resolved_by_lightning(strategy, count):
    """Lightning passes "auto" on to DeepSpeed, which reads it as off."""
    text = (
        f"import transformers\nfrom {strategy} import DeepSpeedStrategy\n"
        "s = DeepSpeedStrategy(config={'bf16': {'enabled': 'auto'}, 'zero_optimization': {'stage': 3}})\n"
    )
    assert problems(text).count("HS259") == count


def test_an_optimizer_by_its_full_name_is_the_programs_own():
    """A dotted name is imported by the program around the file; a plain unknown name is an error."""
    config = {**BASE, "bf16": {"enabled": True}, "optimizer": {"type": "EmaAdam", "params": {"lr": 0.1}}}
    assert "HS243" in problems(config)
    config["optimizer"]["type"] = "mine.optim.EmaAdam"
    assert "HS243" not in problems(config)


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ('{"train_batch_size": 8, "zero_optimization": {"stage": 2, "stage": 3}}', "error"),
        (
            '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "steps_per_print": 5, "steps_per_print": 5}',
            "error",
        ),
        ('{"train_batch_size": "auto", "zero_optimization": {"stage": 2, "stage": 3}}', "warning"),
        (
            '{"train_batch_size": "auto", "zero_optimization": {"stage": 3, "sub_group_size": 1e9, "sub_group_size": 1e8}}',
            "advice",
        ),
        ('{"train_batch_size": "auto", "zero_optimization": {"stage": 3, "stage": 3}}', None),
        ("mixed_precision: fp16\ndistributed_type: NO\nnum_processes: 1\nnum_processes: 2\n", "advice"),
        ("stage: sft\nfinetuning_type: lora\nbf16: true\nlearning_rate: 1.0e-4\nbf16: true\n", "error"),
        ("stage: sft\nfinetuning_type: lora\nbf16: true\nlogging_steps: 5\nlogging_steps: 9\n", "error"),
        ("stage: sft\nfinetuning_type: lora\nbf16: true\nlearning_rate: 1.0e-4\n", None),
    ],
)
def test_a_duplicate_key_counts_for_what_its_reader_does(text, severity):
    """DeepSpeed and OmegaConf reject duplicates; Hugging Face and YAML read the last, which matters for numerical settings."""
    assert codes(text).get("HS254") == severity


def test_an_amp_block_of_another_trainer_is_not_deepspeeds():
    """An `amp` block with a dtype, or next to an optimizer that Hydra creates, gives no finding."""
    assert codes("optim:\n  optimizer:\n    _target_: torch.optim.AdamW\n  amp:\n    enabled: true\n") == {}
    assert codes("optimizer:\n  type: AdamW\namp:\n  enabled: true\n  amp_dtype: bfloat16\n") == {}
    assert "HS206" in codes("optimizer:\n  type: AdamW\namp:\n  enabled: true\n  opt_level: O1\n")


def test_a_template_with_mixed_case_names_is_not_broken_json():
    """Names of a template such as CL_1st_MIN are values that are filled in later."""
    text = (
        '{"train_batch_size": CONFIG_BATCH, "fp16": {"enabled": true}, "zero_optimization": {"stage": ZERO_2nd_STAGE}}'
    )
    assert codes(text).get("HS004") is None
    (config,) = read_configs(case_source(text), Settings())
    assert config.kind == "deepspeed"


def test_the_input_cast_is_harmless_with_keyword_inputs():
    """Files for Hugging Face, which passes keywords, get advice instead of an error."""
    cast = {"fp16": {"enabled": False, "auto_cast": True}, "bf16": {"enabled": True}}
    assert codes({**BASE, **cast})["HS207"] == "error"
    assert codes({**BASE, **cast, "train_batch_size": "auto"})["HS207"] == "advice"


def test_a_deepspeed_block_that_accelerate_ignores_has_one_finding():
    """With another engine nothing in the block happens, so its settings are not judged."""
    block = "deepspeed_config:\n  zero_stage: 0\n  gradient_accumulation_steps: 64\n  offload_param_device: cpu\n"
    head = "compute_environment: LOCAL_MACHINE\nmixed_precision: fp16\nnum_processes: 4\n"
    assert codes(f"{head}distributed_type: MULTI_GPU\n{block}") == {"HS266": "warning"}
    assert {"HS226", "HS265"} <= codes(f"{head}distributed_type: DEEPSPEED\n{block}").keys()


FITS = """\
import lightning as L

trainer = L.Trainer(precision="bf16-true", max_epochs={epochs})
def score(trainer, x, y):
    classifier = LogisticRegression()
    {fits}.fit(x, y)
    return trainer.{method}(model)
"""


@pytest.mark.parametrize(
    ("fits", "method", "epochs", "expected"),
    [
        ("classifier", "validate", 3, None),
        ("classifier", "predict", 3, None),
        ("trainer", "validate", 3, "warning"),
        ("trainer", "validate", 0, None),
        ("classifier", "run", 3, "warning"),  # may be what trains
    ],
)
def test_only_a_trainer_that_fits_rounds_its_weights(fits, method, epochs, expected):
    """`fit` of another object trains nothing in 16 bits, and a Trainer with `max_epochs=0` takes no step."""
    assert codes(FITS.format(fits=fits, method=method, epochs=epochs)).get("HS283") == expected


@pytest.mark.parametrize(
    ("settings", "severity"),
    [
        ({"zero_quantized_weights": False}, "advice"),
        ({"zero_quantized_weights": True}, "warning"),
        ({"max_grad_norm": 0}, "advice"),
        ({"max_grad_norm": 0, "gradient_clipping": 1.0}, "warning"),
        ({"overlap_comm": False}, "warning"),  # True at stage 3
        ({"loss_scale": 0}, "advice"),
        ({"loss_scale": 0, "fp16": {"enabled": True, "loss_scale": 128}}, "warning"),
    ],
)
def test_a_misplaced_key_that_repeats_its_default_is_advice(settings, severity):
    """Nothing changes where DeepSpeed ignores a setting that is off anyway; a block with another value decides against it."""
    assert codes({"train_batch_size": 8, "zero_optimization": {"stage": 1}, **settings})["HS253"] == severity


@pytest.mark.parametrize(
    ("version", "severity", "effect"),
    [
        ("0.15.0", "error", "accelerate 0.15.0 (--with) raises a ValueError"),
        ("0.16.0", "advice", "trains in fp32"),
        ("1.15.0", "advice", "trains in fp32"),
        (None, "advice", "trains in fp32"),
    ],
)
def test_fp16_on_the_cpu_raises_before_accelerate_0_16(version, severity, effect):
    """Since 0.16 Accelerate has no scaler and no autocast on the CPU, and does not raise."""
    settings = Settings(pins=(Pin("accelerate", version, "--with"),) if version else ())
    source = case_source("from accelerate import Accelerator\n\nAccelerator(cpu=True, mixed_precision='fp16')\n")
    configs = configs_in_script(ast.parse(source.text), source, settings)
    (finding,) = [f for config in configs for rule in RULES for f in rule().check(config) if f.code == "HS263"]
    assert finding.severity == severity
    assert effect in finding.message


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"weight_decay": 0.01}, True),
        ({"weight_decay": "auto"}, True),
        ({"weight_decay": 0.01, "torch_adam": True}, True),
        ({"weight_decay": 0.0, "torch_adam": True}, False),
        ({"weight_decay": "auto", "adam_w_mode": False}, False),
        ({"weight_decay": 0.01, "adam_w_mode": True}, False),
        ({}, False),
    ],
)
def test_adam_with_a_decay_is_adamw_unless_a_mode_is_set(params, expected):
    """DeepSpeed chooses between torch's two classes as between its own; "auto" is the decay of the Trainer."""
    config = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam", "params": params}}
    assert ("HS249" in codes(config)) == expected
