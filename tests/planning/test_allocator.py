"""The model of torch's caching allocator."""

from hypothesis import given
from hypothesis import strategies as st

from halfstep.planning.allocator import Allocator, round_up

MIB = 1 << 20


def test_sizes_are_rounded_to_512():
    """A request is rounded up to a multiple of 512 bytes, at least 512."""
    assert [round_up(n) for n in (0, 1, 512, 513)] == [512, 512, 512, 1024]


def test_small_requests_share_a_segment_of_2_mib():
    """Two small tensors are allocated from one small segment."""
    allocator = Allocator()
    allocator.allocate(1000)
    allocator.allocate(MIB)
    assert (allocator.allocated, allocator.reserved) == (1024 + MIB, 2 * MIB)


def test_large_block_keeps_a_remainder_up_to_1_mib():
    """A tensor of 49.2 MiB uses a whole fresh segment of 50; a remainder above 1 MiB is split off."""
    allocator = Allocator()
    allocator.allocate(int(49.2 * MIB))
    assert allocator.allocated == allocator.reserved == 50 * MIB
    other = Allocator()
    other.allocate(int(48.8 * MIB))
    assert other.allocated == round_up(int(48.8 * MIB))
    assert other.reserved == 50 * MIB


def test_medium_requests_use_segments_of_20_mib():
    """Tensors between 1 and 10 MiB are split off a segment of 20 MiB."""
    allocator = Allocator()
    for _ in range(4):
        allocator.allocate(5 * MIB)
    assert (allocator.allocated, allocator.reserved) == (20 * MIB, 20 * MIB)


def test_freed_neighbours_merge():
    """Two freed neighbours serve one request of their joint size, without a new segment."""
    allocator = Allocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.free(blocks[1])
    allocator.free(blocks[2])
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 20 * MIB


@given(st.lists(st.tuples(st.integers(1, 40 * MIB), st.booleans()), max_size=30))
def test_freeing_everything_leaves_nothing_allocated(steps):
    """After any sequence of allocations and frees, allocated is the sum of live blocks and never more than reserved."""
    allocator, alive = Allocator(), []
    for size, drop in steps:
        alive.append(allocator.allocate(size))
        assert alive[-1].size >= size
        if drop and alive:
            allocator.free(alive.pop(len(alive) // 2))
        assert allocator.allocated == sum(block.size for block in alive) <= allocator.reserved
    for block in alive:
        allocator.free(block)
    assert allocator.allocated == 0
