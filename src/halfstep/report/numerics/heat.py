"""The heat map of exponents by tensor, for the page of a run and for that of a comparison; templates/macros.html.j2 draws it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from halfstep.precision.formats import Format
from halfstep.report.numerics.view import KINDS, TensorRow

__all__ = ["heat_maps"]

_ROWS = 120  # tensors in a heat map
_CELL = 14  # pixels
_NAME = 46  # characters of a name that are shown
_SCALED = ("gradient", "activation gradient", "weight gradient")  # what the loss scale multiplies
_CHARACTER = 6.4  # pixels of one at the font size of the map, generously


def heat_maps(rows: Sequence[TensorRow], fmt: Format, kinds: Sequence[str] = KINDS) -> list[dict[str, Any]]:
    """A heat map for each kind of tensor, with the limits of a format; the macro `heat_maps` draws them."""
    members = {kind: [row for row in rows if row.kind == kind and row.bins] for kind in kinds}
    return [_heat_map(kind, group, fmt) for kind, group in members.items() if group]


def _heat_map(kind: str, rows: list[TensorRow], fmt: Format) -> dict[str, Any]:
    """One line per tensor in the order of the model, one cell per exponent; darker where more elements are."""
    shown = rows[:_ROWS]
    exponents = [e for row in shown for e in row.bins]
    low, high = min(exponents), max(exponents)
    lines = []
    for row in shown:
        total = sum(row.bins.values())
        cells = [
            {
                "x": e - low,
                "opacity": f"{max(0.06, min(1.0, 3 * count / total)):.2f}",
                "title": f"2^{e}: {100 * count / total:.3g} %",
            }
            for e, count in sorted(row.bins.items())
            if count
        ]
        lines.append({"name": row.name, "short": _short(row.name), "cells": cells})
    flush, overflow = round(math.log2(fmt.smallest_subnormal)) - 1, math.frexp(fmt.max)[1]
    return {
        "kind": kind,
        "lines": lines,
        "ticks": [{"x": e - low, "label": f"2^{e}"} for e in range(low, high + 1) if e % 8 == 0],
        "num_columns": high - low + 1,
        "cell": _CELL,
        "gutter": 8 + math.ceil(_CHARACTER * max(len(line["short"]) for line in lines)),
        "left_out": len(rows) - len(shown),
        "limits": [limit - low for limit in (flush, overflow) if low < limit <= high],
        "caption": " ".join(
            _captions(kind, fmt, flush if low < flush else None, overflow if overflow <= high else None)
        ),
    }


def _captions(kind: str, fmt: Format, flush: int | None, overflow: int | None) -> Iterator[str]:
    unscaled = ", so without the loss scale they would be lost" if kind in _SCALED else ""
    if flush is not None:
        yield f"Left of the dashed line, below 2^{flush}, a cast to {fmt.name} gives 0{unscaled}."
    if overflow is not None:
        yield f"From the dashed line at 2^{overflow} on, it overflows."


def _short(name: str) -> str:
    """The end of a long name, which distinguishes tensors."""
    return name if len(name) <= _NAME else f"..{name[2 - _NAME :]}"
