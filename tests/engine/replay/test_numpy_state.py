"""The state of NumPy's global generator, read only if it has moved."""

import numpy as np
import pytest

from halfstep.engine.replay.numpy_state import NumpyState

# ruff: noqa: NPY002 - the global generator is the subject

MOVES = {
    "one number": lambda _: np.random.rand(),
    "a full turn of the 624 words": lambda _: np.random.bytes(4 * 624),
    "a normal number, which stores another": lambda _: np.random.standard_normal(),
    "the stored normal number": lambda reader: (np.random.standard_normal(), reader.now(), np.random.standard_normal()),
    "a seed": lambda _: np.random.seed(7),
    "an earlier state": lambda _: np.random.set_state(np.random.RandomState(3).get_state()),
}


@pytest.fixture(autouse=True)
def _seeded():
    before = np.random.get_state()
    np.random.seed(0)
    yield
    np.random.set_state(before)


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("move", MOVES)
def test_a_generator_that_moved_is_read_again(move):
    """Whatever moved it, the state is the one that get_state() returns."""
    reader = NumpyState()
    reader.now()
    MOVES[move](reader)
    assert same(reader.now(), np.random.get_state())


def test_a_generator_that_did_not_move_is_not_read_again(monkeypatch):
    """The function that copies 624 words is not called a second time."""
    reader = NumpyState()
    first = reader.now()
    monkeypatch.setattr(np.random, "get_state", None)
    assert reader.now() is first


def test_memory_in_another_arrangement_is_not_trusted():
    """If it is never what get_state() returned, the state is read every time."""
    reader = NumpyState()
    reader.now()
    reader._view = type(reader._view)()
    np.random.rand()
    assert same(reader.now(), np.random.get_state())


def test_another_bit_generator_is_read_every_time():
    """After np.random.set_bit_generator the state is that of the new one, and of the old one when it is back."""
    old, reader = np.random.get_bit_generator(), NumpyState()
    reader.now()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        state = reader.now()
        first = np.random.rand()
        np.random.set_state(state)
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(old)
    assert same(reader.now(), np.random.get_state())
