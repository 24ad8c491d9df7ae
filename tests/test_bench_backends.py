"""The benchmark of the backends, on tiny models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "bench_backends.py"


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_every_backend_is_measured_next_to_the_single_one(tmp_path):
    """One process of one rank: all rows train, and each has its ratio to the first."""
    pytest.importorskip("transformers")
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(PROGRAM), "--tiny", "--model", "gpt2_medium", "--rounds", "2", "--json", str(out)]
    subprocess.run(command, check=True, timeout=600)
    record = json.loads(out.read_text())
    names = [row["name"] for row in record["rows"]]
    assert names == ["single", "ddp", "ddp, reducing", "fsdp"]
    assert all(rate > 0 for row in record["rows"] for rate in row["rates"])
    assert [ratio["row"] for ratio in record["ratios"]] == names[1:]
