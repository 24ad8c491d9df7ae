"""Settings that are tested by a method of their text, and options whose names only share a word with those of precision."""

import pytest

from check_scripts import reported

SCHEDULE = """\
import torch

def train(model, optimizer, scheduler, loader, device, accum):
    scaler = torch.amp.GradScaler("cuda", enabled={test})
    for i, x in enumerate(loader):
        {assign}
        with torch.autocast("cuda", dtype=torch.float16, enabled={test}):
            loss = model(x) / accum
        scaler.scale(loss).backward()
        if (i + 1) % accum == 0:
{step}
"""
IGNORES = """\
            if {test}:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()"""
READS = """\
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() >= before:
                scheduler.step()"""
TESTS = ['device.startswith("cuda")', 'device.lower() == "cuda"', 'str(device).startswith("cuda")']
OPTION = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--{name}", default=None)
args = parser.parse_args()
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize("test", TESTS)
def test_a_text_that_is_the_same_in_every_iteration(test):
    """A schedule ignores skipped steps under a test of the device, too."""
    ignores = SCHEDULE.format(test=test, assign="pass", step=IGNORES.format(test=test))
    assert "HS196" in reported(ignores)
    assert "HS196" not in reported(SCHEDULE.format(test=test, assign="pass", step=READS))


def test_a_text_of_the_batch_is_no_setting():
    """A name that the loop assigns may differ in each iteration."""
    step = IGNORES.format(test='name.startswith("a")')
    assert "HS196" not in reported(SCHEDULE.format(test="True", assign='name = x["name"]', step=step))


@pytest.mark.parametrize("name", ["mixed-overlap-ratio", "mixed_batches", "half-life", "half_window"])
def test_other_meanings_of_mixed_and_half(name):
    """An option of another subject that nothing reads is none of precision."""
    assert "HS139" not in reported(OPTION.format(name=name))


@pytest.mark.parametrize("name", ["mixed", "mixed-precision", "mixed_training", "use_mixed", "half", "half_precision"])
def test_options_of_precision(name):
    """An option of precision that nothing reads is reported."""
    assert "HS139" in reported(OPTION.format(name=name))
