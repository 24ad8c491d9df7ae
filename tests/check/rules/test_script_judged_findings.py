"""Forms of public scripts whose findings a reader judged false, each with the nearest form that stays a finding."""

import pytest

from check_scripts import findings


def lines(text, code):
    """The lines at which a rule reports something."""
    return [f.line for f in findings(text, code)]


SUBCLASSED = """\
from transformers import Trainer, TrainingArguments
class Weighted(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        loss.backward()
        return loss.detach()
args = TrainingArguments("out"{options})
Weighted(model, args).train()
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (", bf16=True", []),
        (", fp16=False", []),
        (", fp16=True", [5]),
        ("", [5]),  # `accelerate launch --mixed_precision fp16`
        (", bf16=use_bf16, fp16=not use_bf16", [5]),
        (", bf16=True, deepspeed='ds.json'", [5]),
    ],
)
def test_a_trainer_that_scales_nothing_is_not_bypassed(options, expected):
    """The Trainer has a scaler in fp16 only: `loss.backward()` is its own backward where every argument excludes that."""
    assert lines(SUBCLASSED.format(options=options), "HS185") == expected
