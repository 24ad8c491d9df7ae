"""HS140 and HS141 in a loop over a generator that yields inside an autocast region."""

import pytest

from check_scripts import findings, reported

LOOP = """\
import torch

def batches(loader, encoder{parameter}):
    {first}:
        for x, y in loader:
            {second}:
                z = encoder(x)
                {inner}
            {outer}

def train(model, loader, encoder, optimizer, loss_fn):
    for epoch in range(9):
        {create}
        for {target}:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = loss_fn(model(z), y)
            loss.backward()
            optimizer.step()
"""
REGION = 'with torch.autocast("cuda", dtype=torch.bfloat16)'
CASE = {
    "parameter": "",
    "first": REGION,
    "second": "with torch.no_grad()",
    "inner": "pass",
    "outer": "yield z.float(), y",
    "create": "data = batches(loader, encoder)",
    "target": "z, y in data",
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"inner": "yield z, y", "outer": "pass"},
        {"first": "if True", "second": REGION, "inner": "yield z, y", "outer": "pass"},
        {"target": "i, (z, y) in enumerate(data)"},
        {"create": "pass", "target": "z, y in batches(loader, encoder)"},
        {"first": REGION.replace(")", ", enabled=half)"), "parameter": ", half=True"},
    ],
)
def test_region_stays_open_in_the_consumer(changes):
    """HS140 and HS141: the region of the generator is not left at its `yield`."""
    lines = [(f.code, f.line) for f in findings(LOOP.format(**CASE | changes), "HS140", "HS141")]
    assert lines == [("HS140", 18), ("HS141", 19)]


@pytest.mark.parametrize(
    "changes",
    [
        {"first": "if True", "second": REGION},  # yields after the region
        {"first": REGION.replace(")", ", enabled=False)")},
        {"first": "with torch.no_grad()"},
        {"create": "data = list(batches(loader, encoder))"},  # the generator has ended
        {"outer": "rows = [z]", "create": "data = loader"},
    ],
)
def test_loops_outside_the_region(changes):
    """No finding where the generator leaves its region before it yields, or has ended."""
    assert not reported(LOOP.format(**CASE | changes)) & {"HS140", "HS141"}
