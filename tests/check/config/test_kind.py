"""Which tool a file configures is decided by its content."""

import pytest

from halfstep.check.config.config import read_configs
from halfstep.check.config.kind import fill_template
from halfstep.check.files.source import Settings, Source
from halfstep.precision.node import UNKNOWN

AXOLOTL = "base_model: a/b\ndatasets:\n  - path: c\nsequence_len: 512\nmicro_batch_size: 1\nnum_epochs: 1\nbf16: auto\nadapter: lora\n"
FACTORY = "stage: sft\nfinetuning_type: lora\ntemplate: qwen3\nnum_train_epochs: 1\nper_device_train_batch_size: 1\nbf16: true\n"
TUNE = "model:\n  _component_: torchtune.models.x.y\noptimizer:\n  _component_: torch.optim.AdamW\ndtype: bf16\n"
TITAN = '[job]\nname = "x"\n[model]\nname = "llama3"\n[training]\nseq_len = 8\ndtype = "bfloat16"\n'

# sd-scripts reads the keys of all tables as one list of arguments.
KOHYA = (
    '[model]\npretrained_model_name_or_path = "a"\n[optimizer]\noptimizer_type = "AdamW"\nlearning_rate = 1e-5\n'
    '[training]\nmixed_precision = "bf16"\nfull_bf16 = true\nlr_scheduler = "cosine"\nmax_train_steps = 10\n'
)


def kinds(text, language="yaml"):
    return [config.kind for config in read_configs(Source(f"x.{language}", text, language), Settings())]


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        (AXOLOTL, "yaml", ["axolotl"]),
        (FACTORY, "yaml", ["llamafactory", "transformers"]),
        (TUNE, "yaml", ["torchtune"]),
        (TITAN, "toml", ["torchtitan"]),
        (KOHYA, "toml", ["kohya"]),
        ("common:\n  memory_efficient_fp16: true\ntask:\n  _name: translation\n", "yaml", ["fairseq"]),
        (
            "actor_rollout_ref:\n  actor:\n    fsdp_config:\n      model_dtype: bf16\n    optim:\n      lr: 1e-6\n",
            "yaml",
            ["verl"],
        ),
    ],
)
def test_a_recipe_is_recognised_by_its_content(text, language, expected):
    """The keys decide, not the name; LLaMA-Factory's arguments are TrainingArguments too, axolotl's are not."""
    assert kinds(text, language) == expected


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("base_model: a/b\nmerge_method: slerp\ndtype: bfloat16\nmodels:\n  - model: c\n", "yaml"),
        ("finetuning_type: bf16\ntemplate: x\n", "yaml"),
        ("model:\n  name: x\noptimizer:\n  name: adamw\ndtype: bf16\n", "yaml"),
        ("model:\n  _component_: mine.model\noptimizer:\n  _component_: mine.adam\ndtype: bf16\n", "yaml"),
        ("training:\n  dtype: bfloat16\n  steps: 5\nmodel: x\n", "yaml"),
        ("common:\n  memory_efficient_fp16: true\nserver:\n  port: 80\n", "yaml"),
        ("ref:\n  fsdp_config:\n    model_dtype: bfloat16\n", "yaml"),
        ("full_bf16: true\nname: x\n", "yaml"),
        ('[tool.x]\nprecision = "bf16"\n[model]\nname = "y"\n', "toml"),
        ("services:\n  app:\n    image: x\n    environment:\n      PRECISION: bf16\n", "yaml"),
    ],
)
def test_other_files_are_no_recipes(text, language):
    """Files of other programs with some of the same words give no configuration."""
    assert kinds(text, language) == []


def test_the_deepspeed_part_of_an_accelerate_file_is_not_a_deepspeed_file():
    """Its keys are Accelerate's, even where it has a block called fp16."""
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: fp16\ndeepspeed_config:\n"
        "  gradient_clipping: 1.0\n  fp16:\n    enabled: true\n"
    )
    assert kinds(text) == ["accelerate"]


def test_a_template_with_slots_is_checked_and_its_slots_are_unknown():
    """`{{ x }}` as a value is unknown; everything around it keeps its value and its position."""
    text = '{"train_batch_size": {{ batch }}, "zero_optimization": {"stage": {{ stage }}}, "fp16": {"enabled": true}}'
    (config,) = read_configs(Source("x.json", text, "json"), Settings())
    assert config.value("train_batch_size") is UNKNOWN
    assert config.value("zero_optimization", "stage") is UNKNOWN
    assert config.value("fp16", "enabled") is True
    assert text[config.entry("fp16").key_span.start :].startswith('"fp16"')


