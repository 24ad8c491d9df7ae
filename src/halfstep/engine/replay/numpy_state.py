"""The state of NumPy's global generator, read again only if the generator has moved.

It is a Mersenne Twister of 624 words, which `np.random.get_state()` copies one by one: 71 us on an Arm Neoverse-N1, most of what the
record of a micro-batch costs. Few loops draw from it between two forwards. So the generator's memory, 2,500 bytes at an
address that NumPy publishes for ctypes, is compared with the state that was read last, 0.5 us, and that one is used again where
it still applies. The arrangement is not trusted: what is compared is `get_state`'s result packed in that way, and with another
arrangement the two differ, so that the state is read every time.

`normal` draws two numbers and stores one, elsewhere: while one is stored the state is read every time. Not noticed is a
`set_state` that brings back such a stored number and changes nothing else.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np
from numpy.random.mtrand import get_bit_generator

__all__ = ["NumpyState"]

_Memory = ctypes.c_char * (4 * 625)  # 624 words and the position
_UNKNOWN = b""  # which no memory is equal to


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
