"""HS139 on flags that a training function never reads, and on options that only their choices show to name a format."""

import pytest

from check_scripts import findings, reported

EPOCH = """\
import torch
from torch.amp import GradScaler, autocast

def train_epoch(model, loader, optimizer, criterion, use_amp: bool = False):
    model.train()
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        {forward}
        loss.backward()
        optimizer.step()
        total += loss.item()
    total /= len(loader)
    return total
"""
PLAIN = "loss = criterion(model(x), y)"
REGION = 'with autocast("cuda", dtype=torch.bfloat16, enabled=use_amp): loss = criterion(model(x), y)'
OTHER = """
def train_fast(model, loader, optimizer, criterion, use_amp: bool = False):
    for x, y in loader:
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.bfloat16, enabled=use_amp):
            loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
"""
OPTIONS = """\
import argparse
import json
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--grad_format", choices={choices})
args = parser.parse_args()
print(json.dumps(args.__dict__))
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
    {reduce}
    optimizer.step()
"""


def test_flag_of_a_training_function_that_it_never_reads():
    """HS139 at the parameter: whatever another file passes, the loop is in float32."""
    assert [(f.code, f.line) for f in findings(EPOCH.format(forward=PLAIN))] == [("HS139", 4)]


@pytest.mark.parametrize(
    "text",
    [
        EPOCH.format(forward=REGION),
        EPOCH.format(forward=PLAIN) + OTHER,  # the two share a signature
        EPOCH.format(forward=PLAIN) + "\nTRAINERS = {'plain': train_epoch}\n",
        EPOCH.format(forward=PLAIN).replace("train_epoch", "evaluate_epoch"),
        EPOCH.format(forward=PLAIN).replace("\ndef", "\n@register\ndef"),
        EPOCH.format(forward=PLAIN).replace("use_amp", "use_bar"),
    ],
)
def test_flags_that_are_read_or_part_of_a_signature(text):
    """No finding for a flag that is read, or that an interface may ask for."""
    assert "HS139" not in reported(text)


@pytest.mark.parametrize("choices", ['["fp32", "bf16"]', '("float16", "bfloat16", "float32")'])
def test_option_whose_choices_are_formats(choices):
    """HS139 by the choices of an option, whatever its name."""
    assert reported(OPTIONS.format(choices=choices, reduce="pass")) == {"HS139"}


@pytest.mark.parametrize(
    ("choices", "reduce"),
    [
        ('["fp32", "bf16"]', "reduce_gradients(model, args.grad_format)"),
        ('["fp32", "bf16"]', "reduce_gradients(model, **args.__dict__)"),
        ('["fp32", "bf16"]', "reduce_gradients(model, args.__dict__)"),
        ('["csv", "json"]', "pass"),
    ],
)
def test_options_that_are_read_or_name_no_format(choices, reduce):
    """No finding where the option is read, goes to other code with the whole namespace, or is no format."""
    assert reported(OPTIONS.format(choices=choices, reduce=reduce)) == set()


def test_a_function_with_nothing_but_a_docstring_reads_nothing():
    """A placeholder with the same parameter does not hide the training function that never reads its own."""
    text = EPOCH.format(forward=PLAIN) + 'def evaluate(model, use_amp):\n    """To do."""\n'
    assert [f.line for f in findings(text, "HS139")] == [4]


SETTINGS = """\
import torch
from accelerate import Accelerator

def main():
    config = load("train.yaml")
    use_bf16 = config["bf16"]
    use_amp = {value}
    {rest}
    accelerator = Accelerator(mixed_precision="bf16" if use_bf16 else "no")
    model, optimizer, loader = accelerator.prepare(build(), make(), load("data"))
    for x in loader:
        accelerator.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "value", ['config["amp"]', 'config["training"]["amp"]', 'config.get("amp", True)', "config.amp"]
)
def test_a_setting_that_is_read_into_a_variable_and_not_used(value):
    """HS139 at the assignment, whatever form the settings have; a use anywhere, also in a message, is one."""
    assert [f.line for f in findings(SETTINGS.format(value=value, rest=""), "HS139")] == [7]
    assert findings(SETTINGS.format(value=value, rest="print(use_amp)"), "HS139") == []


@pytest.mark.parametrize("value", ["flags[0]", "flags[index]", "supports_amp()", "True"])
def test_an_unused_variable_that_is_no_setting(value):
    """An element of a list, a query or a constant asks for nothing."""
    assert findings(SETTINGS.format(value=value, rest=""), "HS139") == []


COMPILED = """\
import torch
from torch import nn
from base import Base

class Net({base}):
    def __init__(self):
        super().__init__()
        self.use_amp = False

    def compile(self, optimizer, use_amp=False):
        self.optimizer = optimizer
        self.use_amp = {stored}

    def train_epoch(self, loader, use_amp=True):
        use_amp = use_amp and torch.cuda.is_available()
        scaler = torch.amp.GradScaler("cuda", enabled={enabled})
        for x, y in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled={enabled}):
                loss = loss_fn(self(x), y)
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()

    def fit(self, loader, epochs, use_amp={default}):
        for epoch in range(epochs):
            self.train_epoch(loader, use_amp=use_amp)
