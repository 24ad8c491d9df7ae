"""The examples run unchanged."""

import importlib.util
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
    "docs/extending.md",
    "docs/inspect.md",
    "docs/numerics.md",
    "docs/policies.md",
    "docs/watch.md",
)  # whose Python snippets run too


def run_python(program, folder):
    """Run a program with what it starts; it must exit with 0."""
    done = subprocess.run([sys.executable, program], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(path, tmp_path):
    """Each file under examples/ exits without an error, in an empty directory."""
    run_python(path, tmp_path)


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


MIGRATIONS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/migrate.md").read_text(), re.DOTALL | re.MULTILINE)


LIBRARY_LOOP = """
import torch, lightning

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
loss_fn = torch.nn.functional.cross_entropy
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(list(zip(torch.randn(8, 4), torch.zeros(8).long())), 4)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        return loss_fn(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


module, before = Module(), model.weight.detach().clone()
"""


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled:UserWarning")  # as written, for a GPU
@pytest.mark.parametrize("code", [code for code in MIGRATIONS if re.search(r"halfstep\.(?!integrations)", code)])
def test_the_halfstep_side_of_a_migration_runs(code, tmp_path, monkeypatch):
    """Each snippet of docs/migrate.md that uses Halfstep alone runs, and a loop in it moves the weights."""
    monkeypatch.chdir(tmp_path)
    names = names_of_a_loop()
    before = names["model"].weight.detach().clone()
    exec(compile(code, "docs/migrate.md", "exec"), names)  # the page's own text
    if "for x, y" in code or "optimizer.step()" in code:
        assert not torch.equal(before, names["model"].weight.detach().float())
    if "engine" in names:
        names["engine"].close()


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("code", [code for code in MIGRATIONS if "halfstep.integrations" in code])
def test_the_halfstep_side_of_a_library_trains(code, tmp_path):
    """The loops of Accelerate and Lightning in docs/migrate.md move the weights; in a process of their own, as they set variables."""
    missing = [name for name in ("accelerate", "lightning") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"Requires: {missing}")
    script = tmp_path / "migrated.py"
    script.write_text(f"{LIBRARY_LOOP}\n{code}\nassert not torch.equal(before, next(model.parameters()).detach())\n")
    run_python(script, tmp_path)


def test_a_migration_has_both_sides():
    """Each table of docs/migrate.md has code without Halfstep on its left and with it on its right."""
    tables = re.findall(r'<table class="sides".*?</table>', (ROOT / "docs/migrate.md").read_text(), re.DOTALL)
    assert len(tables) >= 6
    for table in tables:
        left, right = re.findall(r"^```python\n(.*?)^```", table, re.DOTALL | re.MULTILINE)
        assert "halfstep" not in left.lower()
        assert "halfstep" in right


def test_both_sides_of_a_conversion_run():
    """The loop before and after its conversion, as the diff of the page has them, both run."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs/converting.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = diff.splitlines()
    for side in "-+":
        code = "\n".join(line[1:] for line in lines if line[0] in f" {side}")
        exec(compile(code, f"docs/converting.md {side}", "exec"), {**names_of_a_loop(), "device": "cpu"})
