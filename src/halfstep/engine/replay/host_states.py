"""The states of the global generators of Python and NumPy, read again only if a generator has moved.

Both are Mersenne Twisters of 624 words. `np.random.get_state()` copies them one by one, `random.getstate()` makes an int of each, which is
freed later: 100 us and 50 us in a training loop on an Arm Neoverse-N1, most of what the record of a micro-batch costs. Few loops
draw from either between two forwards. So the generator's memory, 2,500 bytes, is compared with the state that was read last,
10 us, and that one is used again where it still applies.

NumPy publishes the address for ctypes; in Python the words follow the header of the object. Neither arrangement is trusted: the memory
is compared with what `getstate` has returned, packed in that way. With another arrangement the two differ, and the state is read
every time.

`normal` of NumPy draws two numbers and stores one, elsewhere: while one is stored the state is read every time. Not noticed is a
`set_state` that brings back such a stored number and changes nothing else. Python's stored number is an attribute, and compared.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any

import numpy as np
from numpy.random.mtrand import get_bit_generator

__all__ = ["NumpyState", "PythonState"]

_NUM_BYTES = 4 * 625  # 624 words and the position
_Memory = ctypes.c_char * _NUM_BYTES
_UNKNOWN = b""  # which no memory is equal to


class PythonState:
    """Reads the state of the generator behind the functions of `random`."""

    def __init__(self) -> None:
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]  # it has no public name
        self._view: Any = None  # of its memory; None if that cannot be read
        header = object.__basicsize__
        if sys.implementation.name == "cpython" and type(self._generator).__basicsize__ >= header + _NUM_BYTES:
            self._view = _Memory.from_address(id(self._generator) + header)
        self._memory, self._stored = _UNKNOWN, None  # as they were when the state was read
        self._state: Any = None

    def now(self) -> Any:
        """The state as it is, for `random.setstate`; the same object as before if it has not changed."""
        if self._view is None:
            return random.getstate()
        if self._view.raw != self._memory or self._generator.gauss_next != self._stored:
            self._state = random.getstate()
            _, (*words, position), self._stored = self._state
            self._memory = struct.pack("=625I", position, *words)
        return self._state


class NumpyState:
    """Reads the state of NumPy's global generator."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._view: Any = None  # of its memory; None if it is not the usual generator
        self._memory = _UNKNOWN  # as it was when the state was read
        self._state: Any = None

    def now(self) -> Any:
        """The state as it is, for `np.random.set_state`; the same object as before if it has not changed."""
        generator = get_bit_generator()
        if generator is not self._generator:  # the first call, or somebody has called set_bit_generator
            is_usual = type(generator) is np.random.MT19937
            self._view = _Memory.from_address(generator.ctypes.state_address) if is_usual else None
            self._generator, self._memory = generator, _UNKNOWN
        if self._view is None:
            return np.random.get_state(legacy=False)  # noqa: NPY002
        if self._view.raw != self._memory:
            self._state = np.random.get_state()  # noqa: NPY002
            _, words, position, has_stored, _ = self._state
            self._memory = _UNKNOWN if has_stored else words.tobytes() + struct.pack("=I", position)
        return self._state
