"""HS123, HS142 and HS160: what happens for other values of a setting, on other devices, and for the dtype of another file."""

import pytest

from check_scripts import findings


def lines(text, code):
    """The lines at which a rule reports something."""
    return [f.line for f in findings(text, code)]


OPEN = """\
import argparse
from contextlib import nullcontext
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--dtype", type=str, default="bfloat16"{choices})
args = parser.parse_args()
{check}
dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float16
ctx = {context}
scaler = torch.amp.GradScaler("cuda", enabled={enabled})
for x in loader:
    with ctx:
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
CONTEXT = 'nullcontext() if device == "cpu" else torch.autocast("cuda", dtype=dtype)'


def option(choices="", check="pass", context=CONTEXT, enabled='args.dtype == "float16"'):
    return OPEN.format(choices=choices, check=check, context=context, enabled=enabled)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [8]),
        ({"enabled": 'use_amp and args.dtype == "float16"'}, [8]),
        ({"choices": ', choices=["float16", "bfloat16"]'}, []),
        ({"check": 'if args.dtype not in ("float16", "bfloat16"): raise ValueError(args.dtype)'}, []),
        ({"enabled": "dtype == torch.float16"}, []),
        ({"context": 'torch.autocast("cuda", dtype=dtype, enabled=args.dtype in ("float16", "bfloat16"))'}, []),
        ({"check": 'assert args.dtype in ("float16", "bfloat16")'}, []),
        ({"check": 'if args.dtype != "float16" and args.dtype != "bfloat16": parser.error("dtype")'}, []),
        ({"check": 'if not (args.dtype == "float16" or args.dtype == "bfloat16"): raise SystemExit(1)'}, []),
        ({"check": 'if broken or args.dtype not in ("float16", "bfloat16"): raise SystemExit(1)'}, []),
        ({"check": 'LOW = ("float16", "bfloat16")\nif args.dtype not in LOW: raise ValueError'}, []),
        (
            {
                "check": 'if args.dtype == "float16": n = 1\nelif args.dtype == "bfloat16": n = 2\nelse: raise ValueError(args.dtype)'
            },
            [],
        ),
        ({"check": 'if args.dtype == "float16": n = 1\nelif args.dtype == "bfloat16": n = 2\nelse: n = 3'}, [10]),
        ({"check": 'if broken and args.dtype not in ("float16", "bfloat16"): raise SystemExit(1)'}, [8]),
        ({"check": 'if args.dtype not in ("float16", "bfloat16"): print("unusual")'}, [8]),
        ({"check": 'if args.dtype == "float32": n = 1\nelif args.dtype == "bfloat16": raise ValueError'}, [9]),
        ({"check": "assert args.dtype"}, [8]),
        (
            {
                "check": 'low = args.dtype in ("float16", "bfloat16")',
                "context": 'torch.autocast("cuda", dtype=dtype) if low else nullcontext()',
            },
            [],
        ),
    ],
)
def test_a_value_that_is_neither_of_those_compared(options, expected):
    """`--dtype float32` gives float16 without a loss scale, unless something rejects it or enters no region."""
    assert lines(option(**options), "HS123") == expected


FIXED = """\
import argparse
from contextlib import nullcontext
import torch
{setting}
{region}
scaler = {scaler}
for x in loader:
    {enter}
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
NAMED = 'dtype = "bfloat16"  # or float16'
OPTION = "parser = argparse.ArgumentParser()\nparser.add_argument('--dtype'{})\nargs = parser.parse_args()"
HALF = 'ctx = nullcontext() if device == "cpu" else torch.autocast("cuda", dtype=torch.float16)'
ENABLED = 'torch.amp.GradScaler("cuda", enabled={})'


