"""HS137: an evaluation that halves the model it was passed."""

import pytest

from check_scripts import findings

ENGINE = """\
import torch
def train_one_epoch(model, loader, optimizer):
    for x in loader:
        model(x).backward()
        optimizer.step()
def {name}(model, loader, args=None):
    model.eval()
{body}
"""


@pytest.mark.parametrize(
    ("name", "body", "count"),
    [
        ("evaluate", "    if args.fp16_eval:\n        model.half()", 1),
        ("validate", "    model = model.to(torch.bfloat16)", 1),
        ("evaluate", "    model = model.half()\n    run(model)\n    model.float()", 0),
        ("evaluate", "    model = copy.deepcopy(model)\n    model.half()", 0),
        ("evaluate", "    x = x.half()", 0),
        ("export", "    model.half()", 0),
    ],
)
def test_a_cast_of_the_callers_model_is_reported_unless_undone(name, body, count):
    """The module itself changes, so the training that follows has 16-bit weights; copies and casts back are fine."""
    assert len(findings(ENGINE.format(name=name, body=body), "HS137")) == count


def test_a_file_without_training_is_silent():
    """An evaluation script may keep its own model in 16 bits."""
    text = ENGINE.format(name="evaluate", body="    model.half()").replace("model(x).backward()", "model(x)")
    assert findings(text, "HS137") == []
