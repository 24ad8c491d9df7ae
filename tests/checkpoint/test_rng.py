"""Random-number state of a checkpoint; that of several ranks is in tests/backends/test_ddp.py."""

import random

import numpy as np
import torch

from halfstep.checkpoint.rng import derive_rng, restore_rng, rng_state, seed_everything


def drawn():
    """The next number of every generator."""
    return float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002 - the global generator


def test_a_restored_state_draws_the_same_numbers():
    """From torch, Python and NumPy."""
    seed_everything(3)
    drawn()
    state = rng_state()
    expected = drawn()
    seed_everything(4)
    restore_rng(state)
    assert drawn() == expected


def test_derived_numbers_differ_by_rank_and_state_and_are_repeatable():
    """Every rank of every number of ranks has its own, from every generator."""
    draws = {}
    for seed in (0, 1):
        seed_everything(seed)
        state = rng_state()
        for place in ((0, 1), (0, 2), (1, 2), (1, 4)):
            derive_rng(state, *place)
            draws[seed, place] = drawn()
            derive_rng(state, *place)
            assert drawn() == draws[seed, place]
    for numbers in zip(*draws.values(), strict=True):
        assert len(set(numbers)) == 8
