"""HS285 on `precision: bf16` in files whose other keys only Lightning's Trainer has."""

import pytest

from halfstep.check.config.config import read_configs
from halfstep.check.files.source import Settings, Source
from halfstep.check.rules.config.lightning import OldPrecisionName


def lines(text):
    """The lines with a finding of HS285."""
    configs = read_configs(Source("train.yaml", text, "yaml"), Settings())
    return [f.line for config in configs for f in OldPrecisionName().check(config)]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("gpus: 2\n  max_epochs: 9\n  accumulate_grad_batches: 4\n  gradient_clip_val: 1.0", 6),  # of version 1
        (
            "strategy: ddp\n  max_epochs: 9\n  resume_from_checkpoint: a.ckpt\n  val_check_interval: 9\n  fast_dev_run: false",
            7,
        ),
        ("limit_val_batches: 9\n  val_check_interval: 100", 4),
    ],
)
def test_keys_that_no_other_trainer_has(keys, line):
    """HS285 where two keys or more show that the file is for Lightning."""
    assert lines(f"trainer:\n  {keys}\n  precision: bf16\n") == [line]


@pytest.mark.parametrize(
    "text",
    [
        "trainer:\n  gpus: 2\n  max_epochs: 9\n  strategy: ddp\n  precision: bf16\n",
        "trainer:\n  max_epochs: 9\n  gradient_clip_val: 1.0\n  gpus: 2\n  precision: bf16\n",
        "trainer:\n  limit_val_batches: 9\n  val_check_interval: 100\n  precision: bf16-mixed\n",
        "trainer:\n  limit_val_batches: 9\n  val_check_interval: 100\n  precision: bf16\nexp_manager:\n  name: gpt\n",
    ],
)
def test_files_that_may_be_for_another_trainer(text):
    """No finding where the keys are common to several trainers, for the new name, and in files of NeMo."""
    assert lines(text) == []
