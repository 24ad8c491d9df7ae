"""HS120: a scaler with the flag that chooses bfloat16, and a dtype in the options of a region."""

import pytest

from check_scripts import findings

FLAG = """\
import torch
from torch.amp import GradScaler
class Trainer:
    def __init__(self, model, optimizer, device, fp32=False):
        self.model, self.optimizer, self.device, self.fp32 = model, optimizer, device, fp32
        self.scaler = GradScaler("cuda", enabled={enabled})

    def step(self, x, y):
        {before}
        with torch.autocast(self.device.type, dtype={dtype}):
            loss = loss_fn(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
"""
STATEMENT = "if {test}:\n            dtype = torch.{yes}\n        else:\n            dtype = torch.{no}"


def flag(enabled="not fp32", dtype="dtype", before="pass"):
    return FLAG.format(enabled=enabled, dtype=dtype, before=before)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "torch.float32 if self.fp32 else torch.bfloat16"},
        {"dtype": "torch.bfloat16 if self.device.type == 'cuda' and not self.fp32 else torch.float32"},
        {"before": "dtype = torch.bfloat16 if not self.fp32 else torch.float32"},
        {"before": STATEMENT.format(test="self.fp32", yes="float32", no="bfloat16")},
        {"before": STATEMENT.format(test="not self.fp32", yes="bfloat16", no="float32")},
    ],
)
def test_the_flag_of_the_scaler_chooses_bfloat16(options):
    """Whichever way round, with a test of the device or not, inline, in a variable or as a statement."""
    assert [f.line for f in findings(flag(**options), "HS120")] == [6]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "torch.float32 if self.fp32 else torch.float16"},
        {"enabled": "device.type == 'cuda' and other", "dtype": "torch.float32 if self.fp32 else torch.bfloat16"},
        {"enabled": "other", "dtype": "torch.float32 if self.fp32 else torch.bfloat16"},
        {"enabled": "fp32", "dtype": "torch.float32 if self.fp32 else torch.bfloat16"},
        {"before": STATEMENT.format(test="self.fp32", yes="bfloat16", no="float32")},
    ],
)
def test_another_flag_may_be_for_another_format(options):
    """With float16, or a flag that is not the one of bfloat16, nothing is known."""
    assert findings(flag(**options), "HS120") == []


