"""Start a program on several gloo ranks of this machine and read what each printed."""

import json
import os
import socket
import subprocess
import sys


def run_ranks(program, *arguments, ranks=2, timeout=600, variables=None):
    """The JSON lines of each rank of `python program arguments`; every rank must end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environment |= variables or {}
    processes = [
        subprocess.Popen(
            [sys.executable, program, *map(str, arguments)],
            env=environment | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=timeout) for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(e[-3000:] for _, e in outputs)
    return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text, _ in outputs]
