"""Batches that a loop splits into micro-batches: the divisor of their loss, and the float16 region of a table of regions."""

import pytest

from check_scripts import reported

SPLIT = """\
import math
import torch
from accelerate import Accelerator

accelerator = Accelerator()
loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
num_micro = {count}
for x, y in loader:
    optimizer.zero_grad()
    for micro in range({length}):
        part = slice(micro * args.micro_batch, (micro + 1) * args.micro_batch)
        loss = losses(model(x[part]), y[part]).sum() / {divisor}
        accelerator.backward(loss)
    optimizer.step()
"""
TABLE = """\
import contextlib
import torch
from accelerate import Accelerator

accelerator = Accelerator({precision})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    optimizer.zero_grad()
    with {{
        "bf16": torch.autocast("cuda", dtype=torch.bfloat16),
        "{key}": torch.autocast("cuda", dtype=torch.{dtype}),
        "fp32": contextlib.nullcontext(),
    }}[args.precision]:
        loss = model(x)
    accelerator.backward(loss)
    optimizer.step()
"""
COUNTS = [
    ("batch_size // args.micro_batch", "num_micro"),
    ("math.ceil(batch_size / args.micro_batch)", "num_micro"),
    ("0", "(batch_size - 1) // args.micro_batch + 1"),
]


@pytest.mark.parametrize(("count", "length"), COUNTS)
def test_a_share_of_the_mean_is_divided(count, length):
    """The sum over a micro-batch divided by the size of the batch that is split is right."""
    assert "HS180" not in reported(SPLIT.format(count=count, length=length, divisor="batch_size"))


@pytest.mark.parametrize("count", ["args.total // batch_size", "args.total // batch_size // args.world"])
def test_the_mean_over_a_micro_batch_is_not_divided(count):
    """The sum over a micro-batch divided by its own size still has to be divided by the number of micro-batches."""
    assert "HS180" in reported(SPLIT.format(count=count, length="num_micro", divisor="batch_size"))


def test_the_float16_region_of_a_table_is_not_scaled():
    """An Accelerator without mixed precision scales nothing, whichever place the float16 region has in the table."""
    assert "HS123" in reported(TABLE.format(precision="", key="fp16", dtype="float16"))


@pytest.mark.parametrize(
    ("precision", "key", "dtype"),
    [("", "bf16_fast", "bfloat16"), ('mixed_precision="fp16"', "fp16", "float16")],
)
def test_scaled_and_bfloat16_regions_are_accepted(precision, key, dtype):
    """bfloat16 needs no scale, and an Accelerator with fp16 has one."""
    assert "HS123" not in reported(TABLE.format(precision=precision, key=key, dtype=dtype))


LAST_APART = """\
import torch
for step in range(first_step, steps):
    optimizer.zero_grad()
    batches = fetch(accum)
    if {test}:
        for x, y in batches[:-1]:
            with model.no_sync():
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = criterion(model(x), y) / accum
                loss.backward()
        {leave}
    x, y = batches[-1]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(x), y) / accum
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("test", "leave", "expected"),
    [
        ("True", "pass", []),
        ("distributed and accum > 1", "pass", []),
        ("accum > 1", "pass", []),
        ("accum > 1", "optimizer.step(); continue", ["HS181"]),
    ],
)
def test_the_last_micro_batch_has_a_backward_after_the_loop(test, leave, expected):
    """A loop over the others, as for `no_sync()`, accumulates; one on another path does not."""
    assert [code for code in reported(LAST_APART.format(test=test, leave=leave)) if code == "HS181"] == expected
