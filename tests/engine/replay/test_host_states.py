"""States of Python's and NumPy's generators, read only if these have moved."""

import random

import numpy as np
import pytest

from halfstep.engine.replay.host_states import NumpyState, PythonState

# ruff: noqa: NPY002 - the global generator is the subject

PYTHON_MOVES = {
    "one number": random.random,
    "a full turn of the 624 words": lambda: [random.getrandbits(32) for _ in range(624)],
    "a normal number, which stores another": lambda: random.gauss(0, 1),
    "the stored normal number": lambda: (random.seed(1), random.gauss(0, 1), states()[0].now(), random.gauss(0, 1)),
    "a seed": lambda: random.seed(7),
    "an earlier state": lambda: random.setstate(random.Random(3).getstate()),
}
NUMPY_MOVES = {
    "one number": np.random.rand,
    "a full turn of the 624 words": lambda: np.random.bytes(4 * 624),
    "a normal number, which stores another": np.random.standard_normal,
    "the stored normal number": lambda: (np.random.standard_normal(), states()[1].now(), np.random.standard_normal()),
    "a seed": lambda: np.random.seed(7),
    "an earlier state": lambda: np.random.set_state(np.random.RandomState(3).get_state()),
}
READERS = []


def states():
    """The two readers of the test that runs."""
    return READERS


@pytest.fixture(autouse=True)
def _fresh_readers():
    before = random.getstate(), np.random.get_state()
    READERS[:] = [PythonState(), NumpyState()]
    random.seed(0)
    np.random.seed(0)
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("move", PYTHON_MOVES)
def test_a_python_generator_that_moved_is_read_again(move):
    """Whatever moved it, the state is the one that getstate() returns."""
    reader = READERS[0]
    reader.now()
    PYTHON_MOVES[move]()
    assert reader.now() == random.getstate()


@pytest.mark.parametrize("move", NUMPY_MOVES)
def test_a_numpy_generator_that_moved_is_read_again(move):
    """Whatever moved it, the state is the one that get_state() returns."""
    reader = READERS[1]
    reader.now()
    NUMPY_MOVES[move]()
    assert same(reader.now(), np.random.get_state())


def test_generators_that_did_not_move_are_not_read_again(monkeypatch):
    """Neither of the two functions that copy 624 words is called a second time."""
    first = [reader.now() for reader in READERS]
    monkeypatch.setattr(random, "getstate", None)
    monkeypatch.setattr(np.random, "get_state", None)
    assert all(reader.now() is state for reader, state in zip(READERS, first, strict=True))


def test_memory_in_another_arrangement_is_not_trusted():
    """If it is never what getstate() returned, the state is read every time."""
    for reader in READERS:
        reader.now()
        reader._view = type(reader._view)()
    random.random()
    np.random.rand()
    assert READERS[0].now() == random.getstate()
    assert same(READERS[1].now(), np.random.get_state())


def test_another_bit_generator_is_read_every_time():
    """After np.random.set_bit_generator the state is that of the new one, and of the old one when it is back."""
    old, reader = np.random.get_bit_generator(), READERS[1]
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