def fixed(setting=NAMED, region=HALF, enabled='dtype == "float16"', scaler="", enter="with ctx:"):
    """The lines and severities of HS123."""
    text = FIXED.format(setting=setting, region=region, scaler=scaler or ENABLED.format(enabled), enter=enter)
    return [(f.line, f.severity) for f in findings(text, "HS123")]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [(6, "error")]),
        ({"region": "ptdtype = torch.float16\n" + HALF.replace("torch.float16", "ptdtype")}, [(7, "error")]),
        ({"setting": OPTION.format(", default='bf16'"), "enabled": 'args.dtype == "fp16"'}, [(8, "error")]),
        (
            {"setting": OPTION.format(", choices=['bf16', 'fp16']"), "enabled": 'amp and args.dtype == "fp16"'},
            [(8, "warning")],
        ),
        ({"region": 'ctx = torch.autocast("cuda")'}, [(6, "error")]),
        ({"region": "ctx = torch.cuda.amp.autocast()", "enabled": 'dtype in ["float16", "half"]'}, [(6, "error")]),
        ({"setting": 'dtype = "float32"', "enabled": 'dtype != "float32"'}, [(6, "error")]),
        (
            {"region": "ctx = torch.cuda.amp.autocast()", "enabled": 'dtype in ["float16", "bfloat16"]'},
            [(6, "warning")],
        ),
        (
            {"setting": NAMED + '\nuse_scaler = dtype == "float16"', "enabled": "use_scaler"},
            [(7, "error")],
        ),
        (
            {
                "setting": "class Config:\n    dtype: str = 'bfloat16'\ncfg = Config()",
                "enabled": 'cfg.dtype == "float16"',
                "enter": 'with torch.autocast("cuda", dtype=torch.float16, enabled=cfg.amp):',
            },
            [(8, "error")],
        ),
    ],
)
def test_a_region_in_float16_beside_a_setting_that_is_not(changes, expected):
    """The scaler asks a setting for float16, and the region does not: with the value in the file nothing scales the loss."""
    assert fixed(**changes) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"setting": 'dtype = "float16"'},
        {"setting": "from settings import dtype"},
        {"setting": OPTION.format(""), "enabled": 'args.dtype == "fp16"'},
        {"setting": OPTION.format(", choices=['fp16']"), "enabled": 'args.dtype == "fp16"'},
        {"region": HALF.replace("torch.float16", '{"float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]')},
        {"region": HALF.replace('device == "cpu"', 'dtype != "float16"')},
        {"region": HALF.replace("torch.float16)", 'torch.float16, enabled=dtype == "float16")')},
        {"region": 'half = dtype == "float16"\n' + HALF.replace('device == "cpu"', "not half")},
        {"region": f'if dtype == "float16":\n    {HALF}\nelse:\n    ctx = nullcontext()'},
        {"setting": NAMED + '\nassert dtype == "float16"'},
        {"enter": 'if dtype != "float16":\n        continue\n    with ctx:'},
    ],
)
def test_a_region_that_follows_the_setting_of_its_scaler(changes):
    """The setting decides about the region as well, or may have no other value here."""
    assert fixed(**changes) == []


HELPER = """\
from contextlib import nullcontext
import torch
def setup(config):
    precision = getattr(config, "precision", "fp32")
{check}
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        scaler = torch.amp.GradScaler("cuda") if precision == "fp16" else None
        return torch.autocast("cuda", dtype=dtype), scaler
    return nullcontext(), None
def train(model, config, loader, optimizer):
    context, scaler = setup(config)
    for x in loader:
        with context:
            loss = model(x)
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ('    if precision not in ("bf16", "fp16"):\n        return nullcontext(), None\n    if True:', []),
        ('    if cpu or precision not in ("bf16", "fp16"):\n        return nullcontext(), None\n    if True:', []),
        ('    if precision == "fp32":\n        return nullcontext(), None\n    if True:', []),
        ('    if precision in ("bf16", "fp16"):', []),
        ('    if precision == "bf16" or precision == "fp16":', []),
        ("    if config.device == 'cuda':", [6]),
        ("    if True:", [6]),
        ('    if cpu and precision not in ("bf16", "fp16"):\n        return nullcontext(), None\n    if True:', [8]),
        ('    if precision == "fp8":\n        return nullcontext(), None\n    if True:', [8]),
    ],
)
def test_a_function_that_has_returned_for_other_values(check, expected):
    """What follows a `return` for every other value, or is in the branch for these, is in one of the two formats."""
    assert lines(HELPER.format(check=check), "HS123") == expected


WITHOUT_CUDA = """\
import torch
def train(model, loader, optimizer):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = {dtype}
    scaler = torch.amp.GradScaler(enabled={enabled})
    for x in loader:
        with torch.autocast({type}, dtype=dtype, enabled={region}):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