CHOSEN = """\
import torch
def choose(device, wanted):
    if device.type != "cuda":
        return None
    if wanted == "fp16":
        return torch.float16
    return {other}

def train(model, loader, optimizer, device, cfg, scaler=None):
    use_amp = cfg.amp and device.type == "cuda"
    dtype = choose(device, cfg.dtype) if use_amp else None
    if scaler is None:
        scaler = torch.amp.GradScaler("cuda", enabled={enabled})
    for x, y in loader:
        options = {options}
        {added}
        with torch.autocast(**options):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
OPTIONS = 'dict(device_type="cuda", enabled=use_amp)'
ADDED = "if dtype is not None:\n            options['dtype'] = dtype"


@pytest.mark.parametrize(
    ("options", "added"),
    [
        (OPTIONS, ADDED),
        ('{"device_type": "cuda", "enabled": use_amp}', ADDED),
        ("{}", ADDED + "\n        options['device_type'] = 'cuda'\n        options['enabled'] = use_amp"),
        ('dict(device_type="cuda", enabled=use_amp, dtype=dtype)', "pass"),
    ],
)
def test_a_dtype_among_the_options_of_a_region(options, added):
    """A function of the file chooses the dtype, which the options get where it is not None."""
    text = CHOSEN.format(other="torch.bfloat16", enabled="use_amp", options=options, added=added)
    assert [f.line for f in findings(text, "HS120")] == [13]


@pytest.mark.parametrize(
    ("other", "enabled", "added"),
    [
        ("torch.float16", "use_amp", ADDED),
        ("torch.bfloat16", "dtype == torch.float16", ADDED),
        ("torch.bfloat16", "use_amp", "if cfg.other:\n            options['dtype'] = dtype"),
        ("torch.bfloat16", "use_amp", ADDED + "\n        options['dtype'] = other"),
    ],
)
def test_options_that_another_condition_or_key_changes(other, enabled, added):
    """Without bfloat16, with the scaler for float16, or with an entry that may be absent or any, nothing is known."""
    text = CHOSEN.format(other=other, enabled=enabled, options=OPTIONS, added=added)
    assert findings(text, "HS120") == []


ASKED = """\
import argparse
import torch
TABLE = {{"bf16": torch.bfloat16, "fp16": torch.float16}}
class Trainer:
    OWN = {{"bf16": torch.bfloat16, "fp16": torch.float16}}
    def __init__(self, cfg, model, optimizer):
        self.cfg, self.model, self.optimizer = cfg, model, optimizer
        {before}
        self.scaler = torch.amp.GradScaler("cuda", enabled={enabled})

    def step(self, x, y):
        with torch.autocast("cuda", {region}):
            loss = loss_fn(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
"""
OPEN = {"enabled": "cfg.dtype == 'float16'", "region": "dtype=torch.bfloat16"}
LISTED = "parser = argparse.ArgumentParser(); parser.add_argument('--dtype', choices=[{}])"
SWITCHED = {"enabled": "cfg.amp.enabled", "region": "dtype=TABLE[self.cfg.amp.dtype]"}


def asked(**options):
    """The lines of HS120."""
    return [f.line for f in findings(ASKED.format(**{"before": "pass", **options}), "HS120")]


@pytest.mark.parametrize(
    "options",
    [
        OPEN,
        {**OPEN, "enabled": "use_amp and cfg['dtype'] == 'fp16'"},
        {**OPEN, "region": "dtype=torch.bfloat16, enabled=self.cfg.use_amp"},
        {**OPEN, "before": LISTED.format("'float16', 'bfloat16'")},
        {**OPEN, "before": "dtype = 'float16'", "enabled": "dtype == 'float16'"},
        SWITCHED,
        {**SWITCHED, "region": "dtype=self.OWN[self.cfg.amp.dtype]"},
        {**SWITCHED, "region": "dtype=Trainer.OWN.get(self.cfg.amp.dtype), enabled=self.cfg.amp.enabled"},
        {"enabled": "cfg['amp']['enabled']", "region": "dtype=TABLE[self.cfg['amp']['dtype']]"},
    ],
)
def test_a_scaler_that_a_setting_enables_beside_bfloat16(options):
    """The setting for the scaler asks for float16, or for mixed precision as a whole, and the region is or may be in bfloat16."""
    assert len(asked(**options)) == 1


@pytest.mark.parametrize(
    "options",
    [
        {**OPEN, "region": "dtype=TABLE[self.cfg.dtype]"},
        {**OPEN, "region": "dtype=torch.bfloat16, enabled=self.cfg.dtype == 'bfloat16'"},
        {**OPEN, "region": "dtype=torch.float16"},
        {**OPEN, "before": LISTED.format("'float32', 'bfloat16'")},
        {**OPEN, "before": "if cfg.dtype == 'float16': raise ValueError"},
        {**OPEN, "before": "dtype = 'bfloat16'", "enabled": "dtype == 'float16'"},
        {**OPEN, "enabled": "cfg.dtype != 'bfloat16' and cfg.other"},
        {**SWITCHED, "enabled": "cfg.amp.scaler"},
        {**SWITCHED, "enabled": "cfg.amp.enabled and cfg.amp.dtype == 'fp16'"},
    ],
)
def test_a_scaler_whose_setting_the_region_follows(options):
    """The region has the dtype that the scaler asks for, or the scaler has a switch of its own."""
    assert asked(**options) == []


PASSED = """\
import torch
def run_epoch(model, loader, optimizer, scaler, device, dtype):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type=device.type, dtype=dtype):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

def main(cfg, model, loader, optimizer):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.{low} if cfg["dtype"] == "{low}" else torch.float32
    scaler = torch.amp.GradScaler("cuda", enabled={enabled})
    run_epoch(model, loader, optimizer, scaler, device, dtype)
"""
ON_CUDA = "device.type == 'cuda'"


@pytest.mark.parametrize("enabled", [ON_CUDA, "torch.cuda.is_available()", "True"])
def test_a_scaler_on_cuda_whose_loops_get_bfloat16_or_float32(enabled):
    """A scaler of this file is used only with the dtypes that this file passes next to it, and none of them is float16."""
    assert [f.line for f in findings(PASSED.format(low="bfloat16", enabled=enabled), "HS120")] == [14]


@pytest.mark.parametrize("options", [{"low": "float16"}, {"enabled": "device.type == 'cuda' and cfg['scale']"}])
def test_a_scaler_on_cuda_that_may_be_for_float16(options):
    """With float16 among the dtypes, or a flag of its own, nothing is known."""
    text = PASSED.format(**{"low": "bfloat16", "enabled": ON_CUDA, **options})
    assert findings(text, "HS120") == []


@pytest.mark.parametrize(
    ("table", "is_reported"),
    [
        ("{'cuda': torch.float16, 'cpu': torch.bfloat16}[device.type]", False),
        ("{'cuda': torch.float16, 'mps': torch.float16}.get(device.type, torch.bfloat16)", False),
        ("{'cuda': torch.bfloat16, 'cpu': torch.bfloat16}[device.type]", True),
        ("{'cuda': torch.float16, 'bf16': torch.bfloat16}[args.precision]", True),
    ],
)
def test_a_table_by_devices_says_what_cuda_computes_in(table, is_reported):
    """bfloat16 for other devices needs no other scaler, as one for CUDA is off there."""
    text = FLAG.format(enabled="True", dtype="dtype", before=f"dtype = {table}").replace(
        "self.device.type", "device.type"
    )
    text = text.replace(
        "class Trainer", "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\nclass Trainer"
    )
    assert bool(findings(text, "HS120")) is is_reported
