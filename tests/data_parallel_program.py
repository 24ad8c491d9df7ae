"""One rank of `Engine(backend="ddp")` runs: every case prints what it measured as one line of JSON.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/data_parallel_program.py [slow | CASE ...]
"""

import sys

import data_parallel_laws  # noqa: F401 - registers its cases
import data_parallel_options  # noqa: F401
import data_parallel_state  # noqa: F401
import data_parallel_windows  # noqa: F401
from rank_cases import run_cases

if __name__ == "__main__":
    run_cases(sys.argv[1:])
