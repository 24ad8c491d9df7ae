"""The heat map of exponents by tensor, for the page of a run and for that of a comparison; templates/macros.html.j2 draws it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfstep.report.numerics.view import KINDS, TensorRow

__all__ = ["heat_maps"]

_ROWS = 120  # tensors in a heat map
_CELL = 14  # pixels
_NAME = 46  # characters that fit next to the map


def heat_maps(rows: Sequence[TensorRow]) -> list[dict[str, Any]]:
    """A heat map for each kind of tensor; the macro `heat_maps` draws them."""
    kinds = {kind: [row for row in rows if row.kind == kind and row.bins] for kind in KINDS}
    return [_heat_map(kind, members) for kind, members in kinds.items() if members]


def _heat_map(kind: str, rows: list[TensorRow]) -> dict[str, Any]:
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
                "title": f"2^{e}: {100 * count / total:.2g} %",
            }
            for e, count in sorted(row.bins.items())
            if count
        ]
        lines.append({"name": row.name, "short": _short(row.name), "cells": cells})
    ticks = [{"x": e - low, "label": f"2^{e}"} for e in range(low, high + 1) if e % 8 == 0]
    return {
        "kind": kind,
        "lines": lines,
        "ticks": ticks,
        "num_columns": high - low + 1,
        "cell": _CELL,
        "left_out": len(rows) - len(shown),
    }


def _short(name: str) -> str:
    """The end of a long name, which distinguishes tensors."""
    return name if len(name) <= _NAME else f"..{name[2 - _NAME :]}"
