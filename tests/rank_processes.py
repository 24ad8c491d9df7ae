"""Start a program on several gloo ranks of this machine and read what each printed."""

import atexit
import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

AT_IMPORT = {"PYTHONPATH", "TRITON_INTERPRET"}  # variables that are read before a program starts
FORK = Path(__file__).with_name("fork_ranks.py")
DEEPSPEED = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")  # with torch's compiler: ten seconds for a rank


def free_port():
    """A port that no program listens at, below those that the kernel gives to connections: one of them would take it.

    Between the choice and rank 0's `listen` another worker of the same test run may choose too, and code under test
    seeds `random` alike in all of them: so each worker has ports of its own, drawn from the system.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 10_000 + 1_000 * (worker % 20) + random.SystemRandom().randrange(1_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def start_server(options, imports, environment):
    """An interpreter that has imported torch and forks the processes of launches."""
    return subprocess.Popen(
        [sys.executable, *options, FORK, *imports],
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end_server(server):
    """It ends with its input."""
    server.stdin.close()
    server.wait()
    server.stdout.close()


@functools.cache
def common_server(options, imports, path):
    """The server of all launches with the same options, imports and PYTHONPATH."""
    server = start_server(options, imports, dict(os.environ))
    atexit.register(end_server, server)
    return server


def run_forked(server, arguments, environment, ranks, timeout):
    """The exit code, stdout and stderr of each process of a launch; after `timeout` seconds the processes are killed."""
    with tempfile.TemporaryDirectory() as scratch:
        # Files and not pipes: a rank whose pipe is full would stop, and the others wait for it.
        files = [[os.path.join(scratch, f"{name}-{rank}") for name in ("out", "errors")] for rank in range(ranks)]  # noqa: PTH118
        request = {"environment": environment, "folder": os.getcwd(), "files": files}  # noqa: PTH109
        server.stdin.write(json.dumps(request | {"arguments": [str(part) for part in arguments]}) + "\n")
        server.stdin.flush()
        group = int(server.stdout.readline())
        timer = threading.Timer(timeout, end_group, [group])
        timer.start()
        try:
            answers = list(iter(server.stdout.readline, "done\n"))
        finally:
            timer.cancel()
            end_group(group)  # ranks that still wait for one that stopped
        codes = [int(code) for code in answers[0].split()] if answers else [None] * ranks
        texts = [[Path(file).read_text(encoding="utf-8") for file in pair] for pair in files]
    return [(code, *pair) for code, pair in zip(codes, texts, strict=True)]


def end_group(group):
    """Kill what is left of a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run_ranks(program, *arguments, ranks=2, timeout=600, variables=None, options=(), code=0, imports=()):
    """What each rank of `python options program arguments` printed; every rank must end with `code`, negative for a signal.

    `imports` are modules that are imported once, for all ranks. With `variables` that are read on import, the launch has a server of its own.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    environment = os.environ | address | {"OMP_NUM_THREADS": "1"} | (variables or {})
    own = not AT_IMPORT.isdisjoint(variables or ())
    if own:
        server = start_server(options, imports, environment)
    else:
        server = common_server(tuple(options), tuple(imports), os.environ.get("PYTHONPATH"))
    try:
        results = run_forked(server, [program, *arguments], environment, ranks, timeout)
    finally:
        if own:
            end_server(server)
    texts = "\n".join(f"{text[-20000:]}\n{errors[-3000:]}" for _, text, errors in results)
    codes = [result[0] for result in results]
    assert codes == [code] * ranks, f"{codes} (None: not ended after {timeout} seconds)\n{texts}"
    return [text for _, text, _ in results]


def cases_of_ranks(program, *arguments, **settings):
    """The JSON objects of each rank, one per line; other lines are torch's own."""
    texts = run_ranks(program, *arguments, **settings)
    return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in texts]
