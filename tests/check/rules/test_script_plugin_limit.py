"""HS186: limits of the gradient norm that an Accelerator with DeepSpeed gets, and that its plugin does not have."""

import pytest

from check_scripts import findings

LOOP = """\
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
{first}
class Trainer:
    def __init__(self, model, optimizer, loader):
        plugin = {plugin}
        self.accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def train(self):
        for x, y in self.loader:
            loss = self.model(x, y)
            self.accelerator.backward(loss)
            {clip}
            self.optimizer.step()
            self.optimizer.zero_grad()
"""
CLIP = "self.accelerator.clip_grad_norm_(self.model.parameters(), {})"


@pytest.mark.parametrize(
    ("plugin", "limit", "first", "severities"),
    [
        ("DeepSpeedPlugin(zero_stage=2)", "0.5", "", ["warning"]),
        ("DeepSpeedPlugin(zero_stage=2)", "LIMIT", "LIMIT = 0.3", ["warning"]),
        ("DeepSpeedPlugin(zero_stage=2)", "args.max_grad_norm", "", ["advice"]),
        ("DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0)", "max_norm=0.5", "", ["warning"]),
        ("DeepSpeedPlugin(zero_stage=2)", "1.0", "", []),
        ("DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.5)", "0.5", "", []),
        ("DeepSpeedPlugin(zero_stage=2, gradient_clipping=LIMIT)", "LIMIT", "LIMIT = 0.3", []),
        ("DeepSpeedPlugin(zero_stage=2, gradient_clipping=args.limit)", "args.limit", "", []),
        ("DeepSpeedPlugin(hf_ds_config={'zero_optimization': {'stage': 2}})", "1.0", "", ["warning"]),
        ("DeepSpeedPlugin(hf_ds_config=DS)", "1.0", "DS = {'gradient_clipping': 0.3}", ["warning"]),
        ("DeepSpeedPlugin(hf_ds_config=DS)", "0.5", "DS = {'gradient_clipping': 'auto'}", ["warning"]),
        ("DeepSpeedPlugin(hf_ds_config=DS)", "1.0", "DS = {'gradient_clipping': 'auto'}", []),
        ("DeepSpeedPlugin(hf_ds_config=DS)", "1.0", "DS = {'gradient_clipping': 1.0}", []),
        ("DeepSpeedPlugin(hf_ds_config=DS)", "1.0", "DS = {'zero_optimization': {}, **more}", []),
        ("DeepSpeedPlugin(hf_ds_config=DS)", "1.0", "DS = {}; DS['gradient_clipping'] = 1.0", []),
        ("DeepSpeedPlugin(hf_ds_config='ds.json')", "0.5", "", []),  # the file may set the limit
        ("DeepSpeedPlugin()", "0.5", "", ["advice"]),  # the launcher does, not this call
        ("DeepSpeedPlugin(zero_stage=2) if args.deepspeed else None", "0.5", "", []),
        ("DeepSpeedPlugin(**options)", "0.5", "", []),
    ],
)
def test_the_limit_of_an_accelerator_with_deepspeed(plugin, limit, first, severities):
    """The engine clips at the limit of its plugin, which is 1.0 by default, and ignores the one that the script passes."""
    text = LOOP.format(plugin=plugin, clip=CLIP.format(limit), first=first)
    assert [f.severity for f in findings(text, "HS186")] == severities


def test_a_limit_that_the_plugin_gets_later_is_silent():
    """A script that sets the limit in the plugin's configuration knows where it belongs."""
    first = 'plugin.deepspeed_config["gradient_clipping"] = 0.5'
    text = LOOP.format(plugin="DeepSpeedPlugin(zero_stage=2)", clip=CLIP.format("0.5"), first=first)
    assert findings(text, "HS186") == []
