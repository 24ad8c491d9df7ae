"""Runs `halfstep` commands one after another, each in a process forked from one interpreter: importing torch costs seconds.

The interpreter has only imported: a command finds it as it would find its own. Reads one command per line of stdin, as JSON with
`arguments`, `variables` and the files `out` and `errors`; prints the exit code of each, negative for a signal.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torch._dynamo  # noqa: F401 - torch's optimizers import it when the first one is made

import halfstep.cli
import halfstep.engine.engine
import halfstep.train  # noqa: F401


def become(command):
    """Run a command in this process, as `python -m halfstep` does."""
    os.environ |= command["variables"]
    sys.path[:0] = command["variables"]["PYTHONPATH"].split(os.pathsep)
    for number, name in ((1, "out"), (2, "errors")):
        with Path(command[name]).open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.argv = ["halfstep", *command["arguments"]]
    runpy.run_module("halfstep", run_name="__main__", alter_sys=True)


for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        become(json.loads(line))
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
