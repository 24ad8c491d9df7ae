"""Engines of DeepSpeed are followed through helpers, conditions and arguments."""

import ast

import pytest

from halfstep.check.config.joint import configs_in_script
from halfstep.check.files.source import Settings, Source
from halfstep.check.rules.config.joint_loop import BareBackward, OptimizerInsteadOfEngine, ScalerWithEngine

CREATE = "engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model)\n"
HELPER = "def setup(model):\n    engine, *_ = deepspeed.initialize(args=args, model=model)\n    return {returned}\n"
CONDITIONAL = "if args.deepspeed:\n    model, optimizer, _, _ = deepspeed.initialize(args=args, model=model)\n"
LOOP = "for x in loader:\n    loss = {engine}(x)\n    {backward}\n    {stepper}.step()\n"


def lines(text):
    """The lines with a finding of HS294."""
    text = "import deepspeed\nimport torch\n" + text
    configs = configs_in_script(ast.parse(text), Source("train.py", text, "python"), Settings())
    return [f.line for config in configs for f in BareBackward().check(config)]


def loop(engine="engine", backward="loss.backward()", stepper=""):
    return LOOP.format(engine=engine, backward=backward, stepper=stepper or engine)


@pytest.mark.parametrize(
    "text",
    [
        CREATE + loop(backward="loss.mean().backward()"),
        CREATE + loop(backward="(loss / 4).backward()"),
        CREATE + loop(backward="torch.autograd.backward(loss)"),
        CREATE + loop(backward="scaler.scale(loss).backward()"),
        CREATE.replace("optimizer, ", "_, ") + loop(stepper="optimizer"),
        "parts = deepspeed.initialize(args=args, model=model)\nengine = parts[0]\n" + loop(),
        "parts = deepspeed.initialize(args=args, model=model)\nengine, *_ = parts\n" + loop(),
        HELPER.format(returned="engine") + "net = setup(model)\n" + loop("net"),
        HELPER.format(returned="None, engine") + "_, net = setup(model)\n" + loop("net"),
        CONDITIONAL + loop("model", stepper="optimizer"),
        CREATE + "critic, *_ = deepspeed.initialize(args=args, model=c)\n" + loop() + loop("critic"),
        "def train(net, loader):\n" + "".join(f"    {line}\n" for line in loop("net").splitlines()) + CREATE + "train(engine, loader)\n",
    ],
)  # fmt: skip
def test_every_engine_is_followed_to_its_loop(text):
    """A bare backward is reported wherever the variable of its loop is an engine."""
    assert lines(text)


@pytest.mark.parametrize(
    "text",
    [
        CREATE + loop(backward="engine.scale(loss).backward()"),
        CONDITIONAL + loop("model", "model.backward(loss) if args.deepspeed else loss.backward()"),
        CONDITIONAL + "else:\n" + "".join(f"    {line}\n" for line in loop("model").splitlines()),
        CONDITIONAL + "if not args.deepspeed:\n" + "".join(f"    {line}\n" for line in loop("model").splitlines()),
        HELPER.format(returned="engine")
        + "def plain(model, optimizer):\n    model().backward()\n    optimizer.step()\n",
        CREATE + "critic = Critic()\n" + loop(backward="engine.backward(loss)") + loop("critic", stepper="optim"),
    ],
)
def test_a_loop_without_an_engine_or_with_a_choice_is_silent(text):
    """Nothing is reported where the engine runs backward, does not exist, or is another function's."""
    assert not lines(text)


RETURNED = """\
import deepspeed
def start(model):
    config = {{"train_batch_size": 8, "fp16": {{"enabled": True}}, "zero_optimization": {{"stage": 2}}}}
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
    return engine, optimizer
class Worker:
    def __init__(self, model):
        self.engine, self.optimizer = start(model)
    def step(self, batch):
        loss = self.engine(batch)
        {scale}
        self.engine.backward(loss)
        self.engine.step()
"""


@pytest.mark.parametrize(("scale", "num"), [("loss = self.scaler.scale(loss)", 1), ("loss = loss.mean()", 0)])
def test_a_scaled_loss_of_a_returned_engine_is_found(scale, num):
    """The engine has another name where it runs, and the loss is scaled one statement before."""
    text = RETURNED.format(scale=scale)
    configs = configs_in_script(ast.parse(text), Source("train.py", text, "python"), Settings())
    assert len([f for config in configs for f in ScalerWithEngine().check(config)]) == num


BRANCHES = """\
import deepspeed
import torch
{make}
def train(loader):
    for x in loader:
        {forward}
        if {test}:
            {backward}
            {step}
        else:
            engine.backward(loss)
            engine.step()
"""
MAKE = "engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model)"
SCALED, STEP = "scaler.scale(loss).backward()", "scaler.step(optimizer)"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [8, 9]),
        ({"test": "args.fp16"}, [8, 9]),
        ({"test": "not args.amp"}, [8, 9]),
        ({"forward": "loss = engine.forward(x)"}, [8, 9]),
        ({"step": "scaler.step(other)"}, [8]),
        ({"backward": "engine.backward(loss)", "step": "engine.step()"}, []),
        ({"backward": "engine.scale(loss).backward()", "step": "engine.step()"}, []),
        ({"backward": "loss.backward()", "step": "optimizer.step()"}, []),
        ({"test": "not args.deepspeed"}, []),
        ({"forward": "loss = model(x)"}, []),
        ({"make": f"if args.distributed:\n    {MAKE}"}, []),
    ],
)
def test_a_scaler_in_the_other_branch_bypasses_the_engine(changes, expected):
    """HS294 and HS295 where the loss is the engine's in both branches, and a GradScaler runs backward and step in one."""
    parts = {"make": MAKE, "forward": "loss = engine(x)", "test": "args.amp", "backward": SCALED, "step": STEP}
    text = BRANCHES.format(**(parts | changes))
    configs = configs_in_script(ast.parse(text), Source("train.py", text, "python"), Settings())
    rules = (BareBackward(), OptimizerInsteadOfEngine())
    assert [f.line for config in configs for rule in rules for f in rule.check(config)] == expected


def test_the_step_of_a_scaler_is_no_step_of_the_engine():
    """HS295 also where no line steps the engine."""
    text = (
        "import deepspeed\n"
        + CREATE
        + loop(backward="engine.backward(loss)", stepper="scaler").replace("step()", "step(optimizer)")
    )
    configs = configs_in_script(ast.parse(text), Source("train.py", text, "python"), Settings())
    assert [f.line for config in configs for f in OptimizerInsteadOfEngine().check(config)] == [6]


HANDLED = """\
class Backend:
    def create(self, model, config):
        self.engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    def backward(self, loss):
        try:
            {tried}
        except {error}:
            {handled}
    def step(self):
        self.engine.step()
"""


@pytest.mark.parametrize(
    ("tried", "handled", "expected"),
    [
        ("self.engine.backward(loss)", "loss.backward()", [10]),
        ("self.engine.backward(loss)", "log()\n            loss.backward()", [11]),
        ("self.engine.backward(loss)", "raise", []),
        ("self.engine.backward(loss)", "self.engine.backward(loss.float())", []),
        ("self.engine.backward(loss)", "penalty.backward()", []),
    ],
)
def test_a_backward_in_a_handler_of_the_engines_bypasses_the_engine(tried, handled, expected):
    """`except AttributeError: loss.backward()` goes on with gradients that are neither scaled nor reduced."""
    for error in ("AttributeError", "(AttributeError, RuntimeError) as error"):
        assert lines(HANDLED.format(tried=tried, handled=handled, error=error)) == expected
