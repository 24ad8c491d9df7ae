"""HS118 in the methods of Lightning and transformers, which run their own backward."""

import pytest

from check_scripts import findings

MODULE = """\
import torch
from pytorch_lightning import LightningModule, Trainer
from project import clip_grad_norm_

class Module(LightningModule):
    {mode}
    def training_step(self, batch, index):
        loss = self.model(batch)
        {step}
        return loss

    def track(self):
        {track}

    def optimizer_step(self, epoch, index, optimizer, optimizer_closure):
        {before}
        {update}

Trainer(precision="16-mixed").fit(Module(), loader)
"""
CLIP = "torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)"
DEFAULT = {
    "mode": "x = 1",
    "step": "pass",
    "track": "pass",
    "before": "pass",
    "update": "optimizer.step(closure=optimizer_closure)",
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"step": CLIP}, 1),
        ({"step": "norm = clip_grad_norm_(self.parameters(), self.limit, clip_grad=True)"}, 1),
        ({"step": "norm = clip_grad_norm_(self.parameters(), self.limit, clip_grad=False)"}, 0),
        ({"step": "norm = torch.nn.utils.clip_grad_norm_(self.parameters(), float('inf'))"}, 0),
        ({"step": "self.track()", "track": CLIP}, 1),
        ({"track": CLIP}, 0),
        ({"step": f"self.manual_backward(loss)\n        {CLIP}", "mode": "automatic_optimization = False"}, 0),
        ({"before": CLIP}, 1),
        ({"before": CLIP, "update": "super().optimizer_step(epoch, index, optimizer, optimizer_closure)"}, 1),
        ({"before": f"optimizer_closure()\n        {CLIP}", "update": "optimizer.step()"}, 0),
        ({"before": CLIP, "update": "optimizer.step()"}, 0),
    ],
)
def test_a_clip_before_the_backward_of_lightning(change, expected):
    """`training_step` returns the loss whose backward Lightning runs, and the closure of the step contains both."""
    assert len(findings(MODULE.format(**{**DEFAULT, **change}), "HS118")) == expected


TRAINER = """\
import torch
from transformers import Trainer, TrainingArguments

class Own(Trainer):
    def {method}(self, model, inputs, return_outputs=False):
        loss = {loss}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

Own(net, TrainingArguments(bf16=True)).train()
"""


def test_a_clip_in_compute_loss():
    """The Trainer runs backward on what compute_loss returns; after training_step of the base class there are gradients."""
    assert len(findings(TRAINER.format(method="compute_loss", loss="model(**inputs).loss"), "HS118")) == 1
    own = TRAINER.format(method="training_step", loss="super().training_step(model, inputs)")
    assert findings(own, "HS118") == []
