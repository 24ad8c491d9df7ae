"""The batches of several ranks: the same number on every rank, and how much each of them counts.

Gradients are reduced in every step, so a rank that runs out of data before the others would make them wait for ever. Here
the ranks exchange the number of examples of their batches, and the epoch ends when no rank has any. A rank without examples
computes its last batch again with weight 0, which changes nothing (a rank that never had one borrows another rank's). If
the numbers n_r differ, rank r gets the weight n_r * W / sum(n): the update is then that of one process with all the
examples in one batch, and their mean over ranks is 1, as is the weight of every other batch.

The messages go from host to host. Data with a length on every rank needs three in an epoch, for the lengths, the last batch
and the end: earlier batches count equally on every rank, as the micro-batches of one process do. Data without a length
needs one for each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from halfstep.backends.ranks import Ranks
from halfstep.errors import SettingError

__all__ = ["Share", "share_batches"]

_END = object()


@dataclass(frozen=True)
class Share:
    """What one batch of this rank counts."""

    num_examples: int  # of this rank; 0 if the batch stands in for one that this rank does not have
    total: int  # of all ranks
    weight: float | None = None  # for Engine.backward; None if all ranks have the same number of examples


def share_batches(
    batches: Iterator[Any], ranks: Ranks, *, index: int, length: int | None, count: Callable[[Any], int]
) -> Iterator[tuple[Any, Share]]:
    """The batches of this rank, each with its share, as many on every rank.

    `index` is the number of the first batch in its epoch, `length` the number of batches of the whole epoch on this rank,
    if it is known, and `count` returns the number of examples of a batch.
    """
    lengths = ranks.gather(-1 if length is None else length)
    # Up to here every rank has a batch and nothing is exchanged.
    quiet = min(lengths) - 1
    last: Any = _END
    while True:
        batch = next(batches, _END)
        if index < quiet:
            if batch is _END:
                raise SettingError(
                    f"The training data of rank {ranks.rank} ended after {index} batches, but its len() is {length}. On several ranks "
                    "len() must be right: the other ranks wait for this one. Correct it, or remove __len__."
                )
            size = count(batch)
            share = Share(size, size * ranks.num_ranks)
        else:
            size = 0 if batch is _END else count(batch)
            numbers = ranks.gather((batch is not _END, size, last is not _END))
            if not any(has_batch for has_batch, _, _ in numbers):
                return
            sizes = [each for _, each, _ in numbers]
            if not any(sizes):  # batches without examples, on every rank
                index += 1
                continue
            # A rank that has neither examples nor a batch to compute again borrows one.
            if any(not each and not has_last for _, each, has_last in numbers):
                lender = next(rank for rank, each in enumerate(sizes) if each)
                lent = ranks.broadcast(batch if ranks.rank == lender else None, lender)
                last = lent if last is _END else last
            total = sum(sizes)
            share = Share(size, total, None if len(set(sizes)) == 1 else size * ranks.num_ranks / total)
            if not size:
                batch = last
        if index >= quiet - 1:
            last = batch
        index += 1
        yield batch, share
