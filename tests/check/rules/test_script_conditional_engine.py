"""HS295 on an engine that only some runs create, with a step that is common to all runs."""

import ast

import pytest

from halfstep.check.config.joint import configs_in_script
from halfstep.check.files.source import Settings, Source
from halfstep.check.rules.config.joint_loop import OptimizerInsteadOfEngine

LOOP = """\
import torch

def train(model, loader, options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if options.use_engine:
        import deepspeed
        model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=options.config)
    for batch in loader:
        loss = model(batch).mean()
        if options.use_engine:
            model.backward(loss)
        else:
            loss.backward()
        {step}
"""


def lines(text):
    """The lines with a finding of HS295."""
    configs = configs_in_script(ast.parse(text), Source("train.py", text, "python"), Settings())
    return [f.line for config in configs for f in OptimizerInsteadOfEngine().check(config)]


@pytest.mark.parametrize(
    ("step", "line"),
    [
        ("optimizer.step()\n        optimizer.zero_grad()", 14),
        (
            "if options.use_engine:\n            optimizer.step()\n        else:\n            optimizer.step()\n            optimizer.zero_grad()",
            15,
        ),
    ],
)
def test_common_step_bypasses_the_engine(step, line):
    """HS295 at the optimizer's step after `engine.backward`, although the engine is created under a condition."""
    assert lines(LOOP.format(step=step)) == [line]


@pytest.mark.parametrize(
    "step",
    [
        "if options.use_engine:\n            model.step()\n        else:\n            optimizer.step()\n            optimizer.zero_grad()",
        "if not options.use_engine:\n            optimizer.step()\n            optimizer.zero_grad()",
        "if not hasattr(model, 'step'):\n            optimizer.step()\n            optimizer.zero_grad()",
        "advance(model, optimizer)",
    ],
)
def test_steps_of_the_runs_without_an_engine(step):
    """No finding where the engine steps, or the optimizer's step is for the runs without it."""
    assert lines(LOOP.format(step=step)) == []
