"""Uneven data on several ranks: the same number of batches everywhere, each example counted once."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import SettingError
from halfstep.train.shares import Share, share_batches


class Exchange:
    """What ranks in threads of one process use in place of `Ranks`."""

    def __init__(self, num_ranks):
        self.num_ranks, self.slots, self.count = num_ranks, [None] * num_ranks, [0] * num_ranks
        self.barrier = threading.Barrier(num_ranks)

    def channel(self, rank):
        exchange = self

        class Channel:
            num_ranks = exchange.num_ranks

            def gather(self, value):
                exchange.count[rank] += 1
                return self._gather(value)

            def broadcast(self, value, source):
                return self._gather(value)[source]

            def _gather(self, value):
                exchange.slots[rank] = value
                exchange.barrier.wait(20)
                values = list(exchange.slots)
                exchange.barrier.wait(20)
                return values

        Channel.rank = rank
        return Channel()


def run(data, lengths=None, index=0):
    """The (batch, share) pairs of each rank over lists of batches, and the number of messages."""
    exchange, results = Exchange(len(data)), [None] * len(data)

    def work(rank):
        length = None if lengths is None else lengths[rank]
        try:
            batches = iter(data[rank])
            results[rank] = list(share_batches(batches, exchange.channel(rank), index=index, length=length, count=len))
        except Exception as error:
            exchange.barrier.abort()
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(data))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results, exchange.count[0]


batch_lists = st.lists(st.lists(st.integers(), min_size=0, max_size=3), max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(batch_lists, min_size=2, max_size=4), st.booleans())
def test_every_rank_has_the_same_number_of_batches_and_each_example_counts_once(data, sized):
    """Whatever the numbers: weights have mean 1 over ranks and are proportional to the examples, which are all there."""
    if sized:  # before the last batch of the shortest rank, batches are not looked at: give them examples
        data = [[batch or [0] for batch in rank] for rank in data]
    results, _ = run(data, [len(rank) for rank in data] if sized else None)
    assert len({len(each) for each in results}) == 1
    for rank, pairs in zip(data, results, strict=True):
        assert [batch for batch, share in pairs if share.num_examples] == [batch for batch in rank if batch]
        assert all(batch for batch, _ in pairs), "a batch without examples has no loss"
    quiet = min(map(len, data)) - 1 if sized else 0
    for number, step in enumerate(zip(*results, strict=True)):
        shares = [share for _, share in step]
        weights = [1.0 if share.weight is None else share.weight for share in shares]
        assert sum(weights) == pytest.approx(len(data))
        if number >= quiet:
            sizes = [share.num_examples for share in shares]
            assert {share.total for share in shares} == {sum(sizes)}
            assert weights == pytest.approx([size * len(data) / sum(sizes) for size in sizes])


def test_a_rank_without_examples_computes_its_last_batch_again():
    """It counts 0, and the others so much more."""
    results, _ = run([[[1, 2], [3]], [[4, 5]]], [2, 1])
    assert results[0][1] == ([3], Share(1, 1, 2.0))
    assert results[1] == [([4, 5], Share(2, 4)), ([4, 5], Share(0, 1, 0.0))]


def test_a_rank_that_never_had_a_batch_borrows_one():
    """After a resume at the last batch, or with less data than ranks."""
    results, _ = run([[[1, 2]], []])
    assert results == [[([1, 2], Share(2, 2, 2.0))], [([1, 2], Share(0, 2, 0.0))]]


def test_data_with_a_length_needs_three_messages_per_epoch():
    """The lengths, the last batch, and the end; nothing is exchanged in between."""
    data = [[[1]] * 9, [[2]] * 9]
    results, num_messages = run(data, [9, 9])
    assert all(share == Share(1, 2) for pairs in results for _, share in pairs)
    assert num_messages == 3
    assert run(data)[1] == 11
    assert run([rank[5:] for rank in data], [9, 9], index=5)[1] == 3


def test_a_wrong_length_is_an_error():
    """The other ranks would wait for batches that do not come."""
    (_, error), _ = run([[[1]] * 5, [[1]] * 2], [5, 5])
    assert isinstance(error, SettingError)
    assert "rank 1 ended after 2 batches, but its len() is 5" in str(error)
