"""Worker processes: none is left for torch to wait for at the end of a program."""

import subprocess
import sys

import pytest
import torch

from halfstep.jobs.data.workers import stop_workers_at_exit

SCRIPT = """
import atexit, multiprocessing, sys
from torch.utils.data import DataLoader
from halfstep.jobs.data.workers import stop_workers_at_exit

# Registered before the workers exist, as those that torch registers are: runs after what is registered later.
atexit.register(lambda: print("workers at exit:", len(multiprocessing.active_children())))
loader = DataLoader(list(range(8)), num_workers=2, persistent_workers=True)
for epoch in range(2):
    batches = iter(loader)
    if sys.argv[1] == "stopped":
        stop_workers_at_exit(loader)
    for _ in batches:
        pass
print("workers:", len(multiprocessing.active_children()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "left"), [("stopped", 0), ("plain", 2)])
def test_workers_are_stopped_before_earlier_exit_functions_run(mode, left):
    """What torch has registered for its workers finds none of them; without the call it finds all."""
    result = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["workers: 2", f"workers at exit: {left}"]


def test_loaders_without_persistent_workers_are_left_alone():
    """Nothing is registered for a loader without processes, or for something else."""
    for loader in (torch.utils.data.DataLoader([1, 2]), [1, 2], None):
        stop_workers_at_exit(loader)
