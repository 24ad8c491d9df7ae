"""Forks the ranks of one launch from one interpreter: importing torch costs seconds, and every rank needs it.

    python fork_ranks.py MODULES DESCRIPTORS PROGRAM [ARGUMENT ...]

`MODULES` are imported as well, `A,B,...` or `-`. `DESCRIPTORS` are open files, `OUT:ERR,OUT:ERR,...`, two for each rank. Prints
the exit code of each rank.
"""

import importlib
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed.fsdp  # noqa: F401

import halfstep.engine  # noqa: F401


def import_first(names):
    """Import modules that every rank needs; what they print goes to stderr, as stdout is for the exit codes."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    for name in names:
        importlib.import_module(name)
    sys.stdout.flush()
    os.dup2(stdout, 1)
    os.close(stdout)


def fork_ranks(files):
    """Fork the ranks: their process ids, or in a rank None."""
    pids = []
    for rank, (out, errors) in enumerate(files):
        pid = os.fork()
        if pid == 0:
            os.environ["RANK"] = str(rank)
            os.dup2(out, 1)
            os.dup2(errors, 2)
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


_, modules, descriptors, *sys.argv = sys.argv
if modules != "-":
    import_first(modules.split(","))
ranks = fork_ranks([[int(number) for number in pair.split(":")] for pair in descriptors.split(",")])
if ranks is None:
    run_as_main(Path(sys.argv[0]))
else:
    print(*wait_for(ranks))
