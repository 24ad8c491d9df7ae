"""Start a program on several gloo ranks of this machine and read what each printed."""

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

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


def run_ranks(program, *arguments, ranks=2, timeout=600, variables=None, options=(), code=0, imports=()):
    """What each rank of `python options program arguments` printed; every rank must end with `code`, negative for a signal.

    `imports` are modules that are imported once, for all ranks.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    environment = os.environ | address
    environment |= {"OMP_NUM_THREADS": "1"} | (variables or {})
    with contextlib.ExitStack() as stack:
        # Files and not pipes: a rank whose pipe is full would stop, and the others wait for it.
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in range(ranks)]
        descriptors = [[file.fileno() for file in pair] for pair in files]
        pairs = ",".join(f"{out}:{errors}" for out, errors in descriptors)
        command = [sys.executable, *options, FORK, ",".join(imports) or "-", pairs, program]
        process = subprocess.Popen(
            [*command, *map(str, arguments)],
            env=environment,
            pass_fds=list(itertools.chain(*descriptors)),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            codes, _ = process.communicate(timeout=timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):  # ranks that still wait for one that stopped
                os.killpg(process.pid, signal.SIGKILL)
        for file in itertools.chain(*files):
            file.seek(0)
        outputs = [(out.read(), errors.read()) for out, errors in files]
    texts = "\n".join(f"{text[-20000:]}\n{errors[-3000:]}" for text, errors in outputs)
    assert codes.split() == [str(code)] * ranks, f"{codes}\n{texts}"
    return [text for text, _ in outputs]


def cases_of_ranks(program, *arguments, **settings):
    """The JSON objects of each rank, one per line; other lines are torch's own."""
    texts = run_ranks(program, *arguments, **settings)
    return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in texts]
