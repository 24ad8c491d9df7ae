"""HS139: settings of a function, a class or a region that reach nothing but messages, logs and checkpoints."""

import pytest

from check_scripts import findings

STEP = """\
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
"""


def reported(text):
    """The lines at which HS139 is reported."""
    return [f.line for f in findings(text, "HS139")]


TABLE = """\
import torch
def main():
    config = {"name": 1, "lr": 2, "epochs": 3, "batch": 4, "seed": 5, "grad_accum": 1}
    model, loader = build(config["name"], config["lr"], config.get("epochs"), config["batch"], config["seed"])
"""


@pytest.mark.parametrize(
    ("use", "is_reported"),
    [
        ("pass", True),
        ("print(config)", True),
        ("for k, v in config.items():\n        print(k, v)", True),
        ("for k, v in config.items():\n        setattr(model, k, v)", False),
        ("wandb.init(project='x', config=config)", True),
        ("wandb.init(config={'n': 1, **{k: v for k, v in config.items() if k}})", True),
        ("torch.save({'model': model.state_dict(), 'config': config}, path)", True),
        ("state = {'config': config}\n    torch.save(state, path)", True),
        ("print(f'{config[\"grad_accum\"]} micro-batches')", True),
        ("total = config['batch'] * config['grad_accum']\n    print(total)", True),
        ("total = config['batch'] * config['grad_accum']\n    rate = total / 256", False),
        ("every = config['grad_accum']", False),
        ("train(config)", False),  # of another file
        ("model.setup(**config)", False),
        ("key = 'grad_accum'", False),
        ("return config", False),
        ("config = config | read()", False),
    ],
)
def test_a_dictionary_of_a_function_whose_key_only_messages_show(use, is_reported):
    """What a function reads of its own dictionary is all that can have an effect, if the dictionary goes nowhere else."""
    assert reported(TABLE + f"    {use}\n" + STEP) == [3] * is_reported


PASSED = """\
import torch
{head}
def train(config, model, loader, optimizer):
    rate = config["lr"], config["epochs"], config["batch"], config["seed"], config["name"]
{step}
config = {{"name": 1, "lr": 2, "epochs": 3, "batch": 4, "seed": 5, "use_amp": True}}
train({passed})
"""


@pytest.mark.parametrize(
    ("head", "passed", "is_reported"),
    [
        ("", "config, *objects", True),
        ("", "config=config", True),
        ("def other(options): use(options['use_amp'])", "config=config", False),
        ("def other(config): library(config)", "config, *objects", False),
    ],
)
def test_a_dictionary_that_functions_of_the_file_get_under_its_name(head, passed, is_reported):
    """A parameter of the same name is the dictionary, and what reads it there counts."""
    text = PASSED.format(head=head, step=STEP, passed=passed)
    assert reported(text) == [text.count("\n") - 1] * is_reported


CONSTRUCTED = """\
import torch
class Config(object):
    def __init__(self{parameter}):
        self.name = 1
        self.lr = 2
        self.epochs = 3
        self.batch = 4
        self.seed = 5
        self.grad_clip = 1.0
{more}
def train(args, loader, optimizer):
    model = build(args.name, args.lr, args.epochs, args.batch, args.seed)
"""


@pytest.mark.parametrize(
    ("parameter", "more", "use", "is_reported"),
    [
        ("", "", "pass", True),
        ("", "", "torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)", False),
        ("", "", "args.grad_clip = 2.0", False),
        (", path", "", "pass", False),
        ("", "    def limit(self):\n        return dict(self.items())\n", "pass", False),
    ],
)
def test_settings_that_a_constructor_assigns(parameter, more, use, is_reported):
    """A class of settings may have them in `__init__` instead of in its body."""
    assert reported(CONSTRUCTED.format(parameter=parameter, more=more) + f"    {use}\n" + STEP) == [9] * is_reported


LIMIT = """\
import torch
{above}def train(model, loader, optimizer, {parameter}):
    {first}
{step}{below}
"""


