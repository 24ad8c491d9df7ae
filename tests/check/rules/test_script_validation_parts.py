"""HS149 where training and validation get a part of the model from a method of their class."""

import pytest

from check_scripts import findings

PARTS = """\
import torch

class Trainer:
{getter}
    def train_step(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            net = {get}
            loss = net(x).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @torch.no_grad()
    def validate(self):
        for x in self.val_loader:
            net = {get}
            self.scores.append(net(x).mean().item())
"""
NAMED = """\
    def part(self, name):
        part = getattr(self.model, name)
        if isinstance(part, torch.nn.DataParallel):
            return part.module
        return part
"""
ONE = """\
    def part(self, name):
        return self.parts[name]
"""
MADE = """\
    def part(self, name):
        part = build(name)
        part.load_state_dict(torch.load(name))
        return part
"""


@pytest.mark.parametrize("getter", [NAMED, ONE])
def test_a_part_that_a_method_hands_out(getter):
    """The method returns what the object has: validation runs the model that training runs."""
    assert [f.line for f in findings(PARTS.format(getter=getter, get='self.part("g")'), "HS149")] != []


@pytest.mark.parametrize("get", ['self.part("g")', "build('g')"])
def test_a_model_that_a_function_makes(get):
    """A model that validation creates is its own."""
    assert findings(PARTS.format(getter=MADE, get=get), "HS149") == []
