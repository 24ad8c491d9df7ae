"""A gate for CI: `halfstep compare --fail-if` exits with 3 if a precision learns worse than fp32, and fails the build.

In a workflow it is one line:

    halfstep compare job.py -p fp32 -p bf16 --steps 100 --fail-if "bf16.loss_gap > 0.05 or bf16.nonfinite > 0"

This script runs that line twice on examples/job.py, with a gate that passes and with one that cannot.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

JOB = Path(__file__).with_name("job.py")


def gate(expression, *more):
    """The exit code of a comparison with this gate, and its result."""
    command = [sys.executable, "-m", "halfstep", "compare", *more, "--fail-if", expression, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


with tempfile.TemporaryDirectory() as folder:
    run = (str(JOB), "-p", "fp32", "-p", "bf16", "--steps", "20", "--repeats", "1", "--batch", "64", "--out", folder)
    code, result = gate("bf16.loss_gap > 0.05 or bf16.nonfinite > 0", *run)
    print(f"exit {code}: {result['gates'][0]['seen']}")
    assert code == 0
    # The same runs, judged by another gate: nothing is trained again.
    code, result = gate("bf16.metric < 2", "--from", folder, "--force")
    print(f"exit {code}: {result['gates'][0]['seen']}")
    assert code == 3
