import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from halfstep.cli import cli, main
from halfstep.cli import probe as probe_command
from halfstep.hardware.advisories import Environment
from halfstep.hardware.measure import Measured
from halfstep.hardware.probe import find_gpu, from_cpu
from halfstep.precision.choice import choose
from halfstep.report.probe import as_data, as_text

MEASURED = (Measured("fp32", 250.0, 0.05, 20, 1.0, 1024), Measured("bf16", 1234.5, 0.1, 40, 4.9, 1024))


def run(*args):
    """The command, in this process."""
    return CliRunner().invoke(cli, ["probe", *args])


@pytest.fixture
def arm(monkeypatch):
    """A machine that is an Arm CPU without 16-bit arithmetic, whatever runs the test."""
    monkeypatch.setattr(probe_command, "probe", lambda: from_cpu("aarch64", ["asimd"], "An Arm CPU"))


def test_a_named_gpu_is_shown_with_its_choice():
    """`--gpu T4` shows fp16, and why not the others."""
    result = run("--gpu", "T4")
    assert result.exit_code == 0
    assert "Use fp16" in result.output
    assert "is_bf16_supported()" in " ".join(result.output.split())
    for name in ("fp32", "tf32", "bf16", "fp8"):
        assert f"\n{name} " in result.output


@pytest.mark.usefixtures("arm")
def test_this_machine_is_shown():
    """Without options, it is this machine that is described."""
    result = run()
    assert result.exit_code == 0
    assert result.output.startswith("An Arm CPU (arm)")
    assert "Use fp32" in result.output
    assert "Measured" not in result.output


def test_json_has_everything_the_text_has():
    """`--json` prints one object that a program can read."""
    data = json.loads(run("--gpu", "MI250", "--json").output)
    assert data["choice"]["policy"] == "bf16"
    assert set(data["choice"]["rejected"]) == {"fp32", "tf32", "fp16", "fp8"}
    assert data["hardware"]["support"]["fp16"]["support"] == "native"
    assert any("subnormals" in note for note in data["hardware"]["notes"])
    assert data["measured"] == []


@pytest.mark.usefixtures("arm")
def test_measurements_are_shown_and_compared(monkeypatch):
    """`--measure` adds the speeds and whether they agree with the table."""
    monkeypatch.setattr(probe_command, "measure_matmuls", lambda: MEASURED)
    text = run("--measure").output
    assert "1,234" in text
    assert "they disagree" in text
    data = json.loads(run("--measure", "--json").output)
    assert [m["format"] for m in data["measured"]] == ["fp32", "bf16"]
    assert len(data["statements"]) == 1


def test_measuring_another_gpu_is_bad_usage():
    """`--gpu` with `--measure` is a usage error with the reason."""
    result = run("--gpu", "T4", "--measure")
    assert result.exit_code == 2
    assert "cannot be combined with --gpu T4" in result.output


def test_an_unknown_gpu_is_an_error_with_a_hint(capsys):
    """The message is one line with the nearest name, and the exit code is 1."""
    with pytest.raises(SystemExit) as caught:
        main(["probe", "--gpu", "T5"])
    assert caught.value.code == 1
    assert "Did you mean 'T4'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["T4", "MI250", "M2", "H100", "GTX 1660", "sm61"])
@pytest.mark.parametrize("width", [60, 100, 300])
def test_no_line_is_wider_than_the_page(name, width):
    """Text wraps at the terminal's width, and at 100 columns at most."""
    hardware = find_gpu(name)
    text = as_text(hardware, choose(hardware), MEASURED, ("a statement " * 20,), width=width)
    assert max(map(len, text.splitlines())) <= min(width, 100)
    assert text.isascii()


def test_colour_is_for_terminals_only():
    """Plain text has no escape codes; text for a terminal has."""
    hardware = find_gpu("T4")
    choice = choose(hardware)
    assert "\x1b" not in as_text(hardware, choice)
    assert "\x1b" in as_text(hardware, choice, colour=True)


def test_data_is_json():
    """The dictionary survives JSON unchanged."""
    hardware = find_gpu("A100")
    data = as_data(hardware, choose(hardware), MEASURED, ("a statement",))
    assert json.loads(json.dumps(data)) == data


def test_the_command_runs_as_a_program():
    """A real process probes this machine and exits with 0."""
    done = subprocess.run(
        [sys.executable, "-m", "halfstep", "probe", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["hardware"]["support"]["fp32"]["support"] == "native"
    assert data["choice"]["reasons"]


def test_known_defects_of_this_installation_are_listed(monkeypatch):
    """torch 2.11 with cuDNN 9.19 on an H200 has one, in the text and in the JSON; a named GPU has none."""
    monkeypatch.setattr(probe_command, "probe", lambda: find_gpu("H200"))
    environment = Environment({"torch": "2.11.0", "cudnn": "9.19.0"}, "sm90", "cuda")
    monkeypatch.setattr(probe_command, "this_environment", lambda _hardware: environment)
    assert "HSA-001" in run().output
    advisories = json.loads(run("--json").output)["advisories"]
    assert "https://github.com/pytorch/pytorch/issues/196678" in advisories[0]["threads"]
    assert "HSA-" not in run("--gpu", "H200").output
