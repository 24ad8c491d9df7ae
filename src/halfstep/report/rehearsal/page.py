"""A rehearsal as one HTML page without scripts: troubles, proposal, and heat maps by module and exponent; templates/rehearsal.html.j2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from halfstep.report.html_page import render_html
from halfstep.report.html_table import Table, data_table
from halfstep.report.numerics.heat import heat_maps
from halfstep.report.numerics.view import TensorRow, format_of
from halfstep.report.rehearsal.text import HEADS, error_cells, margin_text, observed_text, scale_text, trouble_cells

if TYPE_CHECKING:
    from halfstep.rehearsal.ledger import Row
    from halfstep.rehearsal.result import Rehearsal

__all__ = ["page_values", "render_rehearsal_page"]


def render_rehearsal_page(rehearsal: Rehearsal) -> str:
    """The page as text."""
    return render_html("rehearsal.html.j2", page_values(rehearsal))


def page_values(rehearsal: Rehearsal) -> dict[str, Any]:
    """Everything the page shows."""
    from halfstep.precision.policy import Policy
    from halfstep.rehearsal.observer import KINDS

    fmt = format_of(Policy.parse(rehearsal.policy).compute)
    rows = [_tensor_row(row) for row in rehearsal.rows]
    proposal = rehearsal.proposal
    return {
        "title": f"Rehearsal of {rehearsal.job}",
        "about": f"{rehearsal.steps} fp32 steps, batch {rehearsal.batch}, on {rehearsal.device}.",
        "tiles": [
            ("tensors out of range", str(len(rehearsal.troubles))),
            ("precision", rehearsal.policy),
            *([("loss scale", f"2^{proposal.scale.exponent}")] if proposal.scale is not None else []),
        ],
        "policy": proposal.policy,
        "reasons": proposal.reasons,
        "observed": observed_text(rehearsal),
        "heat": heat_maps(rows, fmt, KINDS),
        "tables": [
            table for table in (_troubles(rehearsal), _risks(rehearsal), _errors(rehearsal)) if table is not None
        ],
    }


def _tensor_row(row: Row) -> TensorRow:
    bins = row.stats.to_record()["exponents"]
    return TensorRow(
        name=row.module,
        kind=row.kind,
        numel=row.stats.numel,
        nonfinite=row.stats.nonfinite,
        zeros=row.stats.share_of_zeros,
        flushed=0.0,
        subnormal=0.0,
        largest=row.stats.largest,
        bins={int(exponent): count for exponent, count in bins.items()},
    )


def _troubles(rehearsal: Rehearsal) -> Table | None:
    rows = [(t.module, t.kind, t.effect, trouble_cells(t)[3], t.cure or "-") for t in rehearsal.troubles]
    heads = ["module", "of", "effect", "size", "keep in fp32"]
    return data_table(f"Out of range in {rehearsal.policy}{scale_text(rehearsal)}", heads, rows) if rows else None


def _risks(rehearsal: Rehearsal) -> Table | None:
    rows = [(r.module, r.kind, f"2^{r.margin:.1f}") for r in rehearsal.risks]
    return data_table("Close to overflow, not observed", ["module", "of", "below the limit"], rows) if rows else None


def _errors(rehearsal: Rehearsal) -> Table:
    rows = [
        (
            row.module,
            row.kind,
            f"{row.stats.largest:.3g}",
            f"{row.stats.smallest:.3g}",
            f"{100 * row.stats.share_of_zeros:.2g} %",
            margin_text(rehearsal, row),
            *error_cells(rehearsal, row),
        )
        for row in rehearsal.worst()
    ]
    caption = f"Relative L2 errors, the worst first{scale_text(rehearsal).replace(',', '; fp16 gradients at', 1)}"
    return data_table(caption, ["module", "of", "largest", "smallest", "zero", "to overflow in fp16", *HEADS], rows)
