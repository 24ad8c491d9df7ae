"""HS120 and HS123 in simulated runs: two entries of a data file, which whoever writes it sets together."""

import pytest

from simulated_scripts import codes

LOOP = """
import json
import yaml
from files import load, Settings
{read}
scaler = torch.amp.GradScaler("cuda") if {scaled} else None
dtype = torch.bfloat16 if {low} else torch.float16
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=dtype):
        loss = loss_fn(model(x), y)
    if scaler is not None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
"""
ROWS = "rows = json.load(open('rows.json'))\nfor row in rows:\n    print(row)\nrow = rows[0]"


@pytest.mark.parametrize(
    ("read", "scaled", "low"),
    [
        ("row = json.load(file)", "row['scaled']", "row['bf16']"),
        ("row = Settings(**yaml.safe_load(file))", "row.loss_scaling", "row.bf16"),
        (ROWS, "row['scaled']", "row['dtype'] == 'bf16'"),
    ],
)
def test_the_entries_of_a_record_are_written_together(read, scaled, low):
    """That one row has both a scaler and bfloat16, or neither, is up to the file."""
    assert codes(LOOP.format(read=read, scaled=scaled, low=low)) == []


@pytest.mark.parametrize(
    ("read", "scaled", "low", "expected"),
    [
        ("row = json.load(file)", "args.scaled", "row['bf16']", ["HS120", "HS123"]),
        ("first, row = load(one), load(two)", "first.scaled", "row.bf16", ["HS120", "HS123"]),
        ("row = json.load(file)", "row['scaled']", "False", ["HS123"]),
        ("row = json.load(file)", "True", "row['bf16']", ["HS120"]),
        ("row = json.load(file)", "row['amp']", "row['amp']", ["HS120", "HS123"]),
    ],
)
def test_one_entry_or_two_sources_decide_nothing_together(read, scaled, low, expected):
    """A run with one wrong value is a mistake of the script."""
    assert codes(LOOP.format(read=read, scaled=scaled, low=low)) == expected
