"""Parts of tensors."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.checkpoint.boxes import Box, box_of, is_first_copy

SIDES = st.tuples(st.integers(0, 5), st.integers(0, 5))
BOXES = st.tuples(SIDES, SIDES).map(lambda sides: Box(tuple(s[0] for s in sides), tuple(s[1] for s in sides)))


def elements(box):
    """The indices of a box in a tensor of 10 by 10, as a set."""
    marked = torch.zeros(10, 10, dtype=torch.bool)
    marked[box.within(Box.whole((10, 10)))] = True
    return set(map(tuple, marked.nonzero().tolist()))


@given(BOXES, BOXES)
def test_the_overlap_has_the_common_elements(one, other):
    """And is None exactly if there are none; its indices in a box select the same elements."""
    overlap = one.overlap(other)
    common = elements(one) & elements(other)
    assert common == (set() if overlap is None else elements(overlap))
    if overlap is not None:
        numbers = torch.arange(100).view(10, 10)
        part = numbers[one.within(Box.whole((10, 10)))]
        assert part[overlap.within(one)].equal(numbers[overlap.within(Box.whole((10, 10)))])


def test_a_plain_tensor_is_whole_and_belongs_to_rank_0():
    """Of a tensor that every rank has, rank 0 writes all."""
    tensor = torch.ones(2, 3)
    assert box_of(tensor, "t") == Box((0, 0), (2, 3))
    assert box_of(torch.ones(()), "t").numel == 1
    assert [is_first_copy(tensor, rank) for rank in range(2)] == [True, False]
