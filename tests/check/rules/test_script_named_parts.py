"""HS170: objects that a checkpoint gets by their names are saved as if each were written out."""

import pytest

from check_scripts import findings

TRAINER = """\
import torch
class Trainer:
    PARTS = ("model", "optimizer"{extra})
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")
    def load(self, s):
        self.optimizer.load_state_dict(s["optimizer"])
    def state(self):
        {save}
    def fit(self):
        for x, y in self.data:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        torch.save(self.state(), "x.pt")
"""
FORMS = (
    "return {k: getattr(self, k).state_dict() for k in ('model', 'optimizer'{extra})}",
    "return {name: getattr(self, name).state_dict() for name in self.PARTS}",
    "return {name: self.__dict__[name].state_dict() for name in Trainer.PARTS}",
    "keep = ['model', 'optimizer'{extra}]\n        return {k: getattr(self, k).state_dict() for k in keep} | {'epoch': 1}",
    "return dict((k, getattr(self, k).state_dict()) for k in self.PARTS)",
    "out = {'epoch': 0}\n        for k in self.PARTS:\n            out[k] = getattr(self, k).state_dict()\n        return out",
)


@pytest.mark.parametrize("save", FORMS)
@pytest.mark.parametrize(("extra", "is_reported"), [("", True), (", 'scaler'", False)])
def test_names_of_parts(save, extra, is_reported):
    """A tuple, a list or a constant of names without the scaler is reported, and none with it."""
    text = TRAINER.replace("{save}", save).replace("{extra}", extra)
    assert bool(findings(text, "HS170")) is is_reported


@pytest.mark.parametrize(
    "save",
    [
        "return {k: getattr(self, k).state_dict() for k in self.names}",
        "s = {k: getattr(self, k).state_dict() for k in self.PARTS}\n        s['scaler'] = self.scaler.state_dict()\n        return s",
        "self.PARTS.append('scaler')\n        return {k: getattr(self, k).state_dict() for k in self.PARTS}",
    ],
)
def test_names_that_are_not_known(save):
    """Names from elsewhere, a list that a method extends and a scaler that is added are not reported."""
    assert not findings(TRAINER.replace("{save}", save).replace("{extra}", ""), "HS170")
