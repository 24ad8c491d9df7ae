"""Runs with the settings that a script offers: their defaults, and one precision setting changed."""

import pytest

from halfstep.check import check_path
from simulated_scripts import codes

MODEL = """\
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.a(x)
"""
LOOP = """\
import argparse
import dataclasses
import enum
import os
import click
import torch
import tyro
{setup}
def train({param}):
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled={enabled})
    for x, y in loader:
        optimizer.zero_grad()
        with {region}:
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
{main}
"""
TABLE = "TABLE = {'fp16': torch.float16, 'bf16': torch.bfloat16}\n"
PARSER = """\
def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--dtype", choices=list(TABLE), default="{default}")
    p.add_argument("--scaling", action=argparse.BooleanOptionalAction, default={scaling})
    return p.parse_args()
"""
CONFIG = """\
@dataclasses.dataclass
class Config:
    dtype: str = "{default}"
    scaling: bool = {scaling}
    @property
    def torch_dtype(self):
        return TABLE[self.dtype]
"""
ENUM = """\
class Precision(enum.Enum):
    FP16 = "16-mixed"
    BF16 = "bf16-mixed"
    @property
    def is_scaled(self):
        return {scaled}
    def region(self):
        if self is Precision.FP16:
            return torch.autocast("cuda", dtype=torch.float16)
        return torch.autocast("cuda", dtype=torch.bfloat16)
p = argparse.ArgumentParser()
p.add_argument("--precision", type=Precision, choices=list(Precision), default=Precision.FP16)
args = p.parse_args()
"""


def parsed(default, scaling):
    """A script whose region and scaler have an option each."""
    setup = MODEL + TABLE + PARSER.format(default=default, scaling=scaling)
    return LOOP.format(setup=setup, param="args", enabled="args.scaling", region="torch.autocast('cuda', dtype=TABLE[args.dtype])", main="train(parse())")  # fmt: skip


def configured(default, scaling):
    """The same with a dataclass that a command line fills."""
    setup = MODEL + TABLE + CONFIG.format(default=default, scaling=scaling)
    return LOOP.format(setup=setup, param="cfg", enabled="cfg.scaling", region="torch.autocast('cuda', dtype=cfg.torch_dtype)", main="train(tyro.cli(Config))")  # fmt: skip


def from_environment(default, scaling):
    """The same with variables of the environment."""
    setup = (
        MODEL
        + TABLE
        + f"DTYPE = TABLE[os.environ.get('DTYPE', '{default}')]\nSCALING = os.environ.get('SCALING', '{int(scaling)}') == '1'\n"
    )
    return LOOP.format(setup=setup, param="", enabled="SCALING", region="torch.autocast('cuda', dtype=DTYPE)", main="train()")  # fmt: skip


def with_enum(scaled):
    """A script whose precision is an enum with methods."""
    setup = MODEL + ENUM.format(scaled=scaled)
    return LOOP.format(setup=setup, param="precision", enabled="precision.is_scaled", region="precision.region()", main="train(args.precision)")  # fmt: skip


@pytest.mark.parametrize("made", [parsed, configured, from_environment])
def test_the_defaults_are_one_run(made):
    """Float16 without a scaler, or bfloat16 with one, where nobody sets anything."""
    assert codes(made("fp16", scaling=False)) == ["HS123"]
    assert "HS120" in codes(made("bf16", scaling=True))


def test_a_run_changes_one_setting():
    """The defaults fit, and another choice does not."""
    script = parsed("fp16", scaling=True)
    assert "HS120" in codes(script)
    assert "HS120" not in codes(script.replace("enabled=args.scaling", 'enabled=args.dtype == "fp16"'))


