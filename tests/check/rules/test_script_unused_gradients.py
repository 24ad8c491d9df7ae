"""HS156 where a schedule advances, and no line steps the optimizer."""

import pytest

from check_scripts import findings

UNUSED = """\
import torch
class Trainer:
    def __init__(self, model, loader):
        self.optimizer = model.configure_optimizers(lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer)
    def train(self, model, loader):
        for x in loader:
            {first}
            with torch.autocast('cuda', dtype=torch.bfloat16):
                loss = model(x)
            loss.backward()
            {last}
            self.scheduler.step()
"""
CLEAR = "self.optimizer.zero_grad()"


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (CLEAR, "pass", [(11, "error")]),
        ("pass", CLEAR, [(11, "error")]),
        (CLEAR, "self.optimizer.step()", []),
        (CLEAR, "advance(self.optimizer)", []),
        ("pass", "pass", []),
    ],
)
def test_gradients_that_no_step_uses_are_cleared_before_or_after_the_backward(first, last, expected):
    """Where a schedule advances and no line steps the optimizer, it does not matter on which side of the backward zero_grad is."""
    assert [(f.line, f.severity) for f in findings(UNUSED.format(first=first, last=last), "HS156")] == expected


OPTIONAL = """\
import torch
from apex import amp
def train(args, model, optimizer, loader):
    for x in loader:
        {clear}
        loss = model(x)
        if {test}:
            if args.fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
        {other}
        if hasattr(model, 'module'):
            print(loss.item())
        {step}
"""
FORM = {"clear": "model.zero_grad()", "test": "not args.rdrop", "other": "pass", "step": "optimizer.step()"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, [16]),
        ({"test": "args.plain_loss"}, [16]),
        ({"other": "else: print(loss)"}, [16]),
        ({"other": "else: both(model, x, loss).backward()"}, []),
        ({"other": "else: train_rdrop(x)"}, []),
        ({"other": "if args.rdrop: consistency(model, x)"}, []),
        ({"other": "if args.rdrop: (loss + model(x)).backward()"}, []),
        ({"test": "not args.eval_only"}, []),
        ({"test": "loss < args.limit"}, []),
        ({"step": "if not args.rdrop: optimizer.step()"}, []),
        ({"step": "optimizer.step(closure)"}, []),
        ({"clear": "if not args.rdrop: model.zero_grad()"}, []),
    ],
)
def test_an_option_that_leaves_a_step_without_any_backward(changed, expected):
    """With an option that excludes each backward of a loop, the step has no gradients, unless another line may compute some."""
    assert [f.line for f in findings(OPTIONAL.format(**{**FORM, **changed}), "HS156")] == expected
