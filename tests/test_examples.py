"""The examples run unchanged."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(path, tmp_path):
    """Each file under examples/ exits without an error, in an empty directory."""
    result = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr[-2000:]
