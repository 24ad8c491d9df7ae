"""Configurations in files: which are detected, which are ignored, and the places of their values."""

import pytest

from halfstep.check import check_path
from halfstep.check.config.config import Config, case_source, read_configs
from halfstep.check.config.kind import kind_of
from halfstep.check.config.yaml_reader import parse_yaml
from halfstep.check.files.source import Cell, Settings, Source
from halfstep.check.finding import Place
from halfstep.errors import SettingError
from halfstep.precision.node import UNKNOWN, Block, Span

DEEPSPEED = """{
  // tuned for 8 GPUs
  "train_batch_size": "auto",
  "zero_optimization": {
    "stage": 2
  },
  "fp16": {"enabled": true, "loss_scale": ${SCALE}}
}
"""


def read(text, language="json"):
    return read_configs(Source(f"conf.{language}", text, language), Settings())


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "app", "version": "1.0", "scripts": {"build": "tsc"}, "precision": 3}',
        '{"compilerOptions": {"target": "es2020"}, "include": ["src"]}',
        '{"model_type": "llama", "hidden_size": 4096, "torch_dtype": "float16", "bf16": true}',
        '{"architectures": ["BertModel"], "layer_norm_eps": 1e-12, "fp16": false, "optimizer": "adamw"}',
        '{"amp": 3, "train_batch_size": 8}',
        '{"fp16": {"enabled": true}}',
        '[{"precision": 16}, {"precision": 32}]',
        '{"precision": "fp16", "model": "resnet"}',
        "not json at all, with fp16 in it",
        '{"fp16": broken',
        "",
    ],
)
def test_other_files_are_left_alone(text):
    """A file of another program gives no configuration, whatever words it has in it."""
    assert read(text) == ()


@pytest.mark.parametrize(
    "text",
    [
        "on: push\nenv:\n  precision: high\n",
        "services:\n  web:\n    image: fp16\n",
        "fp16: [unclosed",
        "precision: 32\n",
    ],
)
def test_other_yaml_is_left_alone(text):
    """CI files, compose files and broken YAML of others are none of ours."""
    assert read(text, "yaml") == ()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("zero_optimization: {stage: 2}\n", "deepspeed"),
        ("fp16: {enabled: true, loss_scale: 0}\n", "deepspeed"),
        ("train_batch_size: 8\noptimizer: {type: Adam}\nsteps_per_print: 10\n", "deepspeed"),
        ("compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\nnum_processes: 1\n", "accelerate"),
        ("output_dir: out\nper_device_train_batch_size: 1\nbf16: true\n", "transformers"),
        (
            "base_model: m\nmicro_batch_size: 1\nnum_epochs: 3\nlearning_rate: 0.1\noutput_dir: o\nbf16: auto\n",
            "transformers",
        ),
        ("accelerator: gpu\ndevices: 8\nmax_steps: 9\nprecision: 16\n", "lightning"),
        ("_target_: pytorch_lightning.Trainer\nprecision: 16\n", "lightning"),
        ("precision: 16\nmodel: x\n", None),
    ],
)
def test_a_mapping_is_known_by_its_keys(text, kind):
    """Each tool is detected by keys that no other tool has."""
    (root,) = parse_yaml(text, "x")
    assert kind_of(root) == kind


def test_a_block_inside_another_file_is_found():
    """DeepSpeed's block in a larger file is a configuration, and the file around it is not."""
    (config,) = read("model: x\ndeepspeed:\n  zero_optimization: {stage: 3}\n  bf16: {enabled: true}\n", "yaml")
    assert config.kind == "deepspeed"
    assert config.value("zero_optimization", "stage") == 3


def test_a_program_with_other_keys_is_not_strict():
    """GPT-NeoX keeps DeepSpeed's keys among its own, and none of those is called unknown."""
    (config,) = read(
        '{"zero_optimization": {"stage": 1}, "num_layers": 12, "hidden_size": 768, "fp16": {"enabled": true}}'
    )
    assert not config.strict


