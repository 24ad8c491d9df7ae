"""The benchmark of the integrations: that every library's loop runs, is timed and is recorded, on a small model on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

for library in ("transformers", "accelerate", "lightning"):
    pytest.importorskip(library, reason=f"Requires: [{library}]")

PROGRAM = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_integrations.py"


@pytest.mark.slow
def test_every_library_is_timed_with_and_without_the_callback(tmp_path):
    """In a process of its own: the libraries keep settings, and the program lowers log levels."""
    out = tmp_path / "costs.json"
    command = [sys.executable, str(PROGRAM), "--tiny", "--rounds", "2", "--json", str(out)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = json.loads(out.read_text())
    assert [row["library"] for row in rows] == ["trainer", "accelerate", "lightning"]
    assert all(
        row["ms"] > 0 and row["ms watched"] > 0 and row["least"] <= row["cost"] <= row["largest"] for row in rows
    )
    assert all(f"| {row['library']}, fp16 |" in result.stdout for row in rows)
