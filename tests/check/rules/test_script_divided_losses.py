"""HS182: a loss that one function divides and another one divides again."""

import pytest

from check_scripts import findings

METHODS = """\
import torch

class Trainer:
    def compute_loss(self, batch):
        with torch.autocast("cuda", dtype=torch.float16):
            loss, parts = self.model(batch), {{}}
        return loss{inner}{parts}

    def epoch(self, loader):
        for i, batch in enumerate(loader):
            {target} = self.compute_loss(batch)
            self.scaler.scale(loss{outer}).backward()
            if (i + 1) % self.accum_steps == 0:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(("parts", "target"), [("", "loss"), (", parts", "loss, parts")])
@pytest.mark.parametrize(("inner", "outer", "expected"), [(True, True, [12]), (True, False, []), (False, True, [])])
def test_a_method_that_divides_the_loss_it_returns(parts, target, inner, outer, expected):
    """What a method returns is divided once more where the caller divides it, also as the first of several values."""
    by = {True: " / self.accum_steps", False: ""}
    text = METHODS.format(inner=by[inner], outer=by[outer], parts=parts, target=target)
    assert [f.line for f in findings(text, "HS182")] == expected


PASSED = """\
import torch

def backward(loss, scaler, n):
    loss = loss{inner}
    scaler.scale(loss).backward()

def train(model, loader, optimizer, scaler, accum_freq):
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        backward(loss{outer}, scaler, accum_freq)
        if (i + 1) % accum_freq == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        (" / accum_freq", " / accum_freq", [5]),
        ("", " / accum_freq", []),
        (" / accum_freq", "", []),
        (" / world", " / accum_freq", []),
    ],
)
def test_a_loss_that_is_divided_before_it_is_passed(inner, outer, expected):
    """The loss that a function receives has the divisions of the line that calls it."""
    assert [f.line for f in findings(PASSED.format(inner=inner, outer=outer), "HS182")] == expected


CHUNKS = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for batch in loader:
    chunks = batch.split(4)
    for chunk in chunks:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(chunk) / len(chunks)
        scaler.scale(loss{again}).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("again", "expected"), [(" / len(chunks)", [8]), (" / len(batch)", []), ("", [])])
def test_the_number_of_passes_of_a_loop(again, expected):
    """The number of passes of the loop around a backward is a number of micro-batches, whatever its name."""
    assert [f.line for f in findings(CHUNKS.format(again=again), "HS182")] == expected
