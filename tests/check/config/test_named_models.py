"""HS280: the model that a file names in another section than the arguments of its training."""

import pytest

from halfstep.check.config.config import read_configs
from halfstep.check.files.source import Settings, Source
from halfstep.check.registry import rules_of

TRAINING = """\
{indent}per_device_train_batch_size: 4
{indent}num_train_epochs: 3
{indent}learning_rate: 1.0e-4
{indent}fp16: {fp16}
"""


def sections(head, fp16="true", key="training"):
    """A file with a part about the model and a section of training arguments."""
    return f"{head}{key}:\n" + TRAINING.format(indent="  ", fp16=fp16)


def lines(text):
    rule = next(r for r in rules_of("config") if r.code == "HS280")()
    configs = read_configs(Source("train.yaml", text, "yaml"), Settings())
    return [f.line for config in configs for f in rule.check(config)]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (sections("model:\n  model_name: google/gemma-3-270m-it\n  max_length: 512\n"), 8),
        (sections("model:\n  name: google/flan-t5-large\n", key="training_args"), 7),
        (sections("model_args:\n  pretrained_model_name_or_path: google/mt5-base\n", key="trainer"), 7),
        (sections("model_name: google/gemma-3-4b-it\n"), 6),
        (sections("model: google/flan-t5-xl\n"), 6),
    ],
)
def test_the_model_is_named_next_to_the_arguments(text, line):
    """The section about the model, or a key at the top of the file, says what the section of arguments trains."""
    assert lines(text) == [line]


@pytest.mark.parametrize(
    "text",
    [
        sections("model:\n  name: google/gemma-3-270m-it\n", fp16="false"),
        sections("model:\n  name: t5-base\n"),
        sections("teacher:\n  name: google/gemma-3-4b-it\n"),
        sections("model:\n  name: t5-base\n  teacher:\n    name: google/flan-t5-xl\n"),
        sections("model:\n  name: google/flan-t5-large\n") + "  model_name_or_path: t5-base\n",
    ],
)
def test_another_model_is_trained(text):
    """Without fp16, with a model in its range, or where only another section names such a model, nothing is reported."""
    assert lines(text) == []
