"""HS288 at the places where scripts load weights: before, between and after the steps of the engine."""

import ast

import pytest

from halfstep.check.config.joint import configs_in_script
from halfstep.check.files.source import Settings, Source
from halfstep.check.rules.config.joint_masters import MastersNotRefreshed

CONFIG = "{'train_batch_size': 8, 'zero_optimization': {'stage': 2}, 'fp16': {'enabled': True}}"
MAKE = f"engine, _, _, _ = deepspeed.initialize(model=net, config={CONFIG})\n"
TRAIN = "for x in loader:\n    engine.backward(engine(x))\n    engine.step()\n"
EPOCH = f"def epoch(engine):\n    {TRAIN.replace(chr(10), chr(10) + '    ').rstrip()}\n"


def lines(text):
    configs = configs_in_script(ast.parse(text), Source("train.py", text, "python"), Settings())
    return sorted({f.line for config in configs for f in MastersNotRefreshed().check(config)})


def body(*parts):
    return "import deepspeed\nimport torch\n" + "".join(parts)


@pytest.mark.parametrize("owner", ["engine", "engine.module"])
def test_a_load_before_training_is_reported(owner):
    """The engine inherits `load_state_dict` of its module: through either, the masters keep the old weights."""
    text = body(MAKE, f"if resume:\n    {owner}.load_state_dict(torch.load(resume))\n", TRAIN)
    assert lines(text) == [5]


def test_a_load_after_training_is_fine():
    """The best weights are loaded for the final test, and nothing steps after that."""
    assert lines(body(MAKE, TRAIN, "engine.module.load_state_dict(torch.load('best.pt'))\nevaluate(engine)\n")) == []


def test_a_load_after_the_function_that_trains_is_fine():
    """The training is a call of a function that steps the engine."""
    loop = "for _ in range(3):\n    epoch(engine)\n"
    load = "engine.module.load_state_dict(torch.load('best.pt'))\n"
    assert lines(body(EPOCH, MAKE, loop, load)) == []
    assert lines(body(EPOCH, MAKE, load, loop)) != []


def test_a_load_in_the_loop_that_trains_is_reported():
    """The next round of the loop trains on."""
    loop = "for _ in range(3):\n    epoch(engine)\n    if worse:\n        engine.module.load_state_dict(best)\n"
    assert lines(body(EPOCH, MAKE, loop)) != []


def test_a_model_that_becomes_the_engine_may_load_before():
    """`model` is still the model before `model, ... = deepspeed.initialize(model=model)`, and the engine after it."""
    make = MAKE.replace("engine,", "model,").replace("net", "model")
    train = TRAIN.replace("engine", "model")
    load = "model.load_state_dict(torch.load('model.pt'))\n"
    assert lines(body(load, make, train)) == []
    assert lines(body(make, load, train)) == [4]
    assert lines(body(f"def load(model):\n    {load}", "load(model)\n", make, train)) == []


def test_an_engine_that_is_created_under_a_condition_is_followed():
    """Only the branch with the engine has masters."""
    make = f"if use_deepspeed:\n    {MAKE}"
    load = "if use_deepspeed:\n    engine.module.load_state_dict(w)\nelse:\n    net.load_state_dict(w)\n"
    assert lines(body(make, load, TRAIN)) == [6]


@pytest.mark.parametrize(
    "module",
    ["engine.module", "engine.module if hasattr(engine, 'module') else engine", "getattr(engine, 'module', engine)"],
)
def test_a_variable_for_the_module_of_a_conditional_engine_is_followed(module):
    """`raw = engine.module` in the branch with DeepSpeed and `raw = net` in the other: the load is of both."""
    make = f"def main():\n    if use_ds:\n        {MAKE}        raw = {module}\n    else:\n        raw = net\n"
    train = "    for x in loader:\n        if bad:\n            raw.load_state_dict(w)\n        engine.backward(engine(x))\n        engine.step()\n"
    assert lines(body(make, train)) == [11]
    assert lines(body(make.replace(module, "Copy(engine)"), train)) == []


