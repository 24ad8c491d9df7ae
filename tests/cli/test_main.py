"""The command as a person meets it: help, errors, exit codes, and what is loaded."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from halfstep.cli import _COMMANDS, cli, main

HALFSTEP = [sys.executable, "-m", "halfstep"]


def run(*args):
    return subprocess.run([*HALFSTEP, *args], capture_output=True, text=True, check=False)


def test_help_lists_every_command():
    """Each command has its line."""
    out = run("--help").stdout
    assert all(name in out for name in _COMMANDS)


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_command_has_help(name):
    """Each command loads and explains itself."""
    result = run(name, "--help")
    assert result.returncode == 0
    assert "Usage: halfstep " + name in result.stdout
    assert re.search(rf"^  halfstep {name}\b", result.stdout, re.MULTILINE), "no example"
    assert max(map(len, result.stdout.splitlines())) <= 80, "too wide for a terminal"


@pytest.mark.parametrize(
    ("shell", "words"), [("bash", "complete -o nosort"), ("zsh", "#compdef halfstep"), ("fish", "complete --no-files")]
)
def test_every_shell_has_a_completion_script(shell, words):
    """The script is printed where the help says, and completes a command by its beginning."""
    if shell == "bash" and shutil.which("bash") is None:
        pytest.skip("click asks bash for its version")
    variables = {**os.environ, "_HALFSTEP_COMPLETE": f"{shell}_source"}
    code = "from halfstep.cli import main\nmain([])"
    command = [sys.executable, "-c", code]
    script = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert words in script.stdout, script.stderr
    variables |= {"_HALFSTEP_COMPLETE": "bash_complete", "COMP_WORDS": "halfstep reh", "COMP_CWORD": "1"}
    completed = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert completed.stdout.split() == ["plain,rehearse"]


def test_a_closed_pipe_is_no_error():
    """`halfstep check --list-rules | head -1` ends without a traceback."""
    process = subprocess.Popen(
        [*HALFSTEP, "check", "--list-rules"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait()


def test_flags_are_few_and_listed():
    """The flags of every command are listed here, so that adding one is a decision."""
    flags = {
        name: sorted(o for p in cli.get_command(None, name).params for o in p.opts if o.startswith("-"))
        for name in _COMMANDS
    }
    assert flags == {
        "check": [
            "--baseline", "--cache-dir", "--deepspeed", "--diff", "--exit-zero", "--fix", "--force-exclude", "--format", "--gpu",
            "--ignore", "--json", "--list-rules", "--no-cache", "--preview", "--respect-gitignore", "--select", "--statistics",
            "--stdin-filename", "--transformers", "--unsafe-fixes", "--with", "--write-baseline",
        ],
        "compare": [
            "--backend", "--batch", "--data", "--epochs", "--examples", "--fail-if", "--force", "--from", "--json", "--out", "--peer", "--precision",
            "--price", "--ranks", "--repeats", "--resume", "--set", "--steps", "-p",
        ],
        "explain": ["--json"],
        "export": ["--best", "--dtype", "--ema", "--force", "--json", "--out"],
        "learn": ["--json"],
        "mcp": [],
        "plan": [
            "--accumulate", "--bandwidth", "--batch", "--data", "--ema", "--epochs", "--examples", "--find", "--gpu", "--gpus",
            "--html", "--json", "--memory", "--precision", "--price", "--rate", "--recompute", "--record", "--strategy",
            "--verify", "-p",
        ],
        "probe": ["--gpu", "--json", "--measure"],
        "rehearse": [
            "--batch", "--confirm", "--data", "--html", "--json", "--out", "--precision", "--set", "--steps", "-p",
        ],
        "train": [
            "--backend", "--batch", "--data", "--ds-config", "--epochs", "--json", "--logger", "--out", "--precision", "--recipe", "--resume",
            "--set", "--steps", "-p",
        ],
        "watch": ["--html", "--interval", "--json", "--once"],
    }  # fmt: skip


def test_torchrun_passes_every_flag_of_train_on():
    """torchrun rejects a flag of the program that is the beginning of several of its own, such as --log."""
    from torch.distributed.run import get_args_parser

    for flag in {o for p in cli.get_command(None, "train").params for o in p.opts if o.startswith("-")}:
        parsed = get_args_parser().parse_args(["-m", "halfstep", "train", flag, "x"])
        assert parsed.training_script_args == ["train", flag, "x"]


def test_unknown_command_is_a_usage_error_with_a_guess():
    """Exit code 2, and the nearest command."""
    result = run("prob")
    assert result.returncode == 2
    assert "Did you mean 'probe'?" in result.stderr


@pytest.mark.parametrize("args", [("explain", "nonsense"), ("probe", "--gpu", "H20O")])
def test_an_error_is_one_message_and_exit_code_1(args):
    """An error is one message on stderr, without a traceback."""
    result = run(*args)
    assert result.returncode == 1
    assert result.stderr.startswith("halfstep: Unknown")
    assert "Traceback" not in result.stderr


def test_version_is_the_packages():
    """--version prints the package version."""
    assert re.search(r"0\.\d+\.\d+", run("--version").stdout)


def test_main_turns_a_halfstep_error_into_an_exit_code(capsys):
    """main() turns a HalfstepError into a message and exit code 1."""
    with pytest.raises(SystemExit) as stop:
        main(["explain", "nonsense"])
    assert stop.value.code == 1
    assert "Unknown topic" in capsys.readouterr().err


def modules_after(code):
    """The modules that a program has loaded at its end, this package's and other people's, without Python's own."""
    code = (
        "import sys\nbefore = set(sys.modules)\ntry:\n"
        + "".join(f"    {line}\n" for line in code.splitlines())
        + "finally:\n    import json\n    print(json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    names = json.loads(result.stderr.splitlines()[-1])
    return {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}


def test_import_and_help_load_little():
    """`import halfstep` loads one file and no other package; the help page loads click and the commands' names."""
    assert modules_after("import halfstep") == {"halfstep"}
    modules = modules_after("from halfstep.cli import main\nmain(['--help'])")
    assert {name for name in modules if name.startswith("halfstep")} == {"halfstep", "halfstep.cli", "halfstep.errors"}
    assert {name.partition(".")[0] for name in modules} <= {"halfstep", "click", "colorama"}
    modules = modules_after("import halfstep.cli.probe, halfstep.cli.explain")
    assert not modules & {"torch", "rich", "numpy", "plotly", "yaml"}


def test_probe_loads_torch_and_little_else():
    """`halfstep probe` is run first, so it loads no training code and none of torch's compiler."""
    modules = modules_after("from halfstep.cli import main\nmain(['probe'])")
    assert not modules & {
        "plotly",
        "safetensors",
        "triton",
        "torch._inductor",
        "halfstep.engine",
        "halfstep.comparison",
    }
