"""`halfstep check` at the command line."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from check_toys import use_toys
from halfstep.check.project import find_project
from halfstep.cli import cli, main
from work_counter import no_hang, num_lines

SCRIPT = "import torch\nBAD\nHMM\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Toy rules, and a current folder with one file."""
    use_toys(monkeypatch)
    find_project.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".xdg"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(SCRIPT)
    return tmp_path


def run(*args, **options):
    return CliRunner().invoke(cli, ["check", *args], **options)


def halfstep(*args, **options):
    command = [sys.executable, "-m", "halfstep", "check", *args]
    return subprocess.run(command, capture_output=True, check=False, **options)


def test_findings_are_exit_code_3_and_none_is_0(folder):
    """The contract with hooks and CI."""
    assert run("a.py").exit_code == 3
    assert run().exit_code == 3
    (folder / "a.py").write_text("x = 1\n")
    result = run()
    assert (result.exit_code, result.output) == (0, "1 file checked, no findings.\n")


@pytest.mark.parametrize(
    "args",
    [
        ("--format", "xml"),
        ("--fix", "--diff"),
        ("--diff", "--format", "json"),
        ("-", "a.py"),
        ("--stdin-filename", "a.py"),
        ("--unsafe-fixes",),
        ("--no-such-flag",),
    ],
)
def test_contradictions_are_usage_errors(folder, args):
    """Exit code 2, and what to leave out."""
    assert run(*args).exit_code == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("gone.py",), "no file or folder 'gone.py'"),
        (("--select", "HS555"), "--select: no rule is called 'HS555'"),
        (("--deepspeed", "new"), "not a version"),
        (("--transformers", "new"), "not a version of transformers"),
        (("--gpu", "H20O"), "Unknown GPU"),
    ],
)
def test_what_cannot_be_used_is_exit_code_1_and_one_message(folder, args, words, capsys):
    """On stderr, without a traceback."""
    with pytest.raises(SystemExit) as stop:
        main(["check", *args])
    assert stop.value.code == 1
    assert words in capsys.readouterr().err


def test_formats(folder):
    """Each format is what its readers expect."""
    assert "a.py:2:1: HS901 [error] BAD is here\n   2 | BAD\n     | ^^^\n   = instead: FINE" in run("a.py").output
    assert [f["code"] for f in json.loads(run("a.py", "--format", "json").output)] == ["HS901", "HS902"]
    assert json.loads(run("a.py", "--format", "sarif").output)["version"] == "2.1.0"
    assert run("a.py", "--format", "github").output.startswith("::error file=a.py,line=2")
    (folder / "a.py").write_text("x = 1\n")
    assert run("a.py", "--format", "json").output == "[]\n"
    assert run("a.py", "--format", "github").output == ""


def test_select_and_ignore_take_lists(folder):
    """With commas, or repeated."""
    codes = [f["code"] for f in json.loads(run("--format", "json", "--select", "HS902,hs904").output)]
    assert codes == ["HS902"]
    assert run("--ignore", "bad-word", "--ignore", "advice").exit_code == 0


def test_diff_shows_and_changes_nothing(folder):
    """The diff on stdout, the sum on stderr, exit code 3."""
    result = run("--diff")
    assert result.exit_code == 3
    assert "-BAD\n+FINE\n" in result.stdout
    assert "a.py: would fix 1 finding\n" in result.stderr
    assert (folder / "a.py").read_text() == SCRIPT


def test_fix_changes_the_file_and_reports_what_is_left(folder):
    """Exit code 3 while findings are left, then 0."""
    result = run("--fix")
    assert result.exit_code == 3
    assert "a.py: fixed 1 finding" in result.output
    assert (folder / "a.py").read_text() == SCRIPT.replace("BAD", "FINE")
    assert run("--fix", "--ignore", "HS902").exit_code == 0


def test_unsafe_fixes_need_their_flag(folder):
    """The summary counts them, `--fix` alone leaves them, and `--diff --unsafe-fixes` shows them."""
    (folder / "a.py").write_text("ODD\nBAD\n")
    assert "1 fixable with --fix (preview with --diff), 1 more with --unsafe-fixes." in run().output
    assert "+EVEN\n" in run("--diff", "--unsafe-fixes").stdout
    assert "EVEN" not in run("--diff").stdout
    assert "1 fixable with --fix --unsafe-fixes (review the changes with --diff)." in run("--fix").output
    assert (folder / "a.py").read_text() == "ODD\nFINE\n"


def test_a_project_may_allow_unsafe_fixes(folder):
    """`unsafe-fixes = true` is the default of its files, which the flag overrides."""
    (folder / "a.py").write_text("ODD\nFINE\n")
    (folder / "pyproject.toml").write_text("[tool.halfstep.check]\nunsafe-fixes = true\n")
    assert "EVEN" not in run("--diff", "--no-unsafe-fixes").stdout
    assert run("--fix").exit_code == 0
    assert (folder / "a.py").read_text() == "EVEN\nFINE\n"


def test_standard_input(folder):
    """Checked under its name; with --fix the fixed text is on stdout and the findings on stderr."""
    result = run("-", "--stdin-filename", "x/y.py", input="BAD\n")
    assert result.exit_code == 3
    assert result.output.startswith("x/y.py:1:1: HS901")
    result = run("-", "--fix", input="BAD\nHMM\n")
    assert result.stdout == "FINE\nHMM\n"
    assert "stdin.py:2:1: HS902" in result.stderr


