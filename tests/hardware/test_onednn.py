"""oneDNN's fallback warnings are filtered, and nothing else is."""

import subprocess
import sys
import warnings

import pytest

from halfstep.hardware.onednn import FALLBACK_WARNINGS, ignore_fallback_warnings

# Each multiplies in bf16 in one of the places where a user does.
IN_A_REGION = """
from halfstep.engine.region import compute_region
a = torch.randn(64, 64, requires_grad=True)  # oneDNN leaves smaller products to torch
with compute_region("cpu", "bf16"):
    loss = (a @ a).sum() + torch.bmm(a[None], a[None]).sum()
loss.backward()
"""
IN_A_PEER = """
from halfstep.jobs.builtin import digits_job
from halfstep.comparison.variant import parse_variants
from halfstep.comparison.loops import make_loop
from halfstep.comparison.training_loop import build_parts
from halfstep.backends.context import RunContext
run = RunContext(batch_size=2)
(row,) = parse_variants([], ["torch-amp"])
job = digits_job()
loop = make_loop(row, build_parts(job, run), 1.0)
with loop.forward():
    loss = job.call("loss", run, model=loop.model, batch=next(iter(job.call("data", run, split="train"))))
loop.backward(loss)
"""
OUTSIDE_A_REGION = """
from halfstep.engine.engine import Engine
model = torch.nn.Linear(64, 64)
engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-lean")
model(torch.randn(64, 64, dtype=torch.bfloat16))
"""
MEASURING = f"""
from halfstep.hardware import measure
def product():
    for text in {FALLBACK_WARNINGS}:
        warnings.warn(text, UserWarning)
measure._product = lambda *_: product
measure.measure_matmuls(size=64, seconds=0.01)
"""
# On a CPU with 16-bit arithmetic oneDNN raises nothing by itself, so its texts are raised by hand as well.
BY_HAND = "".join(f"warnings.warn({text + ', switching to BLAS gemm'!r}, UserWarning)\n" for text in FALLBACK_WARNINGS)


PLACES = {
    "region": IN_A_REGION + BY_HAND,
    "outside a region": OUTSIDE_A_REGION + BY_HAND,
    "torch-amp": IN_A_PEER + BY_HAND,
    "measure": MEASURING,
}
# Each in a process of its own, as a filter would hide the lack of another; they share the import of torch.
FORKS = """
import os, sys, warnings
import torch
for path in sys.argv[1:]:
    if os.fork() == 0:
        os.dup2(os.open(path + ".err", os.O_WRONLY | os.O_CREAT), 2)
        exec(compile(open(path).read(), path, "exec"))
        sys.exit()
    os.wait()
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What a program for each place prints to stderr."""
    folder = tmp_path_factory.mktemp("onednn")
    files = {name: folder / f"{number}.py" for number, name in enumerate(PLACES)}
    for name, path in files.items():
        path.write_text(PLACES[name] + "sys.stderr.write('passed\\n')\n")
    subprocess.run([sys.executable, "-W", "default::UserWarning", "-c", FORKS, *files.values()], check=True)
    return {name: path.with_suffix(".py.err").read_text() for name, path in files.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_a_16_bit_product_prints_nothing(printed, name):
    """A program that multiplies in bf16 prints no warning on any CPU."""
    lines = [line for line in printed[name].splitlines() if not line.startswith("halfstep:")]  # its own log
    assert lines == ["passed"]


def test_other_warnings_are_still_shown():
    """Only messages that begin with oneDNN's two texts are ignored, also where a filter was lost before."""
    for _ in range(2):
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            ignore_fallback_warnings()
            for text in (*FALLBACK_WARNINGS, "mkldnn is not available"):
                warnings.warn(text, UserWarning, stacklevel=1)
            warnings.warn(FALLBACK_WARNINGS[0], DeprecationWarning, stacklevel=1)
        assert [str(w.message) for w in shown] == ["mkldnn is not available", FALLBACK_WARNINGS[0]]
