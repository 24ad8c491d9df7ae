"""Forks the ranks of launches from one interpreter: importing torch costs seconds, and every rank needs it.

    python fork_ranks.py [MODULE ...]

The modules are imported as well. Reads one launch per line of stdin, as JSON with `environment`, `folder`, `files` (the paths of
stdout and stderr of each rank) and `arguments`, the program first. Prints for each launch its process group, then the exit code of
each rank, then `done`.
"""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch._dynamo  # torch's optimizers import it when the first one is made
import torch.distributed.fsdp  # noqa: F401

import halfstep.engine.engine
import halfstep.train  # noqa: F401


def import_first(names):
    """Import modules that every rank needs; what they print goes to stderr, as stdout is for the answers."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    for name in names:
        importlib.import_module(name)
    sys.stdout.flush()
    os.dup2(stdout, 1)
    os.close(stdout)


def redirect(path, mode, descriptor):
    """Open a file in the place of a descriptor."""
    with Path(path).open(mode) as file:
        os.dup2(file.fileno(), descriptor)


def fork_ranks(files):
    """Fork the ranks: their process ids, or in a rank None."""
    pids = []
    for rank, (out, errors) in enumerate(files):
        pid = os.fork()
        if pid == 0:
            os.environ["RANK"] = str(rank)
            redirect(os.devnull, "rb", 0)
            redirect(out, "wb", 1)
            redirect(errors, "wb", 2)
            return None
        pids.append(pid)
    return pids


def wait_for(pids):
    """The exit code of each process; once one has failed the others have a minute."""
    codes, deadline = {}, None
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
            continue
        if deadline is None and any(codes.values()):
            deadline = time.monotonic() + 60
        if deadline is not None and time.monotonic() > deadline:
            for running in set(pids) - set(codes):
                os.kill(running, signal.SIGKILL)
        time.sleep(0.05)
    return [codes[pid] for pid in pids]


def run_as_main(path):
    """Run a program in this module's place, as `python path` does."""
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    sys.path[0] = str(path.parent)
    main = vars(sys.modules["__main__"])
    kept = {name: value for name, value in main.items() if name.startswith("__")}
    main.clear()
    main.update(kept, __doc__=None, __file__=str(path))
    exec(code, main)


def launch(request):
    """Fork the ranks and print their exit codes, or in a rank run the program."""
    os.setsid()
    print(os.getpid(), flush=True)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    ranks = fork_ranks(request["files"])
    if ranks is None:
        run_as_main(Path(sys.argv[0]))
    else:
        print(*wait_for(ranks), flush=True)


import_first(sys.argv[1:])
for line in sys.stdin:
    process = os.fork()
    if process == 0:
        launch(json.loads(line))
        raise SystemExit  # a program has replaced the names of this module
    os.waitpid(process, 0)
    print("done", flush=True)
