"""HS296 for the optimizers and the ways to pass one that scripts use."""

import ast

import pytest

from halfstep.check.config.joint import configs_in_script
from halfstep.check.files.source import Settings, Source
from halfstep.check.rules.config.joint_offload import ClientOptimizerOffloaded

CONFIG = "{'train_batch_size': 8, 'zero_optimization': {'stage': 2, 'offload_optimizer': {'device': 'cpu'}}}"
MODULE = """import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy

class Module(L.LightningModule):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

trainer = L.Trainer(strategy={strategy})
trainer.fit(Module())
"""


def lines(text):
    configs = configs_in_script(ast.parse(text), Source("train.py", text, "python"), Settings())
    return sorted({f.line for config in configs for f in ClientOptimizerOffloaded().check(config)})


@pytest.mark.parametrize(
    ("imports", "call", "is_reported"),
    [
        ("from transformers import AdamW", "AdamW(params)", True),
        ("import bitsandbytes as bnb", "bnb.optim.AdamW8bit(params)", True),
        ("from apex.optimizers import FusedAdam", "FusedAdam(params)", True),
        ("from deepspeed.ops.adam import FusedAdam", "FusedAdam(params)", True),
        ("from deepspeed.ops.adam import DeepSpeedCPUAdam", "DeepSpeedCPUAdam(params)", False),
        ("from ours import Optimizer", "Optimizer(params)", False),
    ],
)
def test_every_known_optimizer_that_runs_on_the_gpu_is_reported(imports, call, is_reported):
    """DeepSpeed tests for its CPU classes; an unknown class may derive from one."""
    text = f"import deepspeed\n{imports}\nopt = {call}\nengine, *_ = deepspeed.initialize(model=net, optimizer=opt, config={CONFIG})\n"
    assert lines(text) == ([4] if is_reported else [])


def test_a_choice_between_optimizers_is_reported_if_all_are_foreign():
    """One of them for the CPU is enough to make the script valid."""
    text = (
        "import deepspeed\nimport torch\nfrom deepspeed.ops.adam import DeepSpeedCPUAdam\n"
        "if args.cpu:\n    opt = {one}(params)\nelse:\n    opt = torch.optim.AdamW(params)\n"
        f"engine, *_ = deepspeed.initialize(model=net, optimizer=opt, config={CONFIG.replace('{', '{{').replace('}', '}}')})\n"
    )
    assert lines(text.format(one="torch.optim.SGD")) == [8]
    assert lines(text.format(one="DeepSpeedCPUAdam")) == []


def test_an_engine_that_is_created_under_a_condition_is_checked():
    """`if args.deepspeed:` around the call changes nothing about it."""
    text = (
        "import deepspeed\nimport torch\nopt = torch.optim.AdamW(params)\nif args.deepspeed:\n"
        f"    engine, *_ = deepspeed.initialize(model=net, optimizer=opt, config={CONFIG})\n"
    )
    assert lines(text) == [5]


@pytest.mark.parametrize(
    ("strategy", "is_reported"),
    [
        ("'deepspeed_stage_3_offload'", True),
        ("'deepspeed_stage_2_offload' if cuda else 'ddp'", True),
        ("DeepSpeedStrategy(stage=3, offload_optimizer=True)", True),
        ("DeepSpeedStrategy(config=CONFIG, offload_optimizer=True)", False),
        ("'deepspeed_stage_2'", False),
    ],
)
def test_strategies_of_lightning_that_offload(strategy, is_reported):
    """Lightning passes the optimizer of the module to DeepSpeed as it is."""
    assert lines(MODULE.format(strategy=strategy)) == ([10] if is_reported else [])


def test_the_option_that_allows_it_is_found():
    """Scripts set it in the configuration of the strategy after creating the trainer."""
    text = MODULE.format(strategy="'deepspeed_stage_3_offload'")
    assert lines(text + "trainer.strategy.config['zero_force_ds_cpu_optimizer'] = False\n") == []
