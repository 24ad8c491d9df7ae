"""Ranks as threads of one process: a wire for the compressed optimizers that needs no process group, for quick tests.

Not with TRITON_INTERPRET=1: the interpreter of Triton replaces functions of a module while a kernel runs, which threads cannot share.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from halfstep.optim.onebit.wire import Pending, Wire


class Switch:
    """Where the threads meet."""

    def __init__(self, num_ranks):
        self.barrier = threading.Barrier(num_ranks, timeout=60)
        self.slots = [None] * num_ranks


class ThreadWire(Wire):
    """A Wire whose messages go through a Switch; bytes are counted by the base class."""

    def __init__(self, switch, rank):
        super().__init__()
        self.switch, self.rank, self.num_ranks = switch, rank, len(switch.slots)

    def _all(self, value):
        self.switch.slots[self.rank] = value
        self.switch.barrier.wait()
        values = list(self.switch.slots)
        self.switch.barrier.wait()
        return values

    def exchange(self, rows):
        self._count((self.num_ranks - 1) * rows.shape[1])
        return Pending(torch.stack([other[self.rank] for other in self._all(rows.clone())]))

    def gather(self, own):
        self._count((self.num_ranks - 1) * own.numel())
        return Pending(torch.stack(self._all(own.clone())))

    def _sum(self, tensor):
        tensor.copy_(sum(self._all(tensor.clone())))

    def _needs_device(self):
        return False


def on_threads(num_ranks, function):
    """What `function(wire)` returns on each of `num_ranks` threads, by rank."""
    switch = Switch(num_ranks)

    def run(rank):
        try:
            return function(ThreadWire(switch, rank))
        except BaseException:
            switch.barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(num_ranks)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    # Not that of a rank which only waited for the one that failed.
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
