"""HS112, HS157: tests of the gradients outside the loop that computes or unscales them, and in functions called after it."""

import pytest

from check_scripts import findings

WINDOW = """\
import torch

def train(model, batches, optimizer, scaler, steps, n):
    for step in range(steps):
        for micro in range(n):
            x, y = next(batches)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(x), y) / n
            scaler.scale(loss).backward()
        bad = any(not torch.isfinite(p.grad).all() for p in model.parameters())
        if {test}:
            optimizer.zero_grad()
            {end}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("test", "end", "expected"),
    [
        ("bad", "continue", [11]),
        ("bad", "break", []),
        ("bad", "scaler.update(1024.0)", []),
        ("step < 10", "continue", []),
    ],
)
def test_a_test_behind_the_loop_over_micro_batches(test, end, expected):
    """An iteration of the outer loop that a test of the gradients leaves skips the update of the whole window."""
    assert [f.line for f in findings(WINDOW.format(test=test, end=end), "HS157")] == expected


OPTIMIZERS = """\
import torch

def train(models, loader, optimizers, scaler):
    for batch in loader:
        scaler.scale(loss_of(models, batch)).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(models.parameters(), 1.0)
        if not torch.isfinite(norm):
            {first}continue
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(("first", "expected"), [("", [7]), ("scaler.update(); ", [])])
def test_a_test_behind_the_loop_over_optimizers(first, expected):
    """The iteration of a loop over optimizers is a part of that of the loop over batches."""
    assert [f.line for f in findings(OPTIMIZERS.format(first=first), "HS112")] == expected


CALLED = """\
import torch

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self):
        {test}
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def epoch(self, loader):
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x, y)
            self.scaler.scale(loss).backward()
            {call}
"""
TEST = "bad = any(not torch.isfinite(p.grad).all() for p in self.model.parameters())\n        if bad:\n            return {}"


@pytest.mark.parametrize(
    ("test", "call", "expected"),
    [
        (TEST.format(False), "self.step()", [10]),
        (TEST.format(False), "if not self.step():\n                break", []),
        (TEST.format("self.scaler.update()"), "self.step()", []),
        ("if not self.training:\n            return", "self.step()", []),
    ],
)
def test_a_test_in_a_function_that_is_called_after_the_backward(test, call, expected):
    """A function that returns before it steps and updates skips both, unless its caller then stops."""
    assert [f.line for f in findings(CALLED.format(test=test, call=call), "HS157")] == expected
