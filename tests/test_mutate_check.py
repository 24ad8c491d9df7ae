"""The program that puts mistakes into right scripts."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
RIGHT = """\
import copy
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
ema = copy.deepcopy(model)
scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
if args.resume:
    checkpoint = torch.load(args.resume)
    optimizer.load_state_dict(checkpoint["optimizer"])
    scaler.load_state_dict(checkpoint["scaler"])


def evaluate(loader):
    with torch.no_grad():
        for x, y in loader:
            with torch.autocast("cuda"):
                correct(model(x), y)


for epoch in range(10):
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda"):
            loss = loss_fn(model(x), y) / accumulation_steps
        scaler.scale(loss).backward()
        if (i + 1) % accumulation_steps == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            for average, weight in zip(ema.parameters(), model.parameters()):
                average.data.lerp_(weight.data, 0.01)
    scheduler.step()
    evaluate(validation)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, "last.pt")
"""
PLAIN = """\
import torch

model = torch.nn.Linear(4, 4)
scaler = torch.amp.GradScaler("cuda")
def train(optimizer, scheduler, loader):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        print(loss.item())
"""
BFLOAT = """\
import torch

for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""
OWNED = """\
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=args.steps)
model = AutoModelForCausalLM.from_pretrained(args.name)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""
SCRIPTS = {"right": RIGHT, "plain": PLAIN, "bfloat": BFLOAT, "owned": OWNED}


@pytest.fixture
def program(monkeypatch):
    """The program of the benchmarks folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("mutate_check")
    sys.modules.pop("mutate_check", None)
    sys.modules.pop("check_mutations", None)


def test_each_mistake_is_put_in_and_found(program, tmp_path):
    """Four right scripts have a mutant of every kind, and the checker finds them all."""
    for name, text in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "broken.py").write_text("def f(:")
    table = program.score(sorted(tmp_path.glob("*.py")), program.KINDS, 10, None)
    assert {name: counts["mutants"] - counts["found"] for name, counts in table.items()} == dict.fromkeys(
        program.KINDS, 0
    )
    assert all(counts["mutants"] for counts in table.values())


def test_misses_are_written_and_scripts_without_the_means_are_left_out(program, tmp_path, monkeypatch):
    """A folder of changed scripts in which nothing was found, to read."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "train.py").write_text(RIGHT)
    (scripts / "other.py").write_text("print('nothing to change')\n")
    monkeypatch.setattr(program, "check_path", lambda _: [])
    lines = []
    assert (
        program.main([str(scripts), "--only", "missing-update", "--misses", str(tmp_path / "misses")], lines.append)
        == 0
    )
    assert lines[-1] == "| missing-update | HS101 | 0 of 1 (0.00) |"
    (miss,) = (tmp_path / "misses" / "missing-update").iterdir()
    assert "scaler.update()" not in miss.read_text()
