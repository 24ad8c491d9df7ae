"""The command as a person meets it: help, errors, exit codes, and what is loaded."""

import json
import re
import resource
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


def test_flags_are_few_and_listed():
    """The flags of every command are listed here, so that adding one is a decision."""
    flags = {
        name: sorted(o for p in cli.get_command(None, name).params for o in p.opts if o.startswith("-"))
        for name in _COMMANDS
    }
    assert flags == {
        "check": ["--deepspeed", "--diff", "--fix", "--format", "--gpu", "--ignore", "--select", "--stdin-filename"],
        "compare": [
            "--batch", "--data", "--fail-if", "--force", "--from", "--json", "--out", "--peer", "--precision", "--repeats", "--resume",
            "--set", "--steps", "-p",
        ],
        "explain": ["--json"],
        "export": ["--best", "--dtype", "--ema", "--force", "--json", "--out"],
        "plan": [
            "--accumulate", "--batch", "--data", "--ema", "--find", "--gpu", "--gpus", "--html", "--json", "--memory",
            "--precision", "--verify", "-p",
        ],
        "probe": ["--gpu", "--json", "--measure"],
        "train": [
            "--batch", "--data", "--epochs", "--json", "--out", "--precision", "--resume", "--set", "--steps", "-p",
        ],
    }  # fmt: skip


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


def best_of(count, command):
    """The least processor time a command took, in seconds: unlike the clock, it does not count the neighbours' work."""
    times = []
    for _ in range(count):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_import_and_help_are_quick_and_load_no_torch():
    """import halfstep costs under 50 ms and the help page under 0.25 s; neither loads torch or rich."""
    nothing = best_of(5, [sys.executable, "-c", "pass"])
    assert best_of(5, [sys.executable, "-c", "import halfstep"]) - nothing < 0.05
    assert best_of(3, [*HALFSTEP, "--help"]) < 0.25
    code = (
        "import sys, json, halfstep, halfstep.cli, halfstep.cli.probe, halfstep.cli.explain;"
        "print(json.dumps([m for m in ('torch', 'rich', 'numpy', 'plotly', 'yaml') if m in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == []


def test_probe_is_quick_enough_to_run_first():
    """halfstep probe answers within 3 seconds, torch's own import included."""
    assert best_of(2, [*HALFSTEP, "probe"]) < 3
