"""What a command does when torch or a package of an extra is not installed."""

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from halfstep.cli import cli
from halfstep.errors import MissingError

ROOT = Path(__file__).parents[2]
EXTRAS = ("torch", "numpy", "safetensors", "plotly", "jinja2")
WRONG = """
import torch
from torch.amp import GradScaler, autocast
scaler = GradScaler("cuda")
for x in loader:
    with autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
"""
# A Python in which the packages of all extras are missing.
BASE_INSTALL = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from halfstep.cli import main
main()
"""


def run_base(*args, folder):
    """A command in a Python without the extras."""
    command = [sys.executable, "-c", BASE_INSTALL, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("check", "wrong.py"), 3, "HS104"),
        (("check", "wrong.py", "--format", "sarif"), 3, "HS104"),
        (("check", "config.yaml"), 0, "1 file checked"),
        (("explain",), 0, "loss-scaling"),
        (("explain", "HS104"), 0, "clip"),
        (("probe", "--gpu", "T4"), 0, "Use fp16"),
        (("probe",), 0, "Use "),
    ],
)
def test_the_base_install_is_enough(args, code, words, tmp_path):
    """check, explain and probe work without torch, numpy, safetensors, plotly and jinja2."""
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "config.yaml").write_text("mixed_precision: bf16\n")
    result = run_base(*args, folder=tmp_path)
    assert result.returncode == code, result.stderr
    assert words in result.stdout


@pytest.mark.parametrize("args", [("train",), ("compare",), ("plan",), ("export", "run"), ("probe", "--measure")])
def test_without_torch_there_is_one_message(args, tmp_path):
    """A command that needs torch prints the line that installs it, without a traceback, and exits with 1."""
    result = run_base(*args, folder=tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "needs torch, which is not installed" in line
    assert 'pip install "halfstep[torch]"' in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "packages"),
    [
        (("train",), ("numpy", "safetensors")),
        (("compare",), ("numpy", "safetensors", "jinja2", "plotly")),
        (("plan",), ("numpy",)),
        (("plan", "--html", "plan.html"), ("numpy", "jinja2")),
        (("export", "run"), ("numpy", "safetensors")),
    ],
)
def test_a_missing_package_is_named_with_its_extra(args, packages, tmp_path, monkeypatch):
    """With torch alone, a command names the missing package and the extra before it starts anything."""
    monkeypatch.chdir(tmp_path)
    for package in packages:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            result = CliRunner().invoke(cli, args)
        assert isinstance(result.exception, MissingError)
        expected = f'halfstep {args[0]} needs {package}, which is not installed. Run: pip install "halfstep[train]"'
        assert str(result.exception) == expected
    assert list(tmp_path.iterdir()) == []


def requirements(*names):
    """The distributions that some distributions need, themselves included."""
    pending, closure = list(names), {}
    while pending:
        distribution = importlib.metadata.distribution(pending.pop())
        name = distribution.metadata["Name"].lower()
        if name not in closure:
            closure[name] = distribution
            parsed = map(Requirement, distribution.requires or ())
            pending += [r.name for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return closure


def copy_distribution(distribution, site):
    """The files of an installed distribution, copied to another site-packages."""
    for file in distribution.files:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(distribution.locate_file(file), site / file)


@pytest.mark.slow
def test_the_wheel_installs_small_and_complete(tmp_path):
    """The wheel and its dependencies unpack to less than 25 MB without numpy and torch, include the templates, and check a script."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    build = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    build += ["--no-deps", "--no-build-isolation", "--target", str(site), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (installed,) = importlib.metadata.distributions(name="halfstep", path=[str(site)])
    base = [Requirement(line) for line in installed.requires]
    closure = requirements(*(r.name for r in base if r.marker is None))
    assert {"click", "pyyaml", "rich"} <= set(closure)
    assert not {"numpy", "torch", *EXTRAS} & set(closure)
    for distribution in closure.values():
        copy_distribution(distribution, site)
    # Bytecode is left out: whether an installer writes it, and how much, depends on the installer and on Python.
    files = [path for path in site.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) < 25e6
    templates = {path.name for path in (ROOT / "src/halfstep/report/templates").iterdir()}
    assert {path.name for path in (site / "halfstep/report/templates").iterdir()} == templates
    own = {str(file) for file in installed.files if "__pycache__" not in file.parts and ".." not in file.parts}
    source_files = {str(path.relative_to(source / "src")) for path in (source / "src/halfstep").rglob("*.py")}
    extra = {name for name in own - source_files if ".dist-info/" not in name}
    data = {"halfstep/py.typed", "halfstep/jobs/data/digits.csv.gz", "halfstep/jobs/data/DIGITS.md"}
    assert source_files <= own
    assert extra == data | {f"halfstep/report/templates/{name}" for name in templates}
    explain = [environment / "bin" / "python", "-I", "-m", "halfstep", "explain", "loss-scaling"]
    assert "Loss scaling" in subprocess.run(explain, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [environment / "bin" / "python", "-I", "-m", "halfstep", "check", "wrong.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 3, result.stderr
    assert "1 fixable with --fix" in result.stdout
