"""Rules over Accelerate where another file creates the Accelerator, or creates it without the setting that the script reads."""

import pytest

from check_scripts import reported

STEP = """\
import torch

class Trainer:
    def __init__(self, accelerator, model, optimizer):
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer

    def fit(self, loader):
        for x, y in loader:
            with self.accelerator.accumulate(self.model), self.accelerator.autocast():
                loss = self.model(x, y)
{before}
            {backward}
"""


def test_an_accelerator_is_recognised_by_its_use():
    """A backward inside its autocast is HS187 without an import of accelerate."""
    text = STEP.format(before="                self.accelerator.backward(loss)", backward="self.optimizer.step()")
    assert "HS187" in reported(text)


def test_another_object_with_a_backward_is_not_an_accelerator():
    """One common method is not enough."""
    text = STEP.replace("self.accelerator.accumulate(self.model), ", "")
    text = text.format(before="                self.accelerator.backward(loss)", backward="self.optimizer.step()")
    assert reported(text) == set()


def test_gradients_cleared_on_the_last_micro_batch_are_reported():
    """zero_grad before the backward inside accumulate discards the earlier micro-batches."""
    before = "                self.optimizer.zero_grad()\n                self.accelerator.backward(loss)\n                self.optimizer.step()"
    assert "HS181" in reported(STEP.format(before=before, backward="pass"))


SETTING = """\
from accelerate import Accelerator

def main(cfg, model, optimizer, loader):
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for i, (x, y) in enumerate(loader):
        {use}
        with accelerator.accumulate(model):
            accelerator.backward(model(x, y))
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("use", "is_reported"),
    [
        ("print(cfg.grad_accum_steps)", True),
        ("is_last = (i + 1) % cfg.grad_accum_steps == 0", False),
        ("if (i + 1) % cfg.grad_accum_steps == 0: progress_bar.update(1)", True),  # the batches of a resumed run
        ("if (i + 1) % cfg.grad_accum_steps == 0: flush(optimizer)", False),
        ("print(accelerator.gradient_accumulation_steps)", False),
        ("print(cfg.steps)", False),
    ],
)
def test_only_a_setting_that_nothing_counts_is_reported(use, is_reported):
    """HS177 needs a number of accumulation steps that the script reads and neither counts nor passes on."""
    assert ("HS177" in reported(SETTING.format(use=use))) == is_reported


BRANCH = """\
import torch
from accelerate import Accelerator

def main(args, model, loader):
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    optimizer = torch.optim.AdamW(model.parameters())
    {prepare}
    for x, y in loader:
        accelerator.backward(model(x, y))
        {step}
        optimizer.zero_grad()
"""
PREPARE = "model, optimizer = accelerator.prepare(model, optimizer)"


@pytest.mark.parametrize(
    ("prepare", "step", "is_reported"),
    [
        (f"if args.use_audio: {PREPARE}", "optimizer.step()", True),
        (f"if not args.plain: {PREPARE}", "optimizer.step()", True),
        (PREPARE, "optimizer.step()", False),
        (f"if args.use_audio:\n        {PREPARE}\n    else:\n        {PREPARE}", "optimizer.step()", False),
        (f"if args.use_audio: {PREPARE}", "if args.use_audio: optimizer.step()", False),
        (f"if accelerator.num_processes > 1: {PREPARE}", "optimizer.step()", False),
        (f"if args.use_deepspeed: {PREPARE}", "optimizer.step()", False),
        (f"if args.other: optimizer = build(model)\n    if args.use_audio: {PREPARE}", "optimizer.step()", False),
    ],
)
def test_an_optimizer_that_one_setting_prepares(prepare, step, is_reported):
    """Without the setting the gradients stay scaled, unless the step or another optimizer depends on it as well."""
    assert ("HS198" in reported(BRANCH.format(prepare=prepare, step=step))) is is_reported


DECLARED = """\
import argparse
from accelerate import Accelerator
parser = argparse.ArgumentParser()
parser.add_argument("{option}", type=int, default=8)
args = parser.parse_args()
accelerator = Accelerator(mixed_precision="bf16"{steps})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(x, y))
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("option", "steps", "is_reported"),
    [
        ("--gradient_accumulation_steps", "", True),
        ("--grad-accum-steps", "", True),
        ("--gradient_accumulation_steps", ", gradient_accumulation_steps=args.gradient_accumulation_steps", False),
        ("--batch_size", "", False),
    ],
)
def test_an_option_that_is_declared_and_never_read(option, steps, is_reported):
    """HS177 also where the script declares the number of steps on the command line and reads it nowhere."""
    assert ("HS177" in reported(DECLARED.format(option=option, steps=steps))) == is_reported


PLUGIN = """\
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DeepSpeedPlugin as Plugin
{plugin}
class Trainer:
    def __init__(self, cfg, model, optimizer, loader):
        self.cfg = cfg
        self.accelerator = accelerator
        self.model, self.optimizer, self.loader = accelerator.prepare(model, optimizer, loader)
    def fit(self):
        print(self.cfg.gradient_accumulation_steps)
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(x, y))
                self.optimizer.step()
                self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("plugin", "is_reported"),
    [
        ("plugin = DeepSpeedPlugin()\naccelerator = Accelerator(deepspeed_plugin=plugin)", True),
        ("accelerator = Accelerator(deepspeed_plugin=Plugin(zero_stage=2))", True),
        ("accelerator = Accelerator(deepspeed_plugin=Plugin(gradient_accumulation_steps=cfg.n))", False),
        ("accelerator = Accelerator(deepspeed_plugin=Plugin(hf_ds_config='ds.json'))", False),
        ("accelerator = Accelerator(deepspeed_plugin=Plugin(**options))", False),
        ("accelerator = Accelerator(deepspeed_plugin=make_plugin())", False),
        (
            "plugin = DeepSpeedPlugin()\nplugin.deepspeed_config['gradient_accumulation_steps'] = cfg.n\n"
            "accelerator = Accelerator(deepspeed_plugin=plugin)",
            False,
        ),
        ("accelerator = Accelerator(deepspeed_plugin=Plugin(), gradient_accumulation_steps=4)", False),
    ],
)
def test_a_plugin_of_deepspeed_without_steps(plugin, is_reported):
    """HS177 also with a DeepSpeedPlugin that this file creates and gives no number of steps, nor a configuration that may have one."""
    assert ("HS177" in reported(PLUGIN.format(plugin=plugin))) == is_reported
