"""HS154: losses that are created and called in one expression, and engines whose configuration a function builds."""

import pytest

from check_scripts import findings

INLINE = """\
import torch
from torch import nn
@torch.no_grad()
def evaluate(model, loader):
    total = 0
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(x)["scores"]
{indent}        loss = nn.CrossEntropyLoss(ignore_index=0)(logits{cast}.view(-1, n), y)
        total += loss.item()
    return total
"""
ENGINE = """\
import deepspeed
import torch
from torch import nn
def build(cfg):
    return {{"train_batch_size": 8, "zero_optimization": {{"stage": 2}}, "fp16": {{"enabled": {enabled}}}}}

class Runner:
    def __init__(self, cfg, ds_config=None):
        self.config = ds_config or build(cfg)

    def train(self, model, loader):
        engine, *_ = deepspeed.initialize(model=model, config=self.config)
        criterion = nn.CrossEntropyLoss()
        for x, y in loader:
            logits = engine(x)
            loss = criterion(logits{cast}, y)
            engine.backward(loss)
            engine.step()
"""


@pytest.mark.parametrize(
    ("cast", "indent", "lines"), [("", "", [9]), (".float()", "", []), ("", "    ", [])], ids=["left", "cast", "inside"]
)
def test_a_loss_that_is_created_where_it_is_called(cast, indent, lines):
    """`nn.CrossEntropyLoss()(logits, y)` computes in the dtype of the logits that left the region."""
    assert [f.line for f in findings(INLINE.format(cast=cast, indent=indent), "HS154")] == lines


@pytest.mark.parametrize(
    ("enabled", "cast", "lines"),
    [("True", "", [16]), ("cfg.fp16", "", [16]), ("False", "", []), ("True", ".float()", [])],
)
def test_an_engine_with_the_only_configuration_of_the_file(enabled, cast, lines):
    """The dictionary is what a function of the file returns; an option may enable fp16."""
    assert [f.line for f in findings(ENGINE.format(enabled=enabled, cast=cast), "HS154")] == lines
