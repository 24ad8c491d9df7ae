"""HS298 for the pairs of values that the Trainer compares, and for a dictionary that the script writes to a file."""

import ast

import pytest

from halfstep.check.config.joint import configs_in_script
from halfstep.check.files.source import Settings, Source
from halfstep.check.rules.config.joint import TrainerMismatch

SCRIPT = """import json
from transformers import Trainer, TrainingArguments

ds_config = {{'zero_optimization': {{'stage': 2}}, {config}}}
args = TrainingArguments('out', deepspeed=ds_config{arguments})
Trainer(model=model, args=args).train()
"""
SCHEDULER = "'scheduler': {{'type': 'WarmupLR', 'params': {{{params}}}}}"
OPTIMIZER = "'optimizer': {{'type': 'AdamW', 'params': {{{params}}}}}"


def messages(text):
    configs = configs_in_script(ast.parse(text), Source("train.py", text, "python"), Settings())
    return [f.message for config in configs for f in TrainerMismatch().check(config)]


@pytest.mark.parametrize(
    ("block", "params", "arguments", "named"),
    [
        (SCHEDULER, "'warmup_max_lr': 1e-4", "", "warmup_max_lr"),
        (SCHEDULER, "'warmup_max_lr': 1e-4", ", learning_rate=1e-4", ""),
        (SCHEDULER, "'warmup_num_steps': 500", "", "warmup_num_steps"),
        (SCHEDULER, "'warmup_num_steps': 500", ", warmup_steps=100", "warmup_num_steps"),
        (SCHEDULER, "'warmup_num_steps': 500", ", warmup_steps=500", ""),
        (SCHEDULER, "'warmup_num_steps': 500", ", warmup_ratio=0.03", ""),
        (SCHEDULER, "'warmup_num_steps': 500", ", warmup_steps=0.03", ""),
        (SCHEDULER, "'warmup_num_steps': 'auto'", "", ""),
        (OPTIMIZER, "'betas': [0.8, 0.999]", "", "adam_beta1"),
        (OPTIMIZER, "'betas': [0.9, 0.95]", ", adam_beta2=0.95", ""),
        (OPTIMIZER, "'betas': 'auto'", "", ""),
    ],
)
def test_the_schedule_and_the_betas_are_compared(block, params, arguments, named):
    """The Trainer compares them too, and computes the warmup steps of a ratio itself."""
    found = messages(SCRIPT.format(config=block.format(params=params), arguments=arguments))
    assert [named in message for message in found] == ([True] if named else [])


def test_a_batch_size_that_the_trainer_searches_is_not_compared():
    """With auto_find_batch_size the Trainer changes the size itself."""
    config = "'train_micro_batch_size_per_gpu': 4"
    assert messages(SCRIPT.format(config=config, arguments="")) != []
    assert messages(SCRIPT.format(config=config, arguments=", auto_find_batch_size=True")) == []


@pytest.mark.parametrize("passed", ["'ds.json'", "path"])
def test_a_dictionary_that_the_script_writes_is_the_file_it_names(passed):
    """Notebooks write the configuration and pass its path."""
    text = SCRIPT.format(config="'fp16': {'enabled': True}", arguments=", bf16=True")
    dump = f"path = 'ds.json'\nwith open({passed}, 'w') as file:\n    json.dump(ds_config, file)\n"
    text = text.replace("deepspeed=ds_config", f"deepspeed={passed}").replace("args =", f"{dump}args =")
    assert len(messages(text)) == 1
    assert messages(text.replace("json.dump(ds_config", "json.dump(other")) == []
    assert messages(text.replace(f"open({passed}", "open('other.json'")) == []