"""


@pytest.mark.parametrize(
    ("base", "stored", "enabled", "default", "expected"),
    [
        ("nn.Module", "use_amp", "use_amp", "False", [10]),
        ("object", "use_amp", "use_amp", "True", [10]),
        ("torch.nn.Module", "use_amp", "use_amp", "False", [10]),
        ("Base", "use_amp", "use_amp", "False", []),  # may read it
        ("nn.Module", "use_amp", "self.use_amp", "False", []),
        ("nn.Module", "use_amp and torch.cuda.is_available()", "use_amp", "False", []),  # kept out: no plain copy
        ("nn.Module", "use_amp", "getattr(self, 'use_amp')", "False", []),
    ],
)
def test_a_parameter_that_is_only_stored(base, stored, enabled, default, expected):
    """HS139 where a method stores the flag, nothing reads the attribute, and training has a parameter of its own."""
    text = COMPILED.format(base=base, stored=stored, enabled=enabled, default=default)
    assert [f.line for f in findings(text, "HS139")] == expected
    assert findings(f"{text}net = Net()\nnet.fit(loader, 1, use_amp=net.use_amp)\n", "HS139") == []


LOADING = """\
import torch
from transformers import AutoModelForCausalLM

def get_model(name, {parameter}, device="cuda"):
    \"\"\"The model in its dtype.\"\"\"
    {first}
    model = AutoModelForCausalLM.from_pretrained(name, {loaded}).to(device)
    return model
"""


@pytest.mark.parametrize(
    ("parameter", "first", "loaded", "is_reported"),
    [
        ("torch_dtype", "pass", "torch_dtype=torch.float16", True),
        ("dtype=torch.float32", "pass", "dtype = torch.bfloat16, device_map='auto'", True),
        ("*, model_dtype: str", "print(name)", "torch_dtype=torch.float16", True),
        ("torch_dtype", "pass", "torch_dtype=torch_dtype", False),
        ("torch_dtype", "log(torch_dtype)", "torch_dtype=torch.float16", False),
        ("dtype", "name = name + suffix(dtype)", "torch_dtype=torch.float16", False),
        ("torch_dtype", "pass", "device_map='auto'", False),  # the library decides
        ("torch_dtype", "options = locals()", "torch_dtype=torch.float16", False),
        ("torch_dtype", "pass", "torch_dtype=settings.dtype", False),
        (
            "torch_dtype",
            "if device == 'cpu': return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)",
            "dtype=torch.float16",
            False,
        ),
    ],
)
def test_a_parameter_for_the_dtype_of_a_load(parameter, first, loaded, is_reported):
    """HS139 where a function loads its model in a dtype that it names itself; the keyword of the load is no use of it."""
    text = LOADING.format(parameter=parameter, first=first, loaded=loaded)
    assert [f.line for f in findings(text, "HS139")] == [4] * is_reported
    # Functions with one signature: a table calls them.
    other = "def get_other(name, torch_dtype, dtype, model_dtype):\n    return load(name, torch_dtype, dtype, model_dtype)\n"
    assert findings(text + other, "HS139") == []
    assert findings(text.replace("def get", "@register\ndef get"), "HS139") == []


STORED_FLAG = """\
import torch

class Trainer{base}:
    def __init__(self, model, optimizer, config{flag}):
        self.model, self.optimizer = model, optimizer
        self.lr = config["lr"]
        {stored}

    def train(self, loader):
        for x, y in loader:
            self.optimizer.zero_grad()
            loss = self.model(x, y)
            {backward}
            self.optimizer.step()
        {last}
"""


@pytest.mark.parametrize(
    ("change", "is_reported"),
    [
        ({}, True),
        ({"stored": "self.fp16: bool = config['fp16']"}, True),
        ({"stored": "self.fp16 = bool(config.fp16)"}, True),
        ({"stored": "self.use_amp = config.get('use_amp', True)"}, True),
        ({"stored": "self.fp16 = fp16", "flag": ", fp16=False"}, True),
        ({"base": "(object)"}, True),
        ({"last": "print(self.fp16)"}, True),  # only shown
        ({"last": "self.save(self.fp16)"}, False),
        ({"last": "save(getattr(self, 'fp16'))"}, False),
        ({"last": "evaluate(self, loader)"}, False),  # another file may read it
        ({"last": "setup(config)['fp16']"}, False),
        ({"base": "(Base)"}, False),
        ({"stored": "self.fp16 = False"}, False),  # asks for nothing
        ({"stored": "self.fp16 = fp16; self.model = wrap(model, fp16)", "flag": ", fp16=False"}, False),
        ({"backward": "self.engine.backward(loss)"}, False),
        ({"backward": "self.scaler.scale(loss).backward()"}, False),
        ({"backward": "loss.backward(); self.model.half()"}, False),
    ],
)
def test_a_flag_that_a_class_stores_and_trains_without(change, is_reported):
    """HS139 where the class has its own loop, nothing in the file computes in 16 bits, and nothing can read the attribute."""
    parts = {
        "base": "",
        "flag": "",
        "stored": "self.fp16 = config.get('fp16', False)",
        "backward": "loss.backward()",
        "last": "pass",
    }
    assert [f.line for f in findings(STORED_FLAG.format(**{**parts, **change}), "HS139")] == [7] * is_reported
