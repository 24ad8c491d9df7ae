"""Runs with settings that another file passes: parameters annotated with a class of settings of the script."""

import pytest

from simulated_scripts import codes, every_code

CLASS = """\
from dataclasses import dataclass
import typing
import torch
from pydantic import BaseModel
from .types import DTYPES, str_to_dtype

{kind} {name}{base}:
    use_amp: bool = {switch}
    no_amp: bool = False
    amp_dtype: {format} = "{default}"
"""
TRAINER = """\
class Fitter:
    def __init__(self, model, optimizer, settings: {annotation}, device):
        self.model, self.optimizer, self.settings, self.device = model, optimizer, settings, device
        self.scaler = torch.amp.GradScaler("cuda", enabled={enabled})

    def fit(self, loader):
        for batch in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", enabled=self.settings.use_amp, dtype={dtype}):
                loss = self.model(batch)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
"""
DATACLASS = {"kind": "@dataclass\nclass", "name": "TrainParams", "base": ""}
MODEL = {"kind": "class", "name": "Settings", "base": "(BaseModel)"}


def script(cls, *, switch=False, default="fp16", fmt="str", enabled="settings.use_amp", dtype="DTYPES[self.settings.amp_dtype]", annotation="{name}"):  # fmt: skip
    """A trainer whose settings another file passes."""
    head = CLASS.format(**cls, switch=switch, default=default, format=fmt)
    return head + TRAINER.format(annotation=annotation.format(**cls), enabled=enabled, dtype=dtype)


@pytest.mark.parametrize(
    "made",
    [
        script(DATACLASS),
        script(DATACLASS, annotation="'{name}'"),
        script(DATACLASS, annotation="{name} | None"),
        script(DATACLASS, switch=True, dtype="str_to_dtype(self.settings.amp_dtype)"),
        script(MODEL, default="float16", dtype="getattr(torch, self.settings.amp_dtype)"),
        script(MODEL, default="bf16", switch=True),
        script(DATACLASS, default="float16", fmt="typing.Literal['float16', 'bfloat16']"),
    ],
)
def test_a_flag_for_both_formats_enables_the_scaler_in_bfloat16(made):
    """The scaler is enabled by a switch alone, and the format is a setting of its own."""
    assert "HS120" in codes(made)


@pytest.mark.parametrize(
    "made",
    [
        script(DATACLASS, enabled="settings.use_amp and settings.amp_dtype == 'fp16'"),
        script(
            MODEL,
            default="float16",
            enabled="settings.amp_dtype == 'float16'",
            dtype="getattr(torch, self.settings.amp_dtype)",
        ),
        script(DATACLASS, dtype="torch.float16"),
        script(DATACLASS, dtype="DTYPES[other]"),
        script({**DATACLASS, "name": "Batch"}),
    ],
)
def test_nothing_where_the_format_decides_or_is_not_known(made):
    """A scaler for float16 alone, a region in float16, a format of another file, and a class that is no settings."""
    assert "HS120" not in codes(made)


FUNCTION = """\
def epoch(net, batches, opt, gs, dev):
    for b in batches:
        opt.zero_grad()
        mixed = gs is not None and dev == "cuda"
        with torch.amp.autocast("cuda", enabled=mixed):
            loss = net(b)
        if mixed:
            gs.scale(loss).backward()
            gs.step(opt)
            gs.update()
        else:
            loss.backward()
            opt.step()

def run(o: TrainParams):
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    net = build(o).to(dev)
    opt = torch.optim.AdamW(net.parameters())
    gs = {scaler}
    epoch(net, batches, opt, gs, dev)
"""


@pytest.mark.parametrize(
    ("scaler", "expected"),
    [
        ('torch.amp.GradScaler("cuda", enabled=not o.no_amp and dev == "cuda")', ["HS123"]),
        ('None if o.no_amp or dev == "cpu" else torch.amp.GradScaler("cuda")', []),
    ],
)
def test_a_disabled_scaler_is_not_none(scaler, expected):
    """A region that is on where there is a scaler object is on also where that is disabled."""
    made = CLASS.format(**DATACLASS, switch=True, default="fp16", format="str") + FUNCTION.format(scaler=scaler)
    assert codes(made) == expected


def test_each_scaler_with_the_flag_is_reported():
    """The one for FSDP, and the other one."""
    made = script(DATACLASS)
    own = '        self.scaler = torch.amp.GradScaler("cuda", enabled=settings.use_amp)\n'
    sharded = "            self.scaler = ShardedGradScaler(enabled=settings.use_amp)\n"
    other = own.replace("        ", "            ", 1)
    head = "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n"
    both = f"        if settings.strategy == 'fsdp':\n{sharded}        else:\n{other}"
    assert every_code(head + made.replace(own, both)) == ["HS120", "HS120"]
