"""What comparisons with numbers that a run has decided say about others of the same value."""

from __future__ import annotations

import math

from halfstep.check.simulation.values import Test

__all__ = ["Bounds"]

_EVERYTHING = (-math.inf, math.inf)
_OPPOSITE = {"<": ">=", ">=": "<", ">": "<=", "<=": ">"}


class Bounds:
    """The smallest and the largest number that each unknown value can be."""

    def __init__(self) -> None:
        self._bounds: dict[str, tuple[float, float]] = {}

    def learn(self, test: Test, *, holds: bool) -> None:
        """A comparison was decided."""
        if _is_number(test.other) and (holds or test.operator in _OPPOSITE):
            low, high = self._bounds.get(test.key, _EVERYTHING)
            least, most = _where(test.operator if holds else _OPPOSITE[test.operator], test.other)
            self._bounds[test.key] = (max(low, least), min(high, most))

    def implied(self, test: Test) -> bool | None:
        """Whether a comparison is true; None if it may be either."""
        if not _is_number(test.other) or test.key not in self._bounds:
            return None
        low, high = self._bounds[test.key]
        least, most = _where(test.operator, test.other)
        if least <= low and high <= most:
            return True
        return False if high < least or most < low else None

    def allows(self, key: str, number: float) -> bool:
        """Whether a value can be this number."""
        low, high = self._bounds.get(key, _EVERYTHING)
        return low <= number <= high


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _where(operator: str, number: float) -> tuple[float, float]:
    """The numbers for which a comparison is true."""
    if operator in {"==", "is"}:
        return (number, number)
    if operator.startswith("<"):
        return (-math.inf, number if operator == "<=" else math.nextafter(number, -math.inf))
    return (number if operator == ">=" else math.nextafter(number, math.inf), math.inf)
