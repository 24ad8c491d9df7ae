"""A folder with `python`, `halfstep` and `torchrun` whose processes are forked from one interpreter that has imported torch.

An interpreter imports torch and Halfstep in 6 to 10 seconds on a slow machine, and some tests start a dozen. What the programs
do, and how they end, is the same; so that this is not only believed, some tests of each kind start real interpreters.
"""

import atexit
import contextlib
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Modules that programs use, none of which is run by `python -m`.
IMPORTS = (
    "torch._dynamo",
    "torch.distributed.elastic.multiprocessing",
    "halfstep.cli",
    "halfstep.train",
    "halfstep.engine.engine",
)
# Read while Python or torch starts: a program with other values needs an interpreter of its own.
AT_START = ("OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHONWARNINGS", "TRITON_INTERPRET")
PYTHON = sys.executable


def start_server(folder, variables):
    """The process that forks; it is ready when this returns."""
    command = [PYTHON, HERE / "fork_server.py", folder / "socket", *IMPORTS]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, start_new_session=True
    )
    assert server.stdout.readline() == b"ready\n"
    return server


def end_server(server, folder):
    """It ends with its stdin."""
    server.stdin.close()
    server.wait()
    server.stdout.close()
    shutil.rmtree(folder)


@functools.cache
def programs():
    """The folder, made on first use; the server ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="fork-"))  # the path of a socket must be short
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    server = start_server(folder, variables)
    atexit.register(end_server, server, folder)
    python = folder / "python"
    values = json.dumps({name: variables.get(name) for name in AT_START})
    client = [PYTHON, "-IS", HERE / "fork_client.py", folder / "socket", PYTHON, python, values]
    modules = {"python": [], "halfstep": ["-m", "halfstep"], "torchrun": ["-m", "torch.distributed.run"]}
    for name, words in modules.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(map(str, [*client, *words]))} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


@contextlib.contextmanager
def forking():
    """Inside this block, programs that are started by `sys.executable` are forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(programs() / "python"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