@pytest.mark.parametrize("text", ["{{x}}", "a: {{ x }}", "[{{ x }}, {{ y }}]"])
def test_filling_a_template_keeps_every_position(text):
    """The filled text is as long as the template."""
    assert len(fill_template(text)) == len(text)


@pytest.mark.parametrize("text", ['"{{ x }}"', "'{{ x }}'", "a-{{ x }}", "{{ x }}/b", "{{"])
def test_a_slot_inside_a_string_is_left_alone(text):
    """A quoted slot is already a string, and part of a word is not a value."""
    assert fill_template(text) == text


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("exp.yaml", "trainer:\n  precision: 16\n  max_epochs: 9\nlr: 1\n"),
        ("exp.yaml", "pl_trainer:\n  precision: 16\n  devices: 2\n"),
        ("exp.yaml", "precision: 16\naccumulate_grad_batches: 2\ngradient_clip_val: 1.0\n"),
        ("trainer/gpu.yaml", "accelerator: gpu\nprecision: 16\n"),
        ("gpu.yaml", "# @package _global_.trainer\naccelerator: gpu\nprecision: 16\n"),
    ],
)
def test_a_part_of_the_trainers_arguments_is_recognised_by_its_name(path, text):
    """Hydra's files have a few keys each; the block's or folder's name decides, and unknown values are not errors."""
    configs = read_configs(Source(path, text, "yaml"), Settings())
    assert [(config.kind, config.strict, config.value("precision")) for config in configs] == [("lightning", False, 16)]


@pytest.mark.parametrize(
    "text", ["trainer:\n  precision: 16\n", "model:\n  precision: 16\n  devices: 2\n", "precision: 16\nmax_epochs: 3\n"]
)
def test_a_precision_without_a_trainers_keys_is_no_part_of_one(text):
    """One common key next to `precision` is not enough outside a block with the Trainer's name."""
    assert kinds(text) == []


def test_an_interpolated_precision_is_the_value_it_names():
    """`${precision}` of OmegaConf is read where the same document has it."""
    text = "precision: 16\ntrainer:\n  precision: ${precision}\n  accelerator: gpu\n  devices: 1\n  max_epochs: 3\n"
    assert [c.value("precision") for c in read_configs(Source("x.yaml", text, "yaml"), Settings())] == [16]


@pytest.mark.parametrize(
    "text",
    [
        "lightning:\n  accelerator: gpu\n  precision: 16\n",
        "pl_trainer_kwargs:\n  devices: 2\n  precision: 16\n",
        "run:\n  devices: 2\n  precision: bf16-true\n",  # a name that only Lightning has
        "trainer:\n  gpus: 1\n  amp_level: O2\n",
        "run:\n  class_path: lightning.pytorch.Trainer\n  init_args:\n    precision: 16\n    max_epochs: 3\n",
    ],
)
def test_fragments_of_a_trainer_are_recognised(text):
    """The block's name, a precision of Lightning's own, or an argument for Apex is enough with one more key."""
    assert kinds(text) == ["lightning"]


@pytest.mark.parametrize("key", ["_comment", "_note", "//", "comment_1"])
def test_comments_do_not_make_a_configuration_a_table_of_help_texts(key):
    """Sentences under keys for comments leave a DeepSpeed file what it is; under its own keys they describe them."""
    settings = '"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "gradient_accumulation_steps": 8'
    assert kinds(
        f'{{"{key}": "why this is so", "{key}2": "and that", {settings}}}'.replace('"//2"', '"// 2"'), "json"
    ) == ["deepspeed"]
    assert (
        kinds('{"zero_optimization": {}, "bf16": "train in bf16", "gradient_clipping": "the largest norm"}', "json")
        == []
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learning_rate: 0.0002\nmax_steps: 100\nsave_dir: out\nseed: 1\nbf16: true\namp: false\n", []),
        ("steps_per_print: 10\nbf16: true\n", ["deepspeed"]),
        ("learning_rate: 0.0002\nmax_steps: 100\nsave_dir: out\nseed: 1\nbf16:\n  enabled: true\n", ["deepspeed"]),
    ],
)
def test_a_switch_among_the_keys_of_a_script_is_the_scripts_own(text, expected):
    """DeepSpeed has no `bf16: true`: such a file with the batch size under DeepSpeed's name is read by a script."""
    batch = "train_micro_batch_size_per_gpu: 4\ngradient_accumulation_steps: 1\n"
    assert kinds(batch + text) == expected
