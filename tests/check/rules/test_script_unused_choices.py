"""HS139 and HS136: precision settings that are chosen and not used, and options that ask for bfloat16 among others."""

import pytest

from check_scripts import codes, findings

LOOP = """\
import torch
{setup}
for x, y in loader:
    optimizer.zero_grad()
    with {region}:
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""
CHOICE = 'ptdtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]'
CLASS = """\
import torch
class Policy:
    def __init__(self, model, dtype=None):
        self.dtype = dtype or (torch.bfloat16 if newer() else torch.float16)
        self.model = model.to({used})
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, x):
        loss = self.model(x).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
"""
BRANCH = """\
import torch
def epoch(model, optimizer, scaler):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16{region}):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

def main(amp=True):
    scaler = torch.amp.GradScaler("cuda") if amp else None
    if amp and scaler:
        epoch(model, optimizer, scaler)
    else:
        epoch(model, optimizer, torch.amp.GradScaler("cuda"{enabled}))
"""


def test_a_dtype_that_nothing_reads():
    """The dtype is chosen, and the region does not use it."""
    text = LOOP.format(setup=CHOICE, region="nullcontext()")
    assert [f.line for f in findings(text, "HS139")] == [2]
    assert findings(text.replace("nullcontext()", 'torch.autocast("cuda", dtype=ptdtype)'), "HS139") == []
    assert findings(text.replace("[dtype]", "['bf16']").replace("nullcontext()", "context(ptdtype)"), "HS139") == []


def test_the_parameter_is_used_in_place_of_what_was_chosen():
    """`self.dtype` has the default, and the model is cast to the parameter, which may be None."""
    assert [f.line for f in findings(CLASS.format(used="dtype"), "HS139")] == [4]
    assert findings(CLASS.format(used="self.dtype"), "HS139") == []
    assert findings(CLASS.format(used="device"), "HS139") == []  # another file may read the attribute


@pytest.mark.parametrize(
    ("statement", "lines"),
    [
        ('precision = "16-mixed"', [3]),
        ('precision = "bf16-mixed" if cfg.dtype == "bfloat16" else "16-mixed"', [3]),
        ("precision = precision or default()", []),
        ("if precision is None:\n        precision = default()", []),
        ("print(precision)\n    precision = default()", []),
    ],
)
def test_a_parameter_that_is_overwritten_before_it_is_read(statement, lines):
    """What a caller passes has no effect."""
    text = f"from lightning import Fabric\ndef setup(cfg, precision=None):\n    {statement}\n    return Fabric(precision=precision)\n"
    assert [f.line for f in findings(text, "HS139")] == lines


def test_a_scaler_in_the_branch_without_mixed_precision():
    """Without the flag a new scaler is passed and autocast is on: nothing is switched off."""
    assert [f.line for f in findings(BRANCH.format(region="", enabled=""), "HS139")] == [16]
    assert findings(BRANCH.format(region="", enabled=", enabled=False"), "HS139") == []
    assert findings(BRANCH.format(region=", enabled=amp", enabled=""), "HS139") == []


def test_an_option_of_a_script_whose_namespace_deepspeed_gets():
    """DeepSpeed reads its own options of the namespace: `--amp` stays unread."""
    text = (
        "import argparse\nimport deepspeed\nimport torch\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--amp', action='store_true')\nparser = deepspeed.add_config_arguments(parser)\n"
        "args = parser.parse_args()\nengine, *_ = deepspeed.initialize(args=args, model=model)\nfor x, y in loader:\n"
        "    loss = loss_fn(engine(x), y)\n    engine.backward(loss)\n    engine.step()\n"
    )
    assert [f.line for f in findings(text, "HS139")] == [5]
    assert findings(text.replace("deepspeed.initialize(args=args", "build(args, x"), "HS139") == []


@pytest.mark.parametrize(
    ("setup", "enabled", "is_reported"),
    [
        ("", "args.bf16 or args.fp16", True),
        ("", "args.fp16 or args.bf16", True),
        ("", "args.amp and args.bf16", True),
        ("use = cfg.precision == 'fp16' or cfg.precision == 'bf16'", "use", True),
        ("", "args.fp16 or args.half", False),
    ],
)
def test_an_option_for_either_format_runs_float16(setup, enabled, is_reported):
    """A region without a dtype computes in float16 for each of the options that enable it."""
    text = LOOP.format(setup=setup, region=f"torch.autocast('cuda', enabled={enabled})")
    assert ("HS136" in {code.partition(":")[0] for code in codes(text)}) is is_reported


def test_the_other_branch_of_the_bf16_option_is_right():
    """`elif args.bf16 or args.fp16` after `if args.bf16` is for float16."""
    text = LOOP.format(setup="", region="torch.autocast('cuda', enabled=args.bf16 or args.fp16)")
    inside = text.replace("    with", "    if args.bf16: continue\n    with")
    assert findings(inside, "HS136") == []


SCALED = """\
import torch
dtype = args.dtype
{chosen}
scaler = torch.amp.GradScaler('cuda', enabled={enabled})
for x in loader:
    with torch.autocast('cuda'{dtype}):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("chosen", "enabled", "dtype", "lines"),
    [
        ("if dtype == 'bfloat16': print(dtype)", "dtype == 'float16'", "", [6]),
        ("dtype = 'bf16' if supports_bfloat16() else 'float16'", "(dtype == 'float16')", "", [6]),
        ("if dtype == 'bfloat16': print(dtype)", "dtype == 'float16'", ", dtype=getattr(torch, dtype)", []),
        ("if dtype == 'float32': print(dtype)", "dtype == 'float16'", "", []),
        ("if dtype == 'bfloat16': print(dtype)", "args.amp", "", []),
    ],
)
def test_a_scaler_for_float16_alone_shows_that_the_region_needs_a_dtype(chosen, enabled, dtype, lines):
    """With `dtype == 'bfloat16'` the scaler is off, but a region without a dtype still computes in float16."""
    text = SCALED.format(chosen=chosen, enabled=enabled, dtype=dtype)
    assert [f.line for f in findings(text, "HS136")] == lines
