"""The examples run unchanged."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import halfstep
from rank_processes import run_ranks

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RIGHT = """
import torch
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
"""
WRONG = RIGHT.replace("    scaler.unscale_(opt)\n", "")
PAGES = (
    "README.md",
    "docs/converting.md",
    "docs/data.md",
    "docs/engine.md",
    "docs/inspect.md",
    "docs/policies.md",
    "docs/watch.md",
)  # whose Python snippets run too


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(path, tmp_path):
    """Each file under examples/ exits without an error, in an empty directory."""
    result = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize(
    "name", ["hf_trainer.py", "trl_sft.py", "lightning_trainer.py", "fabric_loop.py", "accelerate_loop.py"]
)
def test_an_integration_is_at_most_three_lines(name):
    """Every line of the code that names halfstep is marked, and there are at most three."""
    _, _, code = (ROOT / "examples" / name).read_text().split('"""', 2)
    lines = [line for line in code.splitlines() if re.search("halfstep|Halfstep", line)]
    assert 2 <= len(lines) <= 3
    assert all(line.endswith("# halfstep") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp.py", "fsdp2_optimizer.py", "onebit_adam.py", "onebit_engine.py"])
def test_an_example_for_several_ranks_runs_on_two(name):
    """Started by a launcher as its docstring shows; rank 0 alone prints."""
    outputs = run_ranks(ROOT / "examples" / name)
    assert "loss" in outputs[0]
    assert not outputs[1].strip()


@pytest.mark.slow
def test_the_pre_commit_configuration_stops_a_commit_with_a_mistake(tmp_path):
    """pre-commit accepts the file, and its hook passes a right script and rejects a wrong one."""
    config = (ROOT / "examples/pre-commit-config.yaml").read_text()
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "halfstep"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m halfstep "$@"\n')
    command.chmod(0o755)
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/.pre-commit-config.yaml").write_text(config)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PRE_COMMIT_HOME": str(tmp_path / "home"),
    }

    def run(*args):
        return subprocess.run(
            args, cwd=tmp_path / "repo", capture_output=True, text=True, check=False, env=environment, timeout=120
        )

    assert run("git", "init", "--quiet").returncode == 0
    script = tmp_path / "repo/train.py"
    for text, code, word in ((RIGHT, 0, "Passed"), (WRONG, 1, "HS104")):
        script.write_text(text)
        run("git", "add", ".")
        result = run(sys.executable, "-m", "pre_commit", "run", "--all-files")
        assert result.returncode == code, result.stdout + result.stderr
        assert word in result.stdout


def names_of_a_loop():
    """The names that snippets use without defining them: a tiny model and what trains it."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "halfstep": halfstep,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "loader": [(torch.randn(8, 4), torch.randint(2, (8,)))] * 4,
        "loss_fn": torch.nn.functional.cross_entropy,
    }


@pytest.mark.parametrize("page", PAGES)
def test_python_snippets_run(page, tmp_path, monkeypatch):
    """Each Python snippet of a page runs on a tiny model; `engine` is there for those that only use it."""
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert snippets
    for code in snippets:
        names = names_of_a_loop()
        if not re.search(r"^engine = ", code, re.MULTILINE):
            names["engine"] = halfstep.Engine(names["model"], names["optimizer"], "fp32")
        exec(compile(code, page, "exec"), names)  # the page's own text
        names["engine"].close()


def test_both_sides_of_a_conversion_run():
    """The loop before and after its conversion, as the diff of the page has them, both run."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs/converting.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = diff.splitlines()
    for side in "-+":
        code = "\n".join(line[1:] for line in lines if line[0] in f" {side}")
        exec(compile(code, f"docs/converting.md {side}", "exec"), {**names_of_a_loop(), "device": "cpu"})