@pytest.mark.parametrize(
    ("parameter", "first", "above", "below", "lines"),
    [
        ("max_grad_norm=1.0", "pass", "", "", [2]),
        ("grad_accum_steps=4", "print(f'{grad_accum_steps} micro-batches')", "", "", [2]),
        ("grad_accum_steps=4", "every = grad_accum_steps", "", "", []),
        ("max_grad_norm=1.0", "clip(model, max_grad_norm)", "", "", []),
        ("max_norm=1.0", "pass", "", "", []),  # of anything
        ("max_grad_norm=1.0", "pass", "@register\n", "", []),  # what calls it may pass what others read
        ("max_grad_norm=1.0", "pass", "", "LOOPS = {'plain': train}", []),
        ("max_grad_norm=1.0", "pass", "", "def train(model):\n    pass", []),  # this one runs
        ("max_grad_norm=1.0", "pass", "", "train(model, loader, optimizer, 2.0)", [2]),
    ],
)
def test_a_parameter_for_the_step_that_a_training_function_ignores(parameter, first, above, below, lines):
    """The function runs backward and the step itself, so nothing else can clip or accumulate for it."""
    assert reported(LIMIT.format(parameter=parameter, first=first, above=above, below=below, step=STEP)) == [
        n + above.count("\n") for n in lines
    ]


STORED = """\
import torch
class Trainer{base}:
    def __init__(self, model, optimizer, max_grad_norm=1.0):
        self.model, self.optimizer = model, optimizer
        self.max_grad_norm = {value}
    def train(self, loader):
        {first}
        for x, y in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = loss_fn(self.model(x), y)
            loss.backward()
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("base", "value", "first", "is_reported"),
    [
        ("", "max_grad_norm", "pass", True),
        ("", "max_grad_norm", "print('limit', self.max_grad_norm)", True),
        ("", "float(max_grad_norm)", "pass", True),
        ("", "config.get('max_grad_norm', 1.0)", "pass", True),
        ("", "max_grad_norm", "limit = self.max_grad_norm", False),
        ("", "max_grad_norm", "clip(self)", False),
        ("", "max_grad_norm", "limit = getattr(self, 'max_grad_norm')", False),
        ("", "max_grad_norm", "limit = self.__dict__", False),
        ("(Base)", "max_grad_norm", "pass", False),
        ("", "self.limit = max_grad_norm", "pass", False),
    ],
)
def test_a_limit_that_a_class_which_steps_stores_and_never_reads(base, value, first, is_reported):
    """Nothing but its own methods can clip, and they do not."""
    assert reported(STORED.format(base=base, value=value, first=first)) == [5] * is_reported


ENTERED = """\
import torch
from contextlib import nullcontext
def main(model, loader, optimizer, dtype):
    ctx = {context}
    for x, y in loader:
        optimizer.zero_grad()
        {run}
        loss.backward()
        optimizer.step()
"""
CHOSEN = "nullcontext() if device == 'cpu' else torch.autocast('cuda', dtype=dtype)"


@pytest.mark.parametrize(
    ("context", "run", "is_reported"),
    [
        (CHOSEN, "loss = model(x, y)", True),
        ("torch.autocast('cuda', dtype=torch.bfloat16)", "loss = model(x, y)", True),
        (CHOSEN, "with ctx:\n            loss = model(x, y)", False),
        (CHOSEN, "loss = model(x, y, ctx)", False),
        (CHOSEN, "with torch.autocast('cuda', dtype=dtype):\n            loss = model(x, y)", False),
        ("torch.autocast('cuda', enabled=False)", "loss = model(x, y)", False),
    ],
)
def test_a_region_that_is_created_and_never_entered(context, run, is_reported):
    """A variable with a region changes nothing unless a `with` enters it."""
    assert reported(ENTERED.format(context=context, run=run)) == [4] * is_reported


LOADED = """\
import torch
from transformers import AutoModelForCausalLM, Trainer
def main(args):
    if args.npu:
        model_dtype = {first}
    else:
        model_dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained("x", dtype={dtype})
    Trainer(model, args).train()
"""


@pytest.mark.parametrize(
    ("first", "dtype", "is_reported"),
    [
        ("torch.float16", "torch.bfloat16", True),
        ("torch.float16", "model_dtype", False),
        ("torch.bfloat16", "torch.bfloat16", False),
        ("torch.float16", "'auto'", False),
        ("pick(args)", "torch.bfloat16", False),
    ],
)
def test_a_dtype_that_branches_choose_for_a_model_that_is_loaded_in_another(first, dtype, is_reported):
    """The branch says what is meant; the load says what runs."""
    assert reported(LOADED.format(first=first, dtype=dtype)) == [5] * is_reported
