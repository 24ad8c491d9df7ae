"""Attributes that a constructor leaves None for a subclass: a run takes them for what their names say."""

import pytest

from simulated_scripts import codes

BASE = """\
import torch
class BaseRunner:
    def __init__(self, kind, device="cpu"):
        self.device = device
        self.distributed = kind == "ddp"
        self.net = None
        self.{optimizer} = None
        self.scaler = {scaler}

    def fit(self, loader):
        for batch in loader:
            self.net.zero_grad()
            with torch.autocast("cuda", enabled={enabled}):
                loss = self.compute(batch)
            if self.scaler is not None:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.{optimizer})
                self.scaler.update()
            else:
                loss.backward()
                self.{optimizer}.step()

    def compute(self, batch):
        raise NotImplementedError
"""
SCALER = "None if device == 'cpu' else torch.amp.GradScaler('cuda')"


@pytest.mark.parametrize("optimizer", ["optimizer", "opt", "main_optim"])
@pytest.mark.parametrize(
    ("enabled", "expected"),
    [("self.distributed or 'cuda' in self.device", ["HS123"]), ("self.scaler is not None", [])],
)
def test_a_base_class_trains_with_what_its_subclasses_assign(optimizer, enabled, expected):
    """The optimizer is None in this file, and the loop of the base class steps it."""
    assert codes(BASE.format(optimizer=optimizer, scaler=SCALER, enabled=enabled)) == expected
