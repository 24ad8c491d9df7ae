"""The state of NumPy's global generator, read again only if the generator has moved.

`np.random.get_state()` copies the 624 words of a Mersenne Twister one by one: 100 us in a training loop on an Arm Neoverse-N1, two thirds
of what the record of a micro-batch costs, and few loops draw from this generator between two forwards. Its memory, 2,500 bytes at an
address that NumPy publishes for ctypes, is compared with the state that was read last: 10 us there.

The arrangement of that memory is not trusted. It is compared with what `get_state` has returned, so if NumPy stored it in another
way, the two would differ, and the state would be read every time.

`normal` draws two numbers and stores one, elsewhere: while one is stored the state is read every time. Not noticed is a `set_state`
that brings back such a stored number and changes nothing else.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

__all__ = ["NumpyState"]

_Memory = ctypes.c_char * (4 * 625)  # 624 words and the position


class NumpyState:
    """Reads the state of NumPy's global generator."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._view: Any = None  # of its memory; None if it is not the usual generator
        self._memory = b""  # as it was when the state was read
        self._state: Any = None

    def now(self) -> Any:
        """The state as it is, for `np.random.set_state`; the same object as before if it has not changed."""
        generator = np.random.get_bit_generator()
        if generator is not self._generator:  # the first call, or somebody has called set_bit_generator
            is_usual = type(generator) is np.random.MT19937
            self._view = _Memory.from_address(generator.ctypes.state_address) if is_usual else None
            self._generator, self._memory = generator, b""
        if self._view is None:
            return np.random.get_state()  # noqa: NPY002
        if self._view.raw != self._memory:
            self._state = np.random.get_state()  # noqa: NPY002
            _, words, position, has_stored, _ = self._state
            self._memory = b"" if has_stored else words.tobytes() + struct.pack("=I", position)
        return self._state
