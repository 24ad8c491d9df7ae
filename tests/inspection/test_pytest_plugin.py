"""The pytest plugin, run by pytest in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
CASES = """
import sys

import pytest


def test_nothing_heavy_is_imported():
    assert "torch" not in sys.modules


def model(dtype):
    import torch

    return torch.nn.Linear(4, 2).to(dtype)


@pytest.mark.precision(master="fp32", loss="fp32", compute="fp32")
def test_passes(inspect_precision):
    import torch

    net = model(torch.float32)
    with inspect_precision(net):
        net(torch.ones(2, 4)).sum().backward()


@pytest.mark.precision(weights="fp32")
def test_fails_for_bf16(inspect_precision):
    import torch

    inspect_precision(model(torch.bfloat16))


@pytest.mark.precision(loss="fp32")
def test_fails_for_what_was_not_observed(inspect_precision):
    import torch

    inspect_precision(model(torch.float32))


@pytest.mark.precision(master="fp32")
def test_fails_without_an_inspection():
    pass


@pytest.mark.precision(mister="fp32")
def test_fails_for_an_unknown_key(inspect_precision):
    import torch

    inspect_precision(model(torch.float32))


@pytest.mark.precision(master="fp32")
def test_fails_for_its_own_reason():
    raise RuntimeError("its own reason")


def test_the_fixture_alone_asserts_nothing(inspect_precision):
    import torch

    assert inspect_precision(model(torch.bfloat16)).rows
"""


def outcomes_of(folder, *options):
    """Outcome by test, and the text, of pytest on these cases in a process of its own."""
    (folder / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-rA", "--strict-markers"]
    # An installed Halfstep has the plugin as an entry point; of a source tree it is named here.
    command += ["-p", "no:halfstep", "-p", "halfstep.inspection.pytest_plugin"]
    result = subprocess.run(
        [*command, *options], cwd=folder, env={"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}, text=True,
        capture_output=True, check=False, timeout=300,
    )  # fmt: skip
    lines = [line.split() for line in result.stdout.splitlines() if "%]" in line]
    return {line[0].partition("::")[2]: line[1] for line in lines}, result.stdout + result.stderr


def test_a_marked_test_that_inspects_nothing_fails_without_torch(tmp_path):
    """The marker is known, a test that inspects nothing fails with what to do, and nobody has imported torch."""
    outcomes, text = outcomes_of(tmp_path, "-k", "heavy or without_an_inspection")
    assert outcomes == {"test_nothing_heavy_is_imported": "PASSED", "test_fails_without_an_inspection": "FAILED"}, text
    assert "inspected nothing" in text


@pytest.mark.slow
def test_markers_are_asserted(tmp_path):
    """Marked tests pass, or fail with the difference; a test that fails by itself keeps its own reason."""
    outcomes, text = outcomes_of(tmp_path)
    wrong = {name for name, outcome in outcomes.items() if outcome != ("FAILED" if "fails" in name else "PASSED")}
    assert len(outcomes) == 8
    assert not wrong, text
    messages = (
        "weights  fp32      bf16",
        "loss  fp32      not observed",
        "inspected nothing",
        "Did you mean 'master'",
        "its own reason",
    )
    assert not [message for message in messages if message not in text]


def test_the_entry_point_names_the_plugin():
    """pytest finds the plugin of an installed Halfstep."""
    project = (SOURCE.parent / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\nhalfstep = "halfstep.inspection.pytest_plugin"' in project
