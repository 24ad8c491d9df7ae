"""HS120: a scaler whose flag asks for the device, or for mixed precision as a whole, where the dtype may be bfloat16."""

import pytest

from check_scripts import findings


def lines(text):
    """The lines at which HS120 reports something."""
    return [f.line for f in findings(text, "HS120")]


CHOSEN = """\
import torch
from torch.amp import GradScaler, autocast
def train(model, loader, optimizer, device, cfg, engine=None):
    {dtype}
    scaler = {scaler}
    {after}
    for x, y in loader:
        with autocast(device_type=device.type, dtype=dtype, {region}):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
BY_HARDWARE = "dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16"
BY_OPTION = "dtype = {'bf16': torch.bfloat16, 'fp16': torch.float16}[cfg.dtype]"
BY_DEVICE = "if device.type == 'cuda': dtype = torch.float16\n    else: dtype = torch.bfloat16"
ON_CUDA = "GradScaler(enabled=device.type == 'cuda')"


def chosen(dtype=BY_HARDWARE, scaler=ON_CUDA, after="pass", region=""):
    return CHOSEN.format(dtype=dtype, scaler=scaler, after=after, region=region)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": BY_OPTION},
        {"scaler": "GradScaler('cuda', enabled=torch.cuda.is_available())"},
        {"scaler": "GradScaler() if device.type == 'cuda' else None"},
        {"scaler": "GradScaler(enabled=cfg.amp_enabled)", "region": "enabled=cfg.amp_enabled"},
        {
            "scaler": "GradScaler(enabled=low)",
            "region": "enabled=low",
            "dtype": f"low = bool(cfg.low)\n    {BY_OPTION}",
        },
        {"after": "if cfg.use_deepspeed: scaler = None"},
    ],
)
def test_a_flag_that_leaves_out_the_dtype(options):
    """The scaler is on for bfloat16 as well; where an engine trains, there is none, whatever the dtype."""
    assert len(lines(chosen(**options))) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": BY_DEVICE},
        {"dtype": "dtype = torch.float16"},
        {"scaler": "GradScaler(enabled=device.type == 'cuda' and dtype == torch.float16)"},
        {"scaler": "GradScaler(enabled=cfg.scale)", "region": "enabled=cfg.low"},
        {"after": "if not cfg.scale: scaler = None"},
    ],
)
def test_a_flag_that_may_exclude_bfloat16(options):
    """On CUDA the dtype is float16, or the flag is not known to be on with bfloat16."""
    assert lines(chosen(**options)) == []


ATTRIBUTE = """\
import torch
from torch.cuda.amp import GradScaler, autocast
class Trainer:
    def __init__(self, config, model, optimizer):
        low = bool(config.train.low) and torch.cuda.is_available()
        self.low = low
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float16
        self.scaler = GradScaler(enabled={flag})

    def train(self, model, loader):
        for x in loader:
            with autocast(enabled=self.low, dtype=self.dtype if self.low else torch.float32):
                loss = model(x)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(("flag", "expected"), [("low", [8]), ("self.low", [8]), ("config.scale", [])])
def test_an_attribute_that_copies_the_flag(flag, expected):
    """`self.low = low` is the same flag; the message names the dtype, not the choice of float32."""
    reported = findings(ATTRIBUTE.format(flag=flag), "HS120")
    assert [f.line for f in reported] == expected
    assert all("when `self.dtype` (line 12) is bfloat16" in f.message for f in reported)


SETTING = """\
from dataclasses import dataclass
import torch

@dataclass
class Config:
    use_amp: bool = True
    {field}

def setup(config: Config, device):
    scaler = None
    if {test}:
        scaler = torch.amp.GradScaler("cuda")
    return scaler
"""


@pytest.mark.parametrize(
    ("field", "test", "expected"),
    [
        ('amp_dtype: str = "bfloat16"', 'config.use_amp and device.type == "cuda"', [12]),
        ("autocast_dtype: torch.dtype = torch.bfloat16", "config.use_amp", [12]),
        ('amp_dtype: str = "float16"', "config.use_amp", []),
        ('amp_dtype: str = "bfloat16"', 'config.use_amp and config.amp_dtype == "float16"', []),
        ('model_dtype: str = "bfloat16"', "config.use_amp", []),
        ('amp_dtype: str = "bfloat16"', "config.scale", []),
    ],
)
def test_a_setting_that_is_bfloat16_by_default(field, test, expected):
    """Another file computes in the dtype of the setting; the scaler asks only for the flag next to it."""
    assert lines(SETTING.format(field=field, test=test)) == expected


HELPER = """\
import torch
from .precision import {name}

def train(model, loader, optimizer, scaler):
    for x in loader:
        with {name}({arguments}):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("autocast_ctx", 'device, enabled=True, dtype="bf16"', [8]),
        ("get_autocast_context", "dtype=torch.bfloat16", [8]),
        ("maybe_autocast", '"bfloat16"', [8]),
        ("autocast_ctx", 'dtype="fp16"', []),
        ("autocast_ctx", "dtype=dtype", []),
        ("timer", 'dtype="bf16"', []),
    ],
)
def test_a_helper_of_another_file_that_is_asked_for_bfloat16(name, arguments, expected):
    """The dtype that is passed to a context called after autocast is the one it enters."""
    assert lines(HELPER.format(name=name, arguments=arguments)) == expected


EPOCHS = """\
import torch
def train_epoch(model, loader, optimizer, epoch):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
def train_epoch_in_float32(model, loader, optimizer, epoch):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


def test_a_region_of_another_function_with_a_loss_of_its_own():
    """A scaler whose loss has no region is not the one of the bfloat16 region that another function has for its loss."""
    assert lines(EPOCHS) == [3]
    assert [f.line for f in findings(EPOCHS, "HS121")] == [12]
