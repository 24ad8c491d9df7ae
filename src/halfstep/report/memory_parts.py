"""The parts of a memory peak: their order in tables and bars, and their colours on the HTML pages.

Colours are names of CSS variables in templates/style.css, so that light and dark pages each have theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["MEMORY_COLOURS", "OTHER_COLOUR", "in_order"]

# "optimizer" and "activations, rest" are what a comparison counts in a run without a prediction; they share the
# colours of the predicted parts that they stand for.
MEMORY_COLOURS = {
    "process": "p0", "weights": "p1", "master": "c5", "gradients": "p2", "optimizer": "p3", "states": "p3", "average": "c1",
    "activations, rest": "p5", "activations": "p5", "cast cache": "c8", "temporaries": "p4", "batch": "c6", "buffers": "c2",
    "workspaces": "c7", "transforms": "c4", "communication": "c3", "rounding": "p0", "not predicted": "c0",
}  # fmt: skip
OTHER_COLOUR = "c0"
_ORDER = list(MEMORY_COLOURS)


def in_order(names: Iterable[str]) -> list[str]:
    """Each name once, in the order of the table above; unknown names last."""
    return sorted(dict.fromkeys(names), key=lambda name: _ORDER.index(name) if name in MEMORY_COLOURS else len(_ORDER))
