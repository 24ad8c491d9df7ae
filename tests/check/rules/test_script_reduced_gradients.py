"""HS116, HS117, HS179: reductions in a function or of joined gradients, names of Apex, and numbers made of a loss."""

import pytest

from check_scripts import findings

REDUCED = """\
import torch
import torch.distributed as dist

class Trainer:
    def reduce(self):
        {body}

    def step(self, loss):
        self.scaler.scale(loss).backward()
        {first}
        {second}
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""
UNSCALE, REDUCE = "self.scaler.unscale_(self.optimizer)", "self.reduce()"
EACH = "for p in self.model.parameters(): dist.all_reduce(p.grad)"
FLAT = "flat = torch.cat([p.grad.view(-1) for p in self.model.parameters()])\n        dist.all_reduce(flat)"
LIST = "grads = [p.grad for p in self.model.parameters()]\n        dist.all_reduce_coalesced(grads)"
NORM = "norms = torch.stack([p.grad.norm() for p in self.model.parameters()])\n        dist.all_reduce(norms)"


@pytest.mark.parametrize(
    ("body", "first", "second", "expected"),
    [
        (EACH, UNSCALE, REDUCE, True),
        (FLAT, UNSCALE, REDUCE, True),
        (LIST, UNSCALE, REDUCE, True),
        (NORM, UNSCALE, REDUCE, False),
        (EACH, REDUCE, UNSCALE, False),
        ("dist.all_reduce(self.loss)", UNSCALE, REDUCE, False),
    ],
)
def test_a_function_that_reduces_gradients(body, first, second, expected):
    """A function of the file reduces what its body does, one by one, in a list or in one tensor; norms are no gradients."""
    assert bool(findings(REDUCED.format(body=body, first=first, second=second), "HS116")) is expected


APEX = """\
import torch
{bind}
def train(model, optimizer, loader):
    for x in loader:
        with amp.scale_loss(model(x), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("bind", "expected"), [("", 1), ("from apex import amp", 0), ("amp = try_import('apex.amp')", 0)]
)
def test_apex_that_is_not_imported(bind, expected):
    """`amp.scale_loss` is of Apex."""
    found = findings(APEX.format(bind=bind), "HS117")
    assert len(found) == expected
    assert all(f.instead == "from apex import amp" for f in found)


ZEROED = """\
import math
import torch
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y)
    value = {value}
    if not math.isfinite(value):
        loss = loss * 0.0
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(("value", "expected"), [("loss.item()", [8]), ("float(loss)", [8]), ("x.max().item()", [])])
def test_a_number_that_is_made_of_the_loss(value, expected):
    """A test of the loss as a number is one of the loss."""
    assert [f.line for f in findings(ZEROED.format(value=value), "HS179")] == expected


MEASURED = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y)
    scaler.scale(loss).backward()
{first}    flat = torch.cat([p.{tensor}.flatten() for p in model.parameters()])
    log(flat.norm())
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("first", "tensor", "expected"),
    [("", "grad", [9]), ("", "data", []), ("    scaler.unscale_(optimizer)\n", "grad", [])],
)
def test_the_norm_of_joined_gradients(first, tensor, expected):
    """HS110: one tensor with all gradients has their scale."""
    assert [f.line for f in findings(MEASURED.format(first=first, tensor=tensor), "HS110")] == expected
