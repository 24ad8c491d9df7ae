"""HS186 and HS189 where the launcher's DeepSpeed or a Trainer runs what the script clips."""

import pytest

from check_scripts import findings

PLUGIN = """\
from accelerate import Accelerator, DeepSpeedPlugin
plugin = {plugin}
accelerator = Accelerator({accelerator})
class Trainer:
    def __init__(self, accelerator):
        self.accelerator = accelerator
    def step(self, x):
        self.accelerator.backward(self.model(x))
        self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("plugin", "accelerator", "is_reported"),
    [
        ("DeepSpeedPlugin()", "deepspeed_plugin=plugin", True),
        ("DeepSpeedPlugin(gradient_clipping=config.clip)", "deepspeed_plugin=plugin", False),
        ("DeepSpeedPlugin() if args.deepspeed else None", "deepspeed_plugin=plugin", False),
        ("DeepSpeedPlugin()", "mixed_precision='bf16'", False),
    ],
)
def test_limits_next_to_the_launchers_deepspeed(plugin, accelerator, is_reported):
    """A plugin without arguments is configured by the launcher; the Accelerator's clip only returns the norm."""
    text = PLUGIN.format(plugin=plugin, accelerator=accelerator)
    assert bool(findings(text, "HS186")) is is_reported


TRAINER = """\
import torch
from transformers import Trainer{imported}
class Clipping(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        {call}
        return loss
    def _clip(self):
        params = list(self.projector.parameters())
        torch.nn.utils.clip_grad_norm_(params, {limit})
{arguments}
"""
ARGUMENTS = "args = TrainingArguments('out', gradient_accumulation_steps={})"


@pytest.mark.parametrize(
    ("call", "limit", "arguments", "severities"),
    [
        ("self._clip()", "1.0", ARGUMENTS.format(4), ["warning"]),
        ("self._clip()", "1.0", "print(cfg.gradient_accumulation_steps)", ["advice"]),
        ("self._clip()", "1.0", ARGUMENTS.format("cfg.get('steps')"), ["advice"]),
        ("self._clip()", "1.0", ARGUMENTS.format(1), []),
        ("self._clip()", "1.0", "args = TrainingArguments('out')", []),
        ("self._clip()", "1.0", "", []),
        ("if self.accelerator.sync_gradients: self._clip()", "1.0", ARGUMENTS.format(4), []),
        ("self._clip()", "float('inf')", ARGUMENTS.format(4), []),
    ],
)
def test_clips_in_a_method_of_a_trainer(call, limit, arguments, severities):
    """`training_step` and what it calls run once per micro-batch; without a window, or under a test of it, nothing is wrong."""
    imported = ", TrainingArguments" if "TrainingArguments" in arguments else ""
    text = TRAINER.format(call=call, limit=limit, arguments=arguments, imported=imported)
    assert [f.severity for f in findings(text, "HS189")] == severities
