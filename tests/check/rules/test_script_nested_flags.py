"""HS199: flags of nested settings that cast what an Accelerator has prepared."""

import pytest

from check_scripts import reported

TRAINER = """\
import torch
from accelerate import Accelerator
from diffusers import UNet2DConditionModel

class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.accelerator = Accelerator(mixed_precision="fp16")
        self.unet = UNet2DConditionModel.from_pretrained(cfg.path, subfolder="unet")
        self.optimizer = torch.optim.AdamW(self.unet.parameters(), lr=1e-5)
        self.unet, self.optimizer = self.accelerator.prepare(self.unet, self.optimizer)
        if {flag}:
            self.unet.to(dtype=torch.float16)

    def train(self, loader):
        for batch in loader:
            loss = torch.nn.functional.mse_loss(self.unet(batch["x"], batch["t"]).sample.float(), batch["y"])
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "flag", ["self.cfg.force_cast_precision", "self.cfg.model.half_weights", "cfg.low_precision", "cfg.half_weights"]
)
def test_a_flag_of_the_settings_casts_trained_weights(flag):
    """Whatever it is called: in the run with it the scaler rejects the gradients."""
    assert "HS199" in reported(TRAINER.format(flag=flag))


@pytest.mark.parametrize(
    "flag", ["self.cfg.deepspeed.enabled", "cfg.eval_only", "not cfg.train", "cfg.mode == 'export'"]
)
def test_nothing_in_other_runs(flag):
    """An engine with master weights, or a run that trains nothing."""
    assert "HS199" not in reported(TRAINER.format(flag=flag))
