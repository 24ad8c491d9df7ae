"""The program that puts mistakes into right scripts."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
RIGHT = """\
import torch

scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y) / accumulation_steps
    scaler.scale(loss).backward()
    if (i + 1) % accumulation_steps == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


@pytest.fixture
def program(monkeypatch):
    """The program of the benchmarks folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("mutate_check")
    sys.modules.pop("mutate_check", None)


def test_each_mistake_is_put_in_once_and_found(program, tmp_path):
    """One right script gives one mutant of every kind, and the checker finds them all."""
    (tmp_path / "train.py").write_text(RIGHT)
    (tmp_path / "broken.py").write_text("def f(:")
    table = program.score(sorted(tmp_path.glob("*.py")), program.KINDS, 10, None)
    assert {name: dict(counts) for name, counts in table.items()} == {
        name: {"mutants": 1, "found": 1} for name in program.KINDS
    }


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
