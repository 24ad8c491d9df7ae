"""Precision options whose name, documentation or value is not what the run does."""

import pytest

from check_scripts import findings

SWITCHED = """\
import torch
scaler = torch.amp.GradScaler("cuda"{enabled})
def train(model, optimizer, loader, config):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.{dtype}, enabled={flag}):
            loss = model(x).mean()
        if {test}:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("dtype", "flag", "test", "enabled", "expected"),
    [
        ("bfloat16", "config.fp16", "config.fp16", "", [2]),
        ("bfloat16", "config.half", "config.half", "", [2]),
        ("float16", "config.fp16", "config.fp16", "", []),
        ("bfloat16", "config.amp", "config.fp16", "", []),
        ("bfloat16", "config.fp16", "not config.fp16", "", []),
    ],
)
def test_the_flag_of_the_only_region_means_its_dtype(dtype, flag, test, enabled, expected):
    """HS120 reports a scaler under the flag that enables the bfloat16 region, whatever it is called."""
    text = SWITCHED.format(dtype=dtype, flag=flag, test=test, enabled=enabled)
    assert [f.line for f in findings(text, "HS120")] == expected


DOCUMENTED = '''\
import torch
def train(model, optimizer, loader, dtype=torch.float16, scaler=None):
    """Train one epoch.

    Args:
        model: the model
        dtype: {doc}
    """
    if scaler is None{test}:
        scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
'''


@pytest.mark.parametrize(
    ("doc", "test", "expected"),
    [
        ("format of autocast (float16 or bfloat16)", "", [10]),
        ("torch.bfloat16 or torch.float16", "", [10]),
        ("format of autocast", "", []),
        ("torch.float16; bfloat16 needs no scaler", " and dtype == torch.float16", []),
    ],
)
def test_a_documented_dtype_may_be_passed(doc, test, expected):
    """HS120 reports a scaler that is enabled for every dtype which the docstring of a parameter allows."""
    assert [f.line for f in findings(DOCUMENTED.format(doc=doc, test=test), "HS120")] == expected


STORED = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--use_amp", action="store_true", default=True)
args = parser.parse_args()
config = Config(**vars(args))
if {test}:
    config.use_amp = False
train(config, torch.optim.AdamW(model.parameters()))
"""


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("device.type == 'mps'", [4]),
        ("not torch.cuda.is_available()", [4]),
        ("args.device == 'cpu'", []),
        ("args.debug", []),
    ],
)
def test_missing_hardware_is_no_switch(test, expected):
    """HS133 reports an option that only a machine without CUDA changes."""
    assert [f.line for f in findings(STORED.format(test=test), "HS133")] == expected


CONSTRUCTED = """\
import torch
class Training{base}:
    def __init__(self, model, optimizer, {flag}=False):
        {doc}
        self.model = model
        self.optimizer = {value}

    def step(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.model(x).mean()
        loss.backward()
        self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("base", "flag", "doc", "value", "expected"),
    [
        ("", "amp", "'''amp: mixed precision'''", "optimizer", [3]),
        ("(object)", "use_amp", "pass", "optimizer", [3]),
        ("", "fp16", "torch.manual_seed(0)  # fp16", "optimizer", [3]),
        ("(Base)", "amp", "pass", "optimizer", []),
        ("", "amp", "pass", "wrap(optimizer, amp)", []),
        ("", "verbose", "pass", "optimizer", []),
    ],
)
def test_a_constructor_that_drops_a_flag(base, flag, doc, value, expected):
    """HS139 reports a precision flag that the constructor of a class which trains takes and never reads."""
    text = CONSTRUCTED.format(base=base, flag=flag, doc=doc, value=value)
    assert [f.line for f in findings(text, "HS139")] == expected


FIELDS = """\
from dataclasses import dataclass
@dataclass
class Config:
    path: str
    encoder: str
    tokenizer: str
    {field}: bool
    length: int
    rate: float
config = Config(**read())
model, encoder = load(config.path), load(config.encoder{used})
optimizer = make(model, config.rate)
for x in tokens(config.tokenizer, config.length):
    model(encoder(x)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("field", "used", "expected"),
    [
        ("encoder_to_8bit", "", [7]),
        ("load_in_4bit", "", [7]),
        ("encoder_to_8bit", ", config.encoder_to_8bit", []),
        ("num_8bit_layers", "", []),
    ],
)
def test_an_unread_field_for_quantization(field, used, expected):
    """HS139 reports a field that asks for 8 bits in the file that reads all the others."""
    assert [f.line for f in findings(FIELDS.format(field=field, used=used), "HS139")] == expected
