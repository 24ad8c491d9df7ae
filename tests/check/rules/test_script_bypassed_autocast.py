"""HS610: which calls are parts of a prepared model, and what else may run its forward."""

import pytest

from check_scripts import findings

TRAIN = """\
import torch
from accelerate import Accelerator
{classes}
def train():
    accelerator = Accelerator({options})
    {prepare}
    for x, y in loader:
        {forward}
        accelerator.backward(loss_fn(out, y))
        optimizer.step()
        optimizer.zero_grad()
"""
PREPARE = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
BF16 = "mixed_precision='bf16'"


@pytest.mark.parametrize(
    ("options", "prepare", "forward", "is_reported"),
    [
        (BF16, PREPARE, "out = model.encoder(x)", True),
        ("mixed_precision=args.mixed_precision", PREPARE, "out = model.encoder(x)", True),
        (BF16, PREPARE, "out = accelerator.unwrap_model(model).encoder(x)", False),
        (BF16, PREPARE, "net = accelerator.unwrap_model(model); out = net.encoder(x)", True),
        (BF16, PREPARE, "out = model.module.talker(x); n = model.module.talker.size", True),
        (BF16, "model = accelerator.prepare(model)", "out = model.encoder(x)", True),
        ("", PREPARE, "out = model.encoder(x)", False),  # the launcher decides
        ("mixed_precision='no'", PREPARE, "out = model.encoder(x)", False),
        (BF16, PREPARE, "out = model.generate(x)", False),  # a method, which runs the forward
        (BF16, PREPARE, "out = model.encoder(x); out = model(out)", False),
        (BF16, PREPARE, "out = model.encoder(x); more = compute(model, x)", False),
        (BF16, PREPARE, "out = model.encoder(x).detach()", False),
        (BF16, PREPARE, "out = model.forward(x) + model.head(x)", False),
        (BF16 + ", deepspeed_plugin=plugin", PREPARE, "out = model.encoder(x)", False),
    ],
)
def test_parts_of_a_prepared_model(options, prepare, forward, is_reported):
    """A module of it is not under autocast, where nothing in the file may run the model itself."""
    text = TRAIN.format(classes="", options=options, prepare=prepare, forward=forward)
    assert [f.line for f in findings(text, "HS610")] == [8] * is_reported


CLASS = """\
class Net(torch.nn.Module):
    def forward(self, x):
        return self.body(x)
    def loss(self, x):
        return self.step(x)
    def step(self, x):
        return {inner}(x)
"""


@pytest.mark.parametrize(("inner", "is_reported"), [("self", False), ("self.body", True)])
def test_a_method_of_a_class_of_the_file(inner, is_reported):
    """A method that calls `self(x)` is under autocast there."""
    prepare = "model, optimizer = accelerator.prepare(Net(), optimizer)"
    text = TRAIN.format(classes=CLASS.format(inner=inner), options=BF16, prepare=prepare, forward="out = model.loss(x)")
    assert [f.line for f in findings(text, "HS610")] == [15] * is_reported
