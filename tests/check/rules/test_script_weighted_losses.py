"""HS180: losses that a function weighs by what it receives along with the number of micro-batches."""

import pytest

from check_scripts import findings

WEIGHTED = """\
import torch
from shares import weigh
{defined}
def update(model, optimizer, scaler, batches, plan):
    optimizer.zero_grad()
    for micro in range(plan.micro_batches):
        x, y = next(batches)
        with torch.autocast('cuda', dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
            {weigh}
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
SHARE = "\ndef share(loss, size, plan):\n    return loss * size / plan.total\n"
MEAN = "\ndef share(loss, size, plan):\n    return loss.sum() / size * plan.weight\n"


@pytest.mark.parametrize(
    ("defined", "weigh", "expected"),
    [
        ("", "pass", 1),
        ("", "loss = weigh(loss, len(x), plan)", 0),
        ("", "loss = plan.weigh(loss)", 0),
        ("", "loss = weigh(loss, plan=plan)", 0),
        (SHARE, "loss = share(loss, len(x), plan)", 0),
        (SHARE, "loss = share(loss, size=len(x), plan=plan)", 0),
        (MEAN, "loss = share(loss, len(x), plan)", 1),
        ("", "report(loss, plan)", 1),  # only shows it
        ("", "loss = weigh(loss, len(x))", 1),
        ("", "loss = loss_of(model, x, plan)", 1),  # a loss with settings, not one that is weighed
        ("", "penalty = weigh(penalty_loss, plan)", 1),
    ],
)
def test_a_loss_that_is_weighed_by_the_object_with_the_count(defined, weigh, expected):
    """`plan.weigh(loss)` may divide by what the plan has; a function that receives no loss, or not the plan, does not."""
    assert len(findings(WEIGHTED.format(defined=defined, weigh=weigh), "HS180")) == expected


METHOD = """\
import torch
class Trainer({base}):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.num_micro = model, optimizer, 8

    def update(self, batches):
        self.optimizer.zero_grad()
        for micro in range(self.num_micro):
            x, y = next(batches)
            with torch.autocast('cuda', dtype=torch.bfloat16):
                loss = torch.nn.functional.mse_loss(self.model(x), y)
            {backward}
        self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("base", "backward", "expected"),
    [
        ("Base", "self.reweighed(loss).backward()", 0),
        ("Base", "loss.backward()", 1),
        ("Base", "self.engine.prepare(loss).backward()", 1),
    ],
)
def test_a_loss_that_an_inherited_method_weighs(base, backward, expected):
    """A method of another file knows the number of micro-batches of its object."""
    assert len(findings(METHOD.format(base=base, backward=backward), "HS180")) == expected


@pytest.mark.parametrize(("divisor", "expected"), [("self.num_micro", 0), ("plan.total", 0), ("size", 1)])
def test_a_method_of_the_file_divides_by_what_the_plan_has(divisor, expected):
    """Of a method of this file its quotient decides: by its object or by the plan that it receives."""
    text = METHOD.replace("self.num_micro = model, optimizer, 8", "self.plan = model, optimizer, Plan()")
    text = text.replace("range(self.num_micro)", "range(self.plan.num_micro)")
    text += f"\n    def share(self, loss, size, plan):\n        return loss / {divisor}\n"
    text = text.format(base="object", backward="self.share(loss, len(x), self.plan).backward()")
    assert len(findings(text, "HS180")) == expected
