"""An Accelerator that a script creates with a precision and asks only for its device."""

import pytest

from check_scripts import reported

SCRIPT = """\
import torch
from accelerate import Accelerator

def main(cfg, model, loader):
    accelerator = Accelerator({precision})
    device = accelerator.device
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    {prepare}
    for x, y in loader:
        loss = model(x.to(device), y.to(device))
        {backward}
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.is_main_process:
        print("done")
"""
PLAIN = {"precision": "mixed_precision=cfg.precision", "prepare": "pass", "backward": "loss.backward()"}


@pytest.mark.parametrize(
    ("change", "is_reported"),
    [
        ({}, True),
        ({"precision": "mixed_precision='bf16'"}, True),
        ({"precision": "mixed_precision='no'"}, False),
        ({"precision": ""}, False),
        ({"prepare": "model, optimizer = accelerator.prepare(model, optimizer)"}, False),
        ({"prepare": "model = wrap(model, accelerator)"}, False),
        ({"backward": "accelerator.backward(loss)"}, False),
        ({"prepare": "register(precision=accelerator.mixed_precision)"}, False),
    ],
)
def test_the_precision_of_an_accelerator_that_only_names_the_device(change, is_reported):
    """Nothing computes in it unless the Accelerator prepares the model, enters autocast or goes somewhere else."""
    assert ("HS139" in reported(SCRIPT.format(**{**PLAIN, **change}))) is is_reported
