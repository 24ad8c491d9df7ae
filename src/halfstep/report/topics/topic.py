"""What a topic of `halfstep explain` is."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Topic", "power"]


@dataclass(frozen=True)
class Topic:
    """One explanation: a title, a few paragraphs and further reading."""

    name: str
    title: str
    paragraphs: tuple[str, ...]
    see: tuple[str, ...]

    def __str__(self) -> str:
        return "\n\n".join([self.title, *self.paragraphs, "See also: " + "; ".join(self.see)])


def power(x: float) -> str:
    """A power of two as text, such as 2^-24."""
    return f"2^{round(math.log2(x))}"
