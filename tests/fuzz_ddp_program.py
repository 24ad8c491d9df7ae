"""One rank of random runs on several ranks: `python fuzz_ddp_program.py FIRST_SEED NUM_SEEDS [wrapped | plain]` on each.

The model is in DistributedDataParallel, or with `plain` the Engine's backend "ddp" reduces its gradients.

The reference gets the gradients and weights of all ranks, so each rank is compared with one process over the union of the data,
and all ranks with each other, bit for bit.
"""

import contextlib
import os
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist

from fuzz_driver import Config, Driver, Mismatch
from fuzz_driver import replay as replay_alone
from fuzz_moves import program, random_ranks_run

__all__ = ["Config", "replay"]


def union(window):
    """The window of all ranks together: sums and weights added, bad if one is."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (window.sums, window.doubt, window.total, window.bad, window.has_weights))
    for name in window.sums:
        window.sums[name] = sum(part[0][name] for part in parts)
        window.doubt[name] = sum(part[1][name] for part in parts)
    window.total = sum(part[2] for part in parts)
    window.bad = any(part[3] for part in parts)
    window.has_weights = all(part[4] for part in parts)
    return window


class RankDriver(Driver):
    """A driver whose observations are also compared between ranks."""

    @contextlib.contextmanager
    def folder(self):
        """One temporary directory for all ranks: rank 0 writes."""
        with tempfile.TemporaryDirectory() as own:
            folders = [own]
            dist.broadcast_object_list(folders)
            yield folders[0]
            dist.barrier()

    def compare(self):
        super().compare()
        weights = torch.cat([p.detach().flatten() for p in self.params.values()])
        every = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(every, weights)
        if not all(torch.equal(weights, other) for other in every):
            raise Mismatch(f"the ranks drift apart, by {float((every[0] - every[1]).abs().max()):g}")


def replay(config, moves, *, wrapped=True):
    """Run the moves of every rank; each takes its own."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    wrap = torch.nn.parallel.DistributedDataParallel if wrapped else lambda model: model
    replay_alone(config, moves[dist.get_rank()], make=RankDriver, wrap=wrap, union=union)


def main(first, number, *, wrapped):
    """Run these seeds, and print the program of the first that fails."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for seed in range(first, first + number):
        config, moves = random_ranks_run(seed, wrapped=wrapped)
        try:
            replay(config, moves, wrapped=wrapped)
        except Exception:
            print(
                f"seed {seed}, rank {dist.get_rank()}:\n{program(config, moves, 'fuzz_ddp_program')}\n{traceback.format_exc()}"
            )
            sys.stdout.flush()
            os._exit(1)  # without waiting for the other ranks, which may be inside a collective
    print(f"rank {dist.get_rank()}: {number} runs", flush=True)
    dist.barrier()
    os._exit(0)  # gloo may abort while it is taken down, if the other rank's connections close first


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), wrapped=sys.argv[3:] != ["plain"])
