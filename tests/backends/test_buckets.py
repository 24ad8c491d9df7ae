"""The layout of buckets and their divisors; messages are tested on ranks in test_ddp.py."""

import pytest
import torch
from torch import nn

from halfstep.backends.buckets import _lay_out, divisors


@pytest.mark.parametrize(("ranks", "before"), [(1, 1), (2, 2), (3, 2), (4, 2), (8, 4), (16, 4), (64, 8), (1024, 32)])
def test_divisors_of_fp16_share_the_number_of_ranks(ranks, before):
    """About its square root before the sum, the rest after it."""
    assert divisors(ranks) == (before, ranks / before)


def test_buckets_are_filled_from_the_last_parameter_and_the_first_is_small():
    """As backward reaches them; one parameter above the limit is a bucket by itself."""
    params = {str(i): nn.Parameter(torch.zeros(n)) for i, n in enumerate((10, 300, 20, 20, 5, 5))}
    buckets = _lay_out(params, torch.float32, 16, 200)
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [["5"], ["4", "3", "2", "1"], ["0"]]


def test_a_bucket_has_one_dtype_and_aligned_gradients():
    """Gradients of another dtype travel in another bucket, and each starts at a multiple of 16 bytes."""
    params = {str(i): nn.Parameter(torch.zeros(3, dtype=d)) for i, d in enumerate([torch.float32, torch.bfloat16] * 3)}
    buckets = _lay_out(params, torch.float32, 2**20, 2**20)
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [["5", "3", "1"], ["4", "2", "0"]]
    assert [[slot.offset for slot in bucket.slots] for bucket in buckets] == [[0, 8, 16], [0, 4, 8]]
    assert [bucket.message_bytes for bucket in buckets] == [(24 + 3) * 4, (12 + 3) * 4]


def test_doubles_keep_their_digits():
    """Whatever the policy's reduce format is."""
    (bucket,) = _lay_out({"0": nn.Parameter(torch.zeros(3, dtype=torch.float64))}, torch.bfloat16, 1, 1)
    assert bucket.wire_dtype is torch.float64