def test_the_projects_settings_hold(folder):
    """And their mistakes are named."""
    (folder / "pyproject.toml").write_text("[tool.halfstep.check]\nignore = ['HS9']\n")
    assert run().exit_code == 0
    assert run("--select", "HS901").exit_code == 3


def test_a_name_that_is_not_text_is_shown_somehow(tmp_path):
    """A file name with bytes outside UTF-8 does not stop the report."""
    (tmp_path / os.fsdecode(b"\xff.py")).write_text("def f(:\n")
    for style in ("text", "json", "sarif", "github"):
        result = halfstep("--format", style, cwd=tmp_path)
        assert result.returncode == 3, result.stderr
        assert b"Traceback" not in result.stderr


def test_an_ascii_terminal_gets_ascii(tmp_path):
    """Source lines with accents do not break a report into a pipe."""
    (tmp_path / "a.py").write_text("x = '\u00e9' (\n", encoding="utf-8")
    result = halfstep("a.py", cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert result.returncode == 3
    assert b"\\xe9" in result.stdout


def test_a_closed_pipe_is_no_traceback(tmp_path):
    """`halfstep check | head -1` ends quietly."""
    for i in range(200):
        (tmp_path / f"{i}.py").write_text("def f(:\n")
    command = f"{sys.executable} -m halfstep check . | head -1"
    result = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, check=False)
    assert result.stdout.startswith(b"0.py:1:7: HS004")
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "from torch.amp import GradScaler\nscaler = GradScaler('cuda')\n"),
        ("ds.json", '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}'),
    ],
)
def test_a_small_file_loads_little(tmp_path, name, text):
    """A hook that is slow is switched off: checking one file loads no torch, numpy, rich, plotly or process pool."""
    (tmp_path / name).write_text(text)
    code = (
        "import json, sys\nbefore = set(sys.modules)\nfrom halfstep.cli import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n    print(json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "check", str(tmp_path / name)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode in {0, 3}, result.stderr
    modules = set(json.loads(result.stderr.splitlines()[-1]))
    heavy = {"torch", "numpy", "rich", "plotly", "yaml", "safetensors", "asyncio", "concurrent.futures.process"}
    assert not modules & heavy
    assert len(modules) < 400  # each family of rules is one; torch alone loads more than a thousand


def test_the_work_of_a_tree_grows_with_its_files(tmp_path):
    """Checking 40 files executes at most 8 times the lines of 5 files."""
    text = (Path(__file__).parents[1] / "engine_models.py").read_text()
    for count in (1, 5, 40):
        (tmp_path / str(count)).mkdir()
        for i in range(count):
            (tmp_path / str(count) / f"{i}.py").write_text(f"{text}\nfrom torch.amp import autocast\nx = {i}\n")

    def check(count):
        result = CliRunner().invoke(cli, ["check", str(tmp_path / str(count))])
        assert result.exit_code in {0, 3}, result.output

    check(1)  # what is loaded or cached on first use is not counted
    assert num_lines(check, 40) <= 8 * num_lines(check, 5)


def test_the_hook_is_one_that_pre_commit_takes():
    """It runs the command on scripts, notebooks and every file that may be a configuration."""
    (hook,) = yaml.safe_load((Path(__file__).parents[2] / ".pre-commit-hooks.yaml").read_text())
    assert {"id", "name", "entry", "language"} <= set(hook)
    assert hook["entry"] == "halfstep check --force-exclude"
    names = ("a/train.py", "n.ipynb", "c/ds_config.json", "zero3.jsonc", "recipes/8B.yaml", "train.toml")
    assert all(re.search(hook["files"], name) for name in names)
    assert not any(re.search(hook["files"], name) for name in ("README.md", "a.pyc", "data.jsonl", "train.sh"))


def test_the_hook_skips_files_by_their_content(tmp_path):
    """A commit with a manifest, a template and data of no interest passes; a configuration with a mistake does not."""
    (hook,) = yaml.safe_load((Path(__file__).parents[2] / ".pre-commit-hooks.yaml").read_text())
    files = {
        "package.json": '{"name": "x", ',
        "chart.yaml": "{{- if .Values.fp16 }}\na: [\n",
        "labels.json": '[{"precision": 0.5}]',
        "Cargo.toml": "[package]\n",
        "tsconfig.jsonc": "{ // options\n}",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    options = hook["entry"].split()[2:]
    assert halfstep(*options, "--no-cache", *files, cwd=tmp_path).returncode == 0
    text = '{"fp16": {"enabled": true}, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
    (tmp_path / "any name.jsonc").write_text(text)
    assert halfstep(*options, "--no-cache", *files, "any name.jsonc", cwd=tmp_path).returncode == 3


def test_an_interrupt_ends_it_with_130(tmp_path):
    """Workers and all, without a traceback."""
    for i in range(1500):
        (tmp_path / f"{i}.py").write_text("import torch\n" + "x = torch.float16 + 1\n" * 300)
    # A suite that runs in the background of a shell has the interrupt switched off, and its children inherit that.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{listen}; from halfstep.cli import main; main()"
    command = [sys.executable, "-c", program, "check", "--no-cache", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    with process, no_hang():
        while process.poll() is None and children.exists() and not children.read_text():
            time.sleep(0.02)
        # Python loses an interrupt that it raises inside a destructor, and people press more than once.
        while process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.05)
        stderr = process.stderr.read()
    assert process.returncode == 130
    assert b"Traceback" not in stderr
