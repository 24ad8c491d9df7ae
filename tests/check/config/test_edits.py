"""Fixes of configurations: the finding goes, the rest of the page stays, comments included."""

import ast
import json

import pytest

from halfstep.check.config.config import case_source, read_configs
from halfstep.check.config.joint import configs_in_script
from halfstep.check.files.source import Settings, Source
from halfstep.check.registry import rules_of
from halfstep.check.rule import ConfigRule
from halfstep.precision.json_tree import load_json

RULES = [rule for rule in rules_of("config") if issubclass(rule, ConfigRule)]


def findings(text):
    source = text if isinstance(text, Source) else case_source(text)
    if source.language == "python":
        configs = configs_in_script(ast.parse(source.text), source, Settings())
    else:
        configs = read_configs(source, Settings())
    return [finding for config in configs for rule in RULES for finding in rule().check(config)]


def fixed(text, code):
    (finding,) = [f for f in findings(text) if f.code == code]
    assert finding.fix is not None
    text = text.text if isinstance(text, Source) else text
    for edit in sorted(finding.fix.edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    assert code not in [f.code for f in findings(text)]
    return text


def test_a_flag_is_added_in_the_layout_of_the_file():
    """The new key stands first, indented like the one it stands before."""
    text = '{\n    "zero_optimization": {"stage": 2}, // keep\n    "optimizer": {"type": "SGD", "params": {"lr": 0.1}}\n}\n'
    assert fixed(text, "HS242") == text.replace(
        '{\n    "zero', '{\n    "zero_allow_untested_optimizer": true,\n    "zero', 1
    )


def test_a_flag_is_added_to_a_python_dictionary():
    """Python's spelling of true, in the quotes of the dictionary."""
    text = "import deepspeed\nc = {'zero_optimization': {'stage': 2}, 'optimizer': {'type': 'SGD', 'params': {'lr': 0.1}}}\n"
    assert "{'zero_allow_untested_optimizer': True, 'zero_optimization'" in fixed(text, "HS242")


def test_a_flag_is_added_to_yaml():
    """A separate line with the indentation of its neighbours."""
    text = "model: x\ndeepspeed:\n  # ours\n  zero_optimization:\n    stage: 2\n  optimizer: {type: SGD, params: {lr: 0.1}}\n"
    source = Source("c.yaml", text, "yaml")
    assert "  # ours\n  zero_allow_untested_optimizer: true\n  zero_optimization:\n" in fixed(source, "HS242")


@pytest.mark.parametrize(
    ("text", "after"),
    [
        (
            '{\n  "zero_optimization": {"stage": 1},\n  "amp": {"enabled": false}, // old\n  "train_batch_size": 8\n}',
            '{\n  "zero_optimization": {"stage": 1},\n  // old\n  "train_batch_size": 8\n}',
        ),
        (
            '{\n  "zero_optimization": {"stage": 1},\n  "amp": {"enabled": false}\n}',
            '{\n  "zero_optimization": {"stage": 1}\n}',
        ),
        (
            '{"zero_optimization": {"stage": 1}, "amp": {"enabled": false}, "train_batch_size": 8}',
            '{"zero_optimization": {"stage": 1}, "train_batch_size": 8}',
        ),
        (
            '{\n  "amp": {\n    "enabled": false\n  },\n  "zero_optimization": {"stage": 1}\n}',
            '{\n  "zero_optimization": {"stage": 1}\n}',
        ),
    ],
)
def test_a_block_is_removed_with_its_comma_and_line(text, after):
    """First, last, alone on its lines or not: what is left is the same file without it."""
    assert fixed(text, "HS206") == after
    assert "amp" not in load_json(after)


def test_max_grad_norm_moves_to_where_it_counts():
    """The value is taken out of the optimizer and written at the top level."""
    text = '{\n  "zero_optimization": {"stage": 1},\n  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "max_grad_norm": 0.5}}\n}'
    values = json.loads(fixed(text, "HS241"))
    assert values["gradient_clipping"] == 0.5
    assert values["optimizer"]["params"] == {"lr": 1e-4}


def test_a_key_keeps_its_quotes():
    """Renaming changes the name alone."""
    text = "import deepspeed\nds = {'zero_optimization': {'stage': 2}, 'gradient_cliping': 1.0}  # x\n"
    assert fixed(text, "HS252") == text.replace("cliping", "clipping")


def test_old_offload_flags_become_blocks():
    """cpu_offload: true is offload_optimizer with a device."""
    after = fixed('{"zero_optimization": {"stage": 2, "cpu_offload": true}, "train_batch_size": 8}', "HS257")
    assert json.loads(after)["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_quotes_are_taken_off_a_number():
    """The number as it was written, without its quotes."""
    assert '"gradient_clipping": 0.5' in fixed(
        '{"zero_optimization": {"stage": 2}, "gradient_clipping": "0.5"}', "HS255"
    )


def test_an_argument_is_rewritten_in_a_call():
    """Accelerator(fp16=True) becomes the argument of today."""
    text = "from accelerate import Accelerator\na = Accelerator(cpu=False, fp16=True, log_with='x')\n"
    assert "Accelerator(cpu=False, mixed_precision=\"fp16\", log_with='x')" in fixed(text, "HS264")


def test_a_flag_is_added_to_a_call_of_dict():
    """Keywords for keywords."""
    text = "import deepspeed\nds = dict(\n    zero_optimization=dict(stage=2),\n    optimizer=dict(type='SGD', params=dict(lr=0.1)),\n)\n"
    assert "dict(\n    zero_allow_untested_optimizer=True,\n    zero_optimization" in fixed(text, "HS242")


def test_a_line_of_yaml_is_removed():
    """The key goes with its line and its own comment, and nothing moves."""
    text = "ds:\n  zero_optimization: {stage: 2}\n  sparse_gradients: false  # idle\n  train_batch_size: 8\n"
    after = fixed(Source("c.yaml", text, "yaml"), "HS256")
    assert after == "ds:\n  zero_optimization: {stage: 2}\n  train_batch_size: 8\n"


def test_a_block_of_yaml_is_removed():
    """All lines of a nested block go."""
    text = "ds:\n  zero_optimization: {stage: 2}\n  elasticity:\n    enabled: false\n    x: 1\n  train_batch_size: 8\n"
    after = fixed(Source("c.yaml", text, "yaml"), "HS256")
    assert after == "ds:\n  zero_optimization: {stage: 2}\n  train_batch_size: 8\n"


@pytest.mark.parametrize(
    "text",
    [
        '{\n  "zero_optimization": {"stage": 1}, // ZeRO\n  // Apex is off\n  "amp": {"enabled": false}\n}',
        '{\n  "zero_optimization": {"stage": 1}\n  "amp": {"enabled": false}\n}',
    ],
)
def test_a_layout_that_cannot_be_edited_safely_is_left(text):
    """With a comment or no comma before the last key there is a finding and no fix."""
    (finding,) = [f for f in findings(text) if f.code == "HS206"]
    assert finding.fix is None


def test_the_only_key_of_a_block_leaves_an_empty_block():
    """Removing the last key keeps the brackets."""
    text = '{"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}, "zero_optimization": {"stage": 1}}'
    assert json.loads(fixed(text, "HS241"))["optimizer"]["params"] == {}


def test_trailing_commas_are_removed_and_comments_are_not():
    """The fix is made only where it is enough."""
    assert fixed('{"train_batch_size": "auto", "zero_optimization": {"stage": 2,},}', "HS260").count(",") == 1
    (finding,) = [
        f
        for f in findings('{"train_batch_size": "auto", # x\n"zero_optimization": {"stage": 2,}}')
        if f.code == "HS260"
    ]
    assert finding.fix is None


@pytest.mark.parametrize(
    ("options", "fixable"), [("**{'fp16': True}", False), ("**dict(fp16=True)", True), ("fp16=True", True)]
)
def test_an_unpacked_dictionary_gets_no_edit_for_a_call(options, fixable):
    """`key=value` is valid in a call and in `dict(...)`, not between the braces of a dictionary."""
    text = f"from accelerate import Accelerator\n\naccelerator = Accelerator({options})\n"
    (finding,) = [f for f in findings(text) if f.code == "HS264"]
    assert (finding.fix is not None) == fixable
    if fixable:
        ast.parse(fixed(text, "HS264"))
