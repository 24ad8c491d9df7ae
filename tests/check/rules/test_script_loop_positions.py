"""HS196 where the count of the iterations is in a bar, in a parameter or in a named argument, and in runs with another dtype."""

import pytest

from check_scripts import checked


def reported(text):
    """The lines of HS196."""
    return checked(text, "HS196")


RATE = """\
import torch
from itertools import count
from tqdm import tqdm
class Trainer:
    def fit(self, model, optimizer, loader, quiet):
        scaler = torch.amp.GradScaler("cuda")
        {source}
        {again}
        for {target} in {batches}:
            optimizer.param_groups[0]["lr"] = self.rate * min(1.0, n / self.warmup)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("source", "again", "target", "batches"),
    [
        ("bar = enumerate(loader)", "bar = tqdm(bar, total=len(loader))", "n, x", "bar"),
        ("bar = enumerate(loader)", "if not quiet: bar = tqdm(bar)", "(n, x)", "bar"),
        ("bar = enumerate(loader) if quiet else tqdm(enumerate(loader))", "pass", "n, x", "bar"),
        ("self.bar = tqdm(enumerate(loader))", "bar = self.bar", "n, x", "bar"),
        ("pass", "pass", "n, x", "zip(count(1), loader)"),
        ("pass", "pass", "n, x", "zip(range(100), loader)"),
        ("pass", "pass", "x, n", "zip(loader, range(100))"),
    ],
)
def test_a_bar_around_a_count(source, again, target, batches):
    """A variable that is assigned its own bar, a choice, an attribute and `zip` with a count all number the iterations."""
    parts = {"source": source, "again": again, "target": target, "batches": batches}
    assert reported(RATE.format(**parts)) == [10]


@pytest.mark.parametrize(
    ("target", "batches"),
    [("n, x", "zip(self.epochs, loader)"), ("n, x", "self.samples"), ("x, n", "enumerate(loader)")],
)
def test_values_of_the_data_are_no_count(target, batches):
    """What the data or another list has at that place does not number the iterations."""
    assert reported(RATE.format(source="pass", again="pass", target=target, batches=batches)) == []


def test_the_bar_of_a_method_that_is_not_read():
    """A pair whose first name is that of a number, `step, x in self.bar`, is a count although its source is unknown."""
    text = RATE.format(source="pass", again="pass", target="step, x", batches="self.bar")
    assert reported(text.replace("n / self.warmup", "step / self.warmup")) == [10]


ADVANCED = """\
import torch
class Trainer:
    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.scaler = torch.amp.GradScaler("cuda")
    def epoch(self, number, loader):
        for n, x in enumerate(loader):
            self.one(x, n, number)
    def one(self, x, n, number):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        done = n + number * 100
        self.scheduler.step({passed})
"""


@pytest.mark.parametrize(
    ("passed", "expected"),
    [
        ("n", [16]),
        ("done", [16]),
        ("n + (number - 1) * self.length", [16]),
        ("epoch=n, metric=loss.item()", [16]),
        ("epoch=done, metrics=loss", [16]),
        ("number", []),
        ("number + n / self.length", []),
        ("metrics=loss", []),
        ("loss, number", []),
        ("epoch=number, metric=loss", []),
    ],
)
def test_a_schedule_that_receives_the_count(passed, expected):
    """The count reaches the schedule through parameters, sums and named arguments; an epoch and a metric are no count."""
    assert reported(ADVANCED.format(passed=passed)) == expected


CHOSEN = """\
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="bfloat16", choices={choices})
args = parser.parse_args()
dtype = {{"bfloat16": torch.bfloat16, "float16": torch.float16}}[args.dtype]
scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "float16")
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=1000)
for x in loader:
    with torch.autocast("cuda", dtype=dtype):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    schedule.step()
"""


def test_a_dtype_that_is_chosen():
    """A default of bfloat16 does not keep a run with float16 from skipping steps."""
    assert reported(CHOSEN.format(choices=["bfloat16", "float16"])) == [15]


CONFIGURED = """\
import torch
dtype = "bfloat16"
{configurator}
kinds = {{"bfloat16": torch.bfloat16, "float16": torch.float16}}
scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
number = 0
while number < 1000:
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1.0, number / 100)
    with torch.autocast("cuda", dtype=kinds[dtype]):
        loss = model(next(batches))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    number += 1
"""


def test_a_dtype_that_a_configurator_replaces():
    """nanoGPT's `exec` sets every global variable; without it the dtype is the one that is written."""
    assert reported(CONFIGURED.format(configurator="exec(open('configurator.py').read())")) == [9]
    assert reported(CONFIGURED.format(configurator="")) == []