@pytest.mark.parametrize(
    ("scaled", "expected"),
    [
        ("self.value.endswith('-mixed')", ["HS120"]),
        ("self in (Precision.FP16, Precision.BF16)", ["HS120"]),
        ("self is Precision.FP16", []),
        ("self.value.startswith('16')", []),
        ("self == Precision['FP16']", []),
    ],
)
def test_members_of_enums_have_properties_and_methods(scaled, expected):
    """The region and the flag of the scaler come from the member that the command line gives."""
    assert codes(with_enum(scaled)) == expected


@pytest.mark.parametrize(("enabled", "expected"), [("amp", ["HS120"]), ("amp and dtype == 'half'", [])])
def test_commands_have_the_values_of_their_options(enabled, expected):
    """Options of click are parameters."""
    setup = MODEL + "FORMATS = {'half': torch.float16, 'bfloat16': torch.bfloat16}\n"
    script = LOOP.format(setup=setup, param="dtype, amp", enabled=enabled, region="torch.autocast('cuda', dtype=FORMATS[dtype], enabled=amp)", main="train()")  # fmt: skip
    options = "@click.command()\n@click.option('--dtype', type=click.Choice(['half', 'bfloat16']), default='half')\n@click.option('--amp/--no-amp', default=True)\n"
    assert codes(script.replace("def train", options + "def train")) == expected


@pytest.mark.parametrize(
    ("half", "expected"),
    [("name in ('mixed', 'half')", ["HS123"]), ("name == 'mixed'", [])],
)
def test_a_class_may_open_the_region_in_its_enter(half, expected):
    """`with Precision(name):` enters what its `__enter__` enters."""
    script = f"""\
import argparse, torch
{MODEL}
class Precision:
    def __init__(self, name):
        self.scaler = torch.amp.GradScaler("cuda") if name == "mixed" else None
        self.context = torch.autocast("cuda", dtype=torch.float16, enabled={half})
    def __enter__(self):
        self.context.__enter__()
        return self
    def __exit__(self, *exc):
        return self.context.__exit__(*exc)
    def backward(self, loss, optimizer):
        if self.scaler is None:
            loss.backward()
            optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(optimizer)
            self.scaler.update()
p = argparse.ArgumentParser()
p.add_argument("--precision", choices=["full", "half", "mixed"], default="half")
precision = Precision(p.parse_args().precision)
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters())
for x in loader:
    optimizer.zero_grad()
    with precision:
        loss = model(x).mean()
    precision.backward(loss, optimizer)
"""
    assert codes(script) == expected


def test_a_phase_without_a_region_needs_no_scaler():
    """A loss that the script's own model computes outside every region is scaled for nothing."""
    phase = "    for x in loader:\n        optimizer.zero_grad()\n        {line}\n        scaler.scale(loss).backward()\n        scaler.step(optimizer)\n        scaler.update()\n"
    inside = "with torch.autocast('cuda', dtype=torch.float16):\n            loss = model(x).mean()"
    setup = "import torch\n" + MODEL + "def warm(model, optimizer, scaler):\n" + phase.format(line="loss = model(x).mean()") + "def fit(model, optimizer, scaler):\n" + phase.format(line=inside)  # fmt: skip
    run = "model = Net().cuda(){half}\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\nscaler = torch.amp.GradScaler('cuda')\nwarm(model, optimizer, scaler)\nfit(model, optimizer, scaler)\n"
    assert codes(setup + run.format(half="")) == ["HS134"]
    assert codes(setup + run.format(half=".half()")) == []


UNKNOWN_MEMBER = """\
import argparse
from enum import Enum
import torch
class Precision(Enum):
    HALF = "fp16"
    FULL = "fp32"
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="int8")
    args = parser.parse_args()
    precision = Precision(args.precision)
    scaler = torch.amp.GradScaler("cuda", enabled=precision is Precision.HALF)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=precision is Precision.HALF):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
main()
"""


def test_a_value_that_no_member_has_is_unknown(tmp_path):
    """An enum called with another value raises in a real run; a simulated one goes on, and the check does not fail."""
    path = tmp_path / "train.py"
    path.write_text(UNKNOWN_MEMBER)
    assert not check_path(path)