def test_values_are_plain_unknown_or_absent():
    """A rule gets the value, None for what is not there, and UNKNOWN for what only a run decides."""
    (config,) = read(DEEPSPEED)
    assert config.value("zero_optimization", "stage") == 2
    assert config.value("zero_optimization", "overlap_comm") is None
    assert config.value("train_batch_size") is UNKNOWN
    assert config.value("fp16", "loss_scale") is UNKNOWN
    assert config.value("zero_optimization") is UNKNOWN
    assert config.number("fp16", "enabled") is None
    assert config.is_on("fp16", "enabled")


def test_an_open_block_may_hold_anything():
    """Where keys cannot all be read, an absent one is undecided."""
    block = Block(Span(0, 0), (), open=True)
    config = Config("deepspeed", block, Source("x", "", "python"), Settings())
    assert config.value("fp16", "enabled") is UNKNOWN


def test_places_count_as_editors_do():
    """Lines and columns start at 1, and the place has an end."""
    (config,) = read(DEEPSPEED)
    entry = config.entry("zero_optimization", "stage")
    assert config.where(entry) == Place("conf.json", 5, 5, 5, 15)


def test_places_in_a_notebook_are_inside_the_cell():
    """A line of the joined text is the line of its cell."""
    source = Source("a.ipynb", "x = 1\ny = 2\n", "notebook", (Cell(1, 1, 1), Cell(3, 2, 1)))
    config = Config("torch", Block(Span(6, 11), ()), source, Settings())
    assert config.where(Span(6, 11)) == Place("a.ipynb", 1, 1, 1, 6, cell=3)


@pytest.mark.parametrize(
    ("text", "language"),
    [('{"zero_optimization": {"stage": 2}', "json"), ("compute_environment: LOCAL\nmixed_precision: [fp16\n", "yaml")],
)
def test_a_broken_configuration_is_an_error_with_its_place(text, language):
    """A file that is clearly a configuration and cannot be parsed raises with line and column."""
    with pytest.raises(SettingError, match=r"line \d+, column \d+"):
        read(text, language)


def test_a_file_of_data_is_not_parsed():
    """A file above a quarter of a megabyte is data, not a configuration."""
    assert read('{"zero_optimization": {"stage": 2}, "data": "' + "x" * 300_000 + '"}') == ()


def test_a_template_is_no_broken_configuration():
    """A Jinja template is not JSON, and gives no error."""
    assert read('{"zero_optimization": {"stage": 2}, {% if x %}"fp16": 1{% endif %}}') == ()


def test_yaml_is_imported_only_for_yaml():
    """A check of scripts and JSON never loads PyYAML."""
    import subprocess
    import sys

    code = (
        "import ast, sys\nfrom halfstep.check.config.config import *\nfrom halfstep.check.config.joint import *\n"
        "from halfstep.check.files.source import *\n"
        'text = \'{"zero_optimization": {"stage": 2}}\'\n'
        "assert read_configs(Source('a.json', text, 'json'), Settings())\n"
        "assert configs_in_script(ast.parse('ds_config = ' + text), Source('a.py', 'ds_config = ' + text, 'python'), Settings())\n"
        "assert not {'yaml', 'torch', 'rich', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_case_is_read_as_what_it_looks_like():
    """Bad and good cases need no file name."""
    assert [case_source(text).language for text in ('{"a": 1}', "import torch\n", "a: 1\n")] == [
        "json",
        "python",
        "yaml",
    ]


def test_a_toml_file_is_read_as_a_configuration(tmp_path):
    """A DeepSpeed configuration in TOML has the findings that it has in JSON, at its own lines."""
    (tmp_path / "ds.toml").write_text(
        "train_batch_size = 8\n[fp16]\nenabled = true\n[bf16]\nenabled = true\n[zero_optimization]\nstage = 2\n"
    )
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
    )
    in_toml, in_json = check_path(tmp_path / "ds.toml"), check_path(tmp_path / "ds.json")
    assert {f.code for f in in_toml} == {f.code for f in in_json} != set()
    assert any(f.line > 1 for f in in_toml)
