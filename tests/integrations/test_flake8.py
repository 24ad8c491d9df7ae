"""The plugin of flake8, run by flake8 itself."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from halfstep.check.session import check_path
from halfstep.integrations.flake8 import Checker

ROOT = Path(__file__).resolve().parents[2]
MISTAKE = """\
import torch


def train(model, optimizer, loader, loss_fn):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
"""


def entry_point():
    """The entry point of pyproject.toml: its name and what it loads."""
    (item,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "flake8.extension"
    ].items()
    return item


def flake8(folder, *args, stdin=""):
    """Run flake8 in a folder, with the plugin registered by a local configuration where it is not installed."""
    installed = any(e.value == entry_point()[1] for e in importlib.metadata.entry_points(group="flake8.extension"))
    name, value = entry_point()
    local = "" if installed else f"[flake8:local-plugins]\nextension =\n    {name} = {value}\n"
    (folder / "tox.ini").write_text(f"[flake8]\nmax-line-length = 200\n{local}")
    command = [sys.executable, "-m", "flake8", *args]
    result = subprocess.run(command, cwd=folder, input=stdin, capture_output=True, text=True, check=False)
    assert not result.stderr, result.stderr
    return result.stdout.splitlines()


needs_flake8 = pytest.mark.skipif(importlib.util.find_spec("flake8") is None, reason="flake8 is not installed")


def test_the_entry_point_is_the_checker_under_a_prefix_that_flake8_accepts():
    """flake8 rejects plugins whose name is not a prefix of codes, and all codes of check begin with it."""
    from halfstep.check.registry import all_rules

    name, value = entry_point()
    assert re.fullmatch(r"[A-Z]{1,3}[0-9]{0,3}", name)
    assert value == f"{Checker.__module__}:{Checker.__name__}"
    assert all(rule.code.startswith(name) for rule in all_rules())


@needs_flake8
def test_flake8_reports_what_check_reports(tmp_path):
    """The same codes at the same places in a file; none on a line with `# noqa: HS101`; and standard input."""
    (tmp_path / "bad.py").write_text(MISTAKE)
    (tmp_path / "quiet.py").write_text(MISTAKE.replace("step(optimizer)", "step(optimizer)  # noqa: HS101"))
    (tmp_path / "good.py").write_text(
        MISTAKE.replace("optimizer.zero_grad()", "scaler.update()\n        optimizer.zero_grad()")
    )
    expected = [f"bad.py:{f.line}:{f.column}: {f.code}" for f in check_path(tmp_path / "bad.py")]
    assert [
        re.match(r"\S+ HS\d+", line).group() for line in flake8(tmp_path, "bad.py", "quiet.py", "good.py")
    ] == expected
    assert any("HS101" in line for line in expected)
    (line,) = flake8(tmp_path, "-", stdin=MISTAKE)
    assert line.startswith("stdin:10:9: HS101 ")


def findings(folder, text=MISTAKE, name="bad.py"):
    """What the plugin yields for a file."""
    import ast

    return list(Checker(ast.parse(text), text.splitlines(keepends=True), str(folder / name)).run())


def test_the_settings_and_the_baseline_of_the_project_apply(tmp_path):
    """As for the command."""
    assert [text[:5] for _, _, text, _ in findings(tmp_path)] == ["HS101"]
    assert [text[:5] for _, _, text, _ in findings(tmp_path, name="script-without-suffix")] == ["HS101"]
    for name, settings in (
        ("ignored", 'ignore = ["HS101"]'),
        ("excluded", 'exclude = ["bad.py"]'),
        ("known", 'baseline = "known.json"'),
    ):
        folder = tmp_path / name  # a process reads each pyproject.toml once
        folder.mkdir()
        (folder / "bad.py").write_text(MISTAKE)
        (folder / "pyproject.toml").write_text(f"[tool.halfstep.check]\n{settings}\n")
        if name == "known":
            assert "HS006 halfstep check cannot run: Cannot read the baseline" in findings(folder)[0][2]
            known = {"bad.py": {"HS101": {"scaler.step(optimizer)": 1}}}
            (folder / "known.json").write_text(json.dumps({"version": 1, "findings": known}))
        assert not findings(folder), name


def test_the_plugin_loads_no_torch():
    """flake8 starts in the time of its own imports."""
    program = "import halfstep.integrations.flake8, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
