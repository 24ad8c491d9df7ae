"""Flags and counts of skipped steps on the device."""

import torch

from halfstep.scaling.skip_counts import count_step, flag_of_all


def test_counts_are_those_of_a_plain_loop():
    """Steps, skips and skips in a row, for a flag of either dtype."""
    for dtype in (torch.bool, torch.int64):
        counts, expected = torch.zeros(3, dtype=torch.int64), [0, 0, 0]
        for skipped in (0, 1, 1, 0, 1, 0, 0, 1, 1, 1):
            count_step(counts, torch.tensor(skipped, dtype=dtype))
            expected = [expected[0] + 1, expected[1] + skipped, (expected[2] + 1) * skipped]
            assert counts.tolist() == expected


def test_the_flag_of_one_device_costs_no_operation():
    """It is returned as it is."""
    flag = torch.ones(1)
    assert flag_of_all([flag], torch.device("cpu")) is flag


def test_one_of_several_flags_is_enough():
    """Flags of several devices, of any shape."""
    zero, one = torch.zeros(()), torch.ones(1)
    assert flag_of_all([zero, one], torch.device("cpu")) != 0
    assert flag_of_all([zero, zero.reshape(1)], torch.device("cpu")) == 0
