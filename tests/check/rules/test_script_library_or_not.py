"""HS131 and HS196 in a file with a loop on Fabric and another one without it."""

import pytest

from check_scripts import findings

TWO_LOOPS = """\
import torch
from lightning.fabric import Fabric

class Trainer:
    def train(self, loader, use_fabric):
        {choice}

    def with_fabric(self, loader):
        self.fabric = Fabric(precision="16-mixed")
        optimizer = torch.optim.AdamW(self.model.parameters())
        self.model, optimizer = self.fabric.setup(self.model, optimizer)
        for x in loader:
            self.fabric.backward(self.model(x))
            optimizer.step()
            optimizer.zero_grad()

    def by_hand(self, loader):
        optimizer = torch.optim.AdamW(self.model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        scaler = torch.amp.GradScaler("cuda")
        for x in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x)
            scaler.scale(loss).backward()
            {before}
            scaler.step(optimizer)
            scaler.update()
            {advance}
            optimizer.zero_grad()
"""
EITHER = "if use_fabric:\n            self.with_fabric(loader)\n        else:\n            self.by_hand(loader)"
BOTH = "self.with_fabric(loader)\n        self.by_hand(loader)"


def two_loops(choice=EITHER, before="pass", advance="scheduler.step()"):
    return TWO_LOOPS.format(choice=choice, before=before, advance=advance)


@pytest.mark.parametrize(("choice", "num"), [(EITHER, 0), (BOTH, 1)])
def test_a_loop_that_runs_instead_of_the_one_with_a_library(choice, num):
    """Its scaler is the only one; after the other loop the optimizer may be the library's."""
    assert len(findings(two_loops(choice), "HS131")) == num


@pytest.mark.parametrize(
    ("before", "advance", "lines"),
    [
        ("pass", "scheduler.step()", [31]),
        ("scale = scaler.get_scale()", "if scaler.get_scale() >= scale: scheduler.step()", []),
    ],
)
def test_a_schedule_after_a_scaler_of_torch(before, advance, lines):
    """The library of the other loop does not decide about the scheduler of this one."""
    assert [f.line for f in findings(two_loops(before=before, advance=advance), "HS196")] == lines