NEWER = "torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float16"


@pytest.mark.parametrize(
    ("dtype", "enabled", "device", "region", "expected"),
    [
        (NEWER, "device.type == 'cuda'", "device.type", "True", [7]),
        (NEWER, "device.type == 'cuda'", "device.type", "device.type == 'cuda'", []),
        (NEWER, "device.type == 'cuda'", "'cuda'", "True", []),
        (NEWER, "True", "device.type", "True", []),
        ("torch.bfloat16", "device.type == 'cuda'", "device.type", "True", []),
        (
            "torch.float16 if torch.cuda.is_available() else torch.bfloat16",
            "device.type == 'cuda'",
            "device.type",
            "True",
            [],
        ),
    ],
)
def test_float16_where_there_is_no_cuda(dtype, enabled, device, region, expected):
    """The `else` of a test for CUDA is also what a CPU gets, where the scaler for CUDA is off."""
    text = WITHOUT_CUDA.format(dtype=dtype, enabled=enabled, type=device, region=region)
    assert lines(text, "HS123") == expected


NUMBERED = """\
import os
import torch
def train(config, model):
    device = config["device"]
    device_type = {type}
    with torch.autocast(device_type=device_type, dtype=torch.bfloat16):
        model(1)
def main(args):
    if "LOCAL_RANK" in os.environ:
        args["train"]["device"] = {device}
    train(args["train"], model)
"""
EITHER = "device if isinstance(device, str) else device.type"


@pytest.mark.parametrize(
    ("kind", "device", "expected"),
    [
        (EITHER, "torch.cuda.current_device()", [6]),
        ("device.type", 'int(os.environ["LOCAL_RANK"])', [6]),
        (EITHER, 'torch.device("cuda", torch.cuda.current_device())', []),
        (EITHER, "'cuda'", []),
        ("'cuda' if isinstance(device, int) else device.type", "torch.cuda.current_device()", []),
        ("torch.device(device).type", "torch.cuda.current_device()", []),
    ],
)
def test_the_number_of_a_gpu_has_no_type(kind, device, expected):
    """`device.type` raises AttributeError where a line of the file sets the device to a number."""
    assert lines(NUMBERED.format(type=kind, device=device), "HS142") == expected


IMPORTED = """\
import torch
from transformers import AutoModelForCausalLM
from config import DTYPE, USE_AMP
def main(device, loader):
    model = AutoModelForCausalLM.from_pretrained("gpt2", dtype={dtype}).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    use_fp16 = {enabled}
    scaler = torch.amp.GradScaler("cuda", enabled=use_fp16)
    for batch in loader:
        with torch.autocast("cuda", enabled=USE_AMP, dtype=DTYPE):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
ALL = "USE_AMP and DTYPE == torch.float16 and device.type == 'cuda'"


@pytest.mark.parametrize(
    ("dtype", "enabled", "expected"),
    [
        ("DTYPE", ALL, [5]),
        ("DTYPE if device.type == 'cuda' else None", ALL, [5]),
        ("DTYPE", "DTYPE == torch.float16", [5]),
        ("torch.float32", ALL, []),
        ("WEIGHTS", ALL, []),
    ],
)
def test_the_dtype_of_another_file_enables_the_scaler(dtype, enabled, expected):
    """Where the scaler is enabled because the dtype is float16, the weights with that dtype are float16."""
    assert lines(IMPORTED.format(dtype=dtype, enabled=enabled), "HS160") == expected
