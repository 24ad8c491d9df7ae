"""HS120, HS123: the flags of a scaler and of its region, and the dtype, for every combination of their settings."""

import pytest

from check_scripts import findings

PAIR = """\
import torch
from torch.amp import GradScaler
class Trainer:
    def __init__(self, config, model, optimizer):
        self.config, self.model, self.optimizer = config, model, optimizer
        self.enable_amp = config["enable_amp"]
        self.amp_dtype = torch.float16
        {before}
        self.scaler = GradScaler("cuda", enabled={enabled})

    def step(self, x, y):
        with torch.autocast("cuda", dtype={dtype}, enabled=self.enable_amp):
            loss = loss_fn(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
"""
FALLBACK = """self.amp_dtype = torch.bfloat16 if config["bf16"] else torch.float16
        if self.amp_dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported():
            self.amp_dtype = torch.float16"""
OVERRIDE = """self.amp_dtype = torch.bfloat16 if config["bf16"] else torch.float16
        if self.amp_dtype == torch.float16 and config["arch"] in NO_FLOAT16:
            self.amp_dtype = torch.bfloat16"""


def pair(enabled, before="pass", dtype="self.amp_dtype"):
    return PAIR.format(enabled=enabled, before=before, dtype=dtype)


@pytest.mark.parametrize(
    ("enabled", "before", "num"),
    [
        ('config["enable_scaler"]', "pass", 1),
        ('torch.cuda.is_available() and config["enable_scaler"]', "pass", 1),
        ('config["enable_amp"]', "pass", 0),
        ("self.enable_amp", "pass", 0),
        ('config["enable_scaler"]', 'if config["debug"]: self.enable_amp = False', 1),
        ('config["enable_scaler"]', 'assert config["enable_scaler"] or not config["enable_amp"]', 0),
        ('config["enable_scaler"]', 'if config["enable_amp"]: config["enable_scaler"] = True', 0),
        ("helper(config)", "pass", 0),
    ],
)
def test_options_of_their_own_for_the_scaler_and_the_region(enabled, before, num):
    """One may be on without the other, unless a line relates them or the file does not show what decides."""
    assert len(findings(pair(enabled, before), "HS123")) == num


@pytest.mark.parametrize(
    ("enabled", "before", "num"),
    [
        ('self.enable_amp and not config["bf16"]', FALLBACK, 1),
        ("self.enable_amp and self.amp_dtype == torch.float16", FALLBACK, 0),
        ("self.enable_amp", FALLBACK, 0),
    ],
)
def test_a_dtype_that_is_replaced_after_the_option_is_read(enabled, before, num):
    """A GPU without bfloat16 computes in float16, while the option that disables the scaler still reads bfloat16."""
    assert len(findings(pair(enabled, before), "HS123")) == num


@pytest.mark.parametrize(
    ("enabled", "before", "num"),
    [
        ('self.enable_amp and not config["bf16"]', OVERRIDE, 1),
        ("self.enable_amp and self.amp_dtype == torch.float16", OVERRIDE, 0),
    ],
)
def test_bfloat16_for_another_reason_than_the_option(enabled, before, num):
    """The scaler is enabled where the option is not set, and the region is bfloat16 all the same."""
    assert len(findings(pair(enabled, before), "HS120")) == num


METHODS = """\
import torch
class Optimization:
    def __init__(self, optimizer, enable_amp: bool):
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cuda") if enable_amp else None

    def autocast(self):
        enabled = self.scaler is not None
        return torch.amp.autocast("cuda", enabled=enabled, dtype=torch.{dtype} if enabled else None)

    def step(self, loss):
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(("dtype", "num"), [("bfloat16", 1), ("float16", 0)])
def test_the_scaler_itself_enables_the_region(dtype, num):
    """`enabled=self.scaler is not None` is on exactly where the scaler is."""
    assert len(findings(METHODS.format(dtype=dtype), "HS120")) == num
    assert findings(METHODS.format(dtype=dtype), "HS123") == []


DEVICES = """\
import torch
from contextlib import nullcontext
def amp_dtype(device):
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    {mps}
    return torch.bfloat16
def region(device, enabled):
    if not enabled:
        return nullcontext()
    return torch.autocast(device.type, dtype=amp_dtype(device))
def train(model, loader, optimizer, scaler, device, cfg):
    for x in loader:
        with region(device, enabled=cfg.amp):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
def main(cfg, model, loader, optimizer, device):
    use = cfg.amp and device.type == "cuda" and amp_dtype(device) == torch.float16
    scaler = torch.amp.GradScaler("cuda", enabled=use)
    train(model, loader, optimizer, scaler, device, cfg)
"""


@pytest.mark.parametrize(
    ("mps", "num"), [('if device.type == "mps":\n        return torch.float16', 1), ("print(device)", 0)]
)
def test_the_device_decides_in_a_function(mps, num):
    """Functions of the file are followed for each device: float16 on MPS has no scaler, bfloat16 needs none."""
    assert len(findings(DEVICES.format(mps=mps), "HS123")) == num


RESOLVED = """\
import torch
from contextlib import nullcontext
def resolve(precision, device):
    {first}
    return precision, {{"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}}[precision]
def train(cfg, model, loader, optimizer, device):
    name, dtype = resolve(cfg.precision, device)
    scaler = torch.cuda.amp.GradScaler(enabled=name == "fp16" and device.type == "cuda")
    for x in loader:
        with torch.autocast(device_type=device.type, dtype=dtype) if dtype is not None else nullcontext():
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("first", "num"), [("print(device)", 1), ('if device.type != "cuda":\n        return "fp32", None', 0)]
)
def test_no_run_has_what_the_text_of_the_flag_suggests(first, num):
    """A function that leaves float16 to CUDA excuses a scaler that is for CUDA alone."""
    assert len(findings(RESOLVED.format(first=first), "HS123")) == num


EXPORTED = """\
{imports}
def train(model, loader, optimizer, amp):
    for x in loader:
        with {region}:
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("imports", "region", "num"),
    [
        ("from .nn.functional import autocast", "autocast(enabled=amp)", 1),
        ("from mylib.compat import autocast, torch", "autocast(device_type='cuda', dtype=torch.float16)", 1),
        ("from .nn.functional import autocast", "autocast(model)", 0),
        ("from mmengine.runner.amp import autocast", "autocast(enabled=amp)", 0),
        ("from utils import *", "autocast()", 1),
        ("from .imports import *", "autocast(enabled=amp)", 1),
        ("from utils import *", "autocast('cuda', dtype=torch.float16)", 1),
        ("from utils import *", "autocast(model)", 0),
        ("from utils import *\ndef autocast(): ...", "autocast()", 0),
        ("from jax.numpy import *", "autocast()", 0),
        ("import utils", "autocast()", 0),
    ],
)
def test_a_project_exports_autocast(imports, region, num):
    """`autocast` of a module of the project, with torch's arguments, is a region; its format is open without a dtype."""
    source = EXPORTED.format(imports=imports, region=region)
    assert len(findings(source, "HS140")) == num
    assert len(findings(source, "HS141")) == num
    assert len(findings(source, "HS123")) == ("float16" in region)
