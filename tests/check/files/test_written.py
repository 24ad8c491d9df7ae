"""Files that cells of a notebook write."""

import json

import pytest

from halfstep.check.files.document import located_source, read_document
from halfstep.check.runner import check_document
from halfstep.check.select import Selection
from halfstep.check.settings import Settings

LOOP = """\
import torch
scaler = torch.amp.GradScaler('cuda')
for x in loader:
    optimizer.zero_grad()
    with torch.autocast('cuda'):
        loss = model(x)
    scaler.scale(loss).backward()
    optimizer.step()
"""
CONFIG = '{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}'


def check(*cells):
    """The findings in a notebook of these code cells, and its source."""
    data = json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]}).encode()
    document = read_document("train.ipynb", data, "notebook")
    return check_document(document, Settings(), Selection()), located_source(document)


@pytest.mark.parametrize("head", ["%%writefile train.py\n", "%%file src/train.py\n", "\n%%writefile 'train.py'\n"])
def test_a_script_that_a_cell_writes_is_checked(head):
    """Its lines are counted in the cell and shown, and no fix is offered for them."""
    found, source = check("x = 1\n", head + LOOP)
    steps = [f for f in found if f.code == "HS103"]
    assert [(f.cell, f.line) for f in steps] == [(2, 8 + head.count("\n"))]
    assert source.line_of(steps[0].cell, steps[0].line) == "    optimizer.step()"
    assert all(f.fix is None for f in found)


def test_a_configuration_that_a_cell_writes_is_checked():
    """`%%writefile ds_config.json` is a configuration of DeepSpeed."""
    found, _ = check("%%writefile ds_config.json\n" + CONFIG)
    assert "HS201" in {f.code for f in found if f.cell == 1}


@pytest.mark.parametrize(
    "cell",
    [
        "%%writefile notes.txt\n" + LOOP,
        "%%writefile train.py\n" + LOOP + "{{ more }}}\n",
        "%%writefile train.py\n" + LOOP + "# halfstep: ignore-file\n",
        "%%bash\n" + LOOP,
    ],
)
def test_other_texts_are_left_out(cell):
    """Text files, templates that do not parse, suppressed scripts and other languages have no findings."""
    assert not check(cell)[0]


def test_a_written_script_shares_nothing_with_the_other_cells():
    """The model that a written script trains is not the model of a cell."""
    validation = "model.eval()\nwith torch.no_grad():\n    for x in valid:\n        out = model(x)\n"
    together, _ = check(LOOP, validation)
    apart, _ = check("%%writefile train.py\n" + LOOP, "import torch\n" + validation)
    assert [sum(f.code == "HS149" for f in found) for found in (together, apart)] == [1, 0]


def test_a_cell_that_appends_continues_the_file():
    """`-a` adds to the newest version of the file."""
    split = LOOP.index("for")
    found, source = check("%%writefile train.py\n" + LOOP[:split], "%%writefile -a train.py\n" + LOOP[split:])
    steps = [f for f in found if f.code == "HS103"]
    assert [(f.cell, f.line) for f in steps] == [(2, 7)]
    assert source.line_of(2, 7) == "    optimizer.step()"