def test_the_model_under_an_engine_is_its_module():
    """The engine has the model itself, not a copy: a load into it after the engine exists is a load into the engine."""
    load = "net.load_state_dict(torch.load('model.pt'))\n"
    assert lines(body(MAKE, load, TRAIN)) == [4]
    assert lines(body(load, MAKE, TRAIN)) == []
    assert lines(body(f"if use_ds:\n    {MAKE}else:\n    {load}", TRAIN)) == []


PREPARED = """\
import torch
from accelerate import Accelerator

class Trainer:
    def __init__(self, model, optimizer, scheduler, loader):
        self.accelerator = Accelerator({plugin})
        {branch}
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(model, optimizer, scheduler, loader)

    def restore(self, path):
        state = torch.load(path)
        self.scheduler.load_state_dict(state["scheduler"])
        {load}

    def train(self, path):
        self.restore(path)
        for batch in self.loader:
            self.accelerator.backward(self.model(batch))
            self.optimizer.step()
"""
BRANCH = 'self.uses_zero = True if self.accelerator.distributed_type == "DEEPSPEED" else False'


@pytest.mark.parametrize("owner", ["self.model.module", "self.accelerator.unwrap_model(self.model)", "self.model"])
@pytest.mark.parametrize(
    ("plugin", "branch"), [("", BRANCH), ("deepspeed_plugin=make_plugin() if zero else None", "pass")]
)
def test_a_load_into_a_prepared_model_is_reported(owner, plugin, branch):
    """Where Accelerate runs DeepSpeed, the prepared model is its engine; the scheduler next to it has no masters."""
    load = f'{owner}.load_state_dict(state["model"])'
    assert lines(PREPARED.format(plugin=plugin, branch=branch, load=load)) == [13]


def test_a_variable_for_the_module_of_a_prepared_model_is_followed():
    """The model is unwrapped first and loads in the next statement."""
    load = 'net = self.accelerator.unwrap_model(self.model); net.load_state_dict(state["model"])'
    assert lines(PREPARED.format(plugin="", branch=BRANCH, load=load)) == [13]


@pytest.mark.parametrize(
    ("branch", "load"),
    [
        ("pass", 'self.model.module.load_state_dict(state["model"])  # deepspeed is not for this script'),
        (BRANCH, "self.accelerator.load_state(path)"),
        (BRANCH, 'self.ema.load_state_dict(state["ema"])'),
        (
            BRANCH,
            "if self.accelerator.distributed_type != DistributedType.DEEPSPEED: self.model.module.load_state_dict(state)",
        ),
    ],
)
def test_other_loads_next_to_accelerate_are_fine(branch, load):
    """No branch for DeepSpeed, Accelerate's own load, an object that is not prepared, a load without DeepSpeed."""
    assert lines(PREPARED.format(plugin="", branch=branch, load=load)) == []


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("        self.engine.eval()\n        return self.measure(self.engine)\n", []),
        ("        self.net.eval()\n        for x in loader:\n            self.show(self.engine(x))\n", []),
        ("        self.engine.eval()\n        self.engine.train()\n", [9]),
        ("        self.engine.train()\n", [9]),
        ("        return state\n", [9]),
    ],
)
def test_a_method_that_loads_weights_to_evaluate_them_trains_nothing(after, expected):
    """A method that nothing calls may run before the training, unless it sets the model to evaluation."""
    init = f"class Task:\n    def __init__(self, net):\n        self.engine, *_ = deepspeed.initialize(model=net, config={CONFIG})\n"
    fit = "    def fit(self):\n        self.engine.step()\n"
    test = "    def test(self, state):\n        self.engine.module.load_state_dict(state)\n"
    assert lines(body(init, fit, test, after)) == expected
