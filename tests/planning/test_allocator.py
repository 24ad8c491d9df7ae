"""The model of torch's caching allocator."""

from hypothesis import given
from hypothesis import strategies as st

from halfstep.planning.allocator import Allocator, round_up

MIB = 1 << 20


def test_sizes_are_rounded_to_512():
    """A request takes the next multiple of 512 bytes, and one byte takes 512."""
    assert [round_up(n) for n in (0, 1, 512, 513)] == [512, 512, 512, 1024]


def test_small_requests_share_a_segment_of_2_mib():
    """Two small tensors come out of one small segment."""
    allocator = Allocator()
    allocator.take(1000)
    allocator.take(MIB)
    assert (allocator.allocated, allocator.reserved) == (1024 + MIB, 2 * MIB)


def test_large_block_keeps_a_remainder_up_to_1_mib():
    """A tensor of 49.2 MiB in a fresh segment of 50 takes all of it; a remainder above 1 MiB is cut off."""
    allocator = Allocator()
    allocator.take(int(49.2 * MIB))
    assert allocator.allocated == allocator.reserved == 50 * MIB
    other = Allocator()
    other.take(int(48.8 * MIB))
    assert other.allocated == round_up(int(48.8 * MIB))
    assert other.reserved == 50 * MIB


def test_medium_requests_take_segments_of_20_mib():
    """Between 1 and 10 MiB, tensors are cut from 20 MiB."""
    allocator = Allocator()
    for _ in range(4):
        allocator.take(5 * MIB)
    assert (allocator.allocated, allocator.reserved) == (20 * MIB, 20 * MIB)


def test_freed_neighbours_join():
    """Two freed neighbours make room for one request of their size, without a new segment."""
    allocator = Allocator()
    blocks = [allocator.take(5 * MIB) for _ in range(4)]
    allocator.give(blocks[1])
    allocator.give(blocks[2])
    allocator.take(9 * MIB)
    assert allocator.reserved == 20 * MIB


@given(st.lists(st.tuples(st.integers(1, 40 * MIB), st.booleans()), max_size=30))
def test_everything_given_back_leaves_nothing_allocated(steps):
    """After any sequence of takes and gives, allocated is the sum of living blocks and never more than reserved."""
    allocator, alive = Allocator(), []
    for size, drop in steps:
        alive.append(allocator.take(size))
        assert alive[-1].size >= size
        if drop and alive:
            allocator.give(alive.pop(len(alive) // 2))
        assert allocator.allocated == sum(block.size for block in alive) <= allocator.reserved
    for block in alive:
        allocator.give(block)
    assert allocator.allocated == 0
