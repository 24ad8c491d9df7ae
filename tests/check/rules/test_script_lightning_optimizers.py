"""Which optimizer a Lightning module with manual optimization steps: Lightning's, which unscales the gradients, or torch's."""

import pytest

from check_scripts import reported

MODULE = """\
import lightning as L
import torch

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.Adam(self.g.parameters()), torch.optim.Adam(self.d.parameters())]

    def training_step(self, batch, batch_idx):
        {get}
        {zero}
        self.manual_backward(self.d(batch).mean())
        {step}
{more}
trainer = L.Trainer(precision="16-mixed")
trainer.fit(Net(), loader)
"""
ONE = {"zero": "od.zero_grad()", "step": "od.step()"}
PASSED = """
    def apply(self, od):
        od.step()
        od.zero_grad()
"""


def module(get: str, zero: str, step: str, more: str = "") -> str:
    """A module that gets, clears and steps its optimizers in these ways."""
    return MODULE.format(get=get, zero=zero, step=step, more=more)


@pytest.mark.parametrize(
    "script",
    [
        module("_, od = self.optimizers(use_pl_optimizer=False)", **ONE),
        module("od = self.optimizers(False)[1]", **ONE),
        module("og, od = self.trainer.optimizers", **ONE),
        module("od = self.optimizers()[0].optimizer", **ONE),
        module("od = self.optimizers()", zero="od.zero_grad()", step="od.optimizer.step()"),
        module("trainer = self.trainer", zero="pass", step="self.trainer.strategy.optimizers[0].step()"),
        module(
            "opts = self.optimizers(use_pl_optimizer=False)", zero="pass", step="for o in opts:\n            o.step()"
        ),
        module("opts = self.optimizers(use_pl_optimizer=False)", zero="opts[1].zero_grad()", step="opts[1].step()"),
        module("opts = list(self.optimizers(False))", zero="pass", step="self.apply(opts[0])", more=PASSED),
    ],
)
def test_torchs_optimizers_step_with_scaled_gradients(script: str) -> None:
    """An optimizer of torch is reported in every way in which a module can get it from Lightning."""
    assert "HS198" in reported(script)


@pytest.mark.parametrize(
    "script",
    [
        module("_, od = self.optimizers()", **ONE),
        module("od = self.optimizers(use_pl_optimizer=True)[1]", **ONE),
        module("od, raw = self.optimizers()[1], self.trainer.optimizers[1]", **ONE),
        module("od = self.optimizers(use_pl_optimizer=not self.cfg.raw)[0]", **ONE),
        module("opts = self.optimizers()", zero="pass", step="for o in opts:\n            o.step()"),
        module("opts = self.optimizers()", zero="pass", step="self.apply(opts[0])", more=PASSED),
    ],
)
def test_lightnings_optimizers_unscale(script: str) -> None:
    """What `self.optimizers()` returns is right, also next to a torch optimizer that only a learning rate is read from."""
    assert "HS198" not in reported(script)
