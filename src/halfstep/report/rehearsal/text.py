"""A rehearsal as text of at most 80 columns: what goes wrong, the worst tensors, the proposal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from halfstep.hardware.units import count_text

if TYPE_CHECKING:
    from halfstep.rehearsal.ledger import Row
    from halfstep.rehearsal.proposal import Trouble
    from halfstep.rehearsal.result import Rehearsal

__all__ = [
    "WIDTH",
    "as_text",
    "error_cells",
    "margin_text",
    "observed_text",
    "proposal_lines",
    "scale_text",
    "trouble_cells",
]

WIDTH = 80
MOST_ROWS, MOST_TROUBLES, MOST_RISKS, MOST_REASONS = 12, 12, 5, 8
_NAME = 22
_SHORT = {
    "activation": "act",
    "activation gradient": "act grad",
    "inner gradient": "inner",
    "weight gradient": "grad",
    "weight": "weight",
    "update": "update",
}
HEADS = ("fp16", "bf16", "e4m3", "e5m2", "mxfp8", "nvfp4")


def as_text(rehearsal: Rehearsal) -> str:
    """The whole result for a terminal."""
    parts = [
        f"{rehearsal.job}: {count_text(rehearsal.steps, 'fp32 step')}, batch {rehearsal.batch}, on {rehearsal.device}",
        _troubles(rehearsal),
        _table(rehearsal),
        _risks(rehearsal),
        "\n".join(proposal_lines(rehearsal)),
    ]
    return "\n\n".join(part for part in parts if part)


def scale_text(rehearsal: Rehearsal) -> str:
    """The loss scale that the predictions assume; empty without one."""
    return "" if rehearsal.scale is None else f", loss scale 2^{rehearsal.scale.exponent}"


def trouble_cells(trouble: Trouble) -> tuple[str, str, str, str]:
    """Effect, kind, module and size of a trouble."""
    size = f"up to {trouble.largest:.3g}" if math.isinf(trouble.lost) else f"{_percent(trouble.lost)} lost"
    return trouble.effect, trouble.kind, trouble.module, size


def _troubles(rehearsal: Rehearsal) -> str:
    troubles = rehearsal.troubles
    if not troubles:
        return f"{rehearsal.policy}{scale_text(rehearsal)}: no overflow or underflow predicted"
    lines = [f"{rehearsal.policy}{scale_text(rehearsal)}: {count_text(len(troubles), 'tensor')} out of range"]
    for trouble in troubles[:MOST_TROUBLES]:
        effect, kind, module, size = trouble_cells(trouble)
        lines.append(f"  {effect:<9}  {kind:<19}  {_short(module, 26):<26}  {size}")
    if len(troubles) > MOST_TROUBLES:
        lines.append(f"  and {len(troubles) - MOST_TROUBLES} more (--json lists all)")
    return "\n".join(lines)


def _table(rehearsal: Rehearsal) -> str:
    rows = rehearsal.worst()
    lines = [
        f"Relative L2 errors, the worst first{scale_text(rehearsal).replace(',', '; fp16 gradients at', 1)}",
        f"{'module':<{_NAME}} {'of':<8} {'range':>11}" + "".join(f"{head:>6}" for head in HEADS),
    ]
    for row in rows[:MOST_ROWS]:
        cells = "".join(f"{cell:>6}" for cell in error_cells(rehearsal, row))
        lines.append(f"{_short(row.module, _NAME):<{_NAME}} {_SHORT[row.kind]:<8} {_range(row):>11}{cells}")
    if len(rows) > MOST_ROWS:
        lines.append(f"{len(rows) - MOST_ROWS} more in --json and --html")
    return "\n".join(lines)


def error_cells(rehearsal: Rehearsal, row: Row) -> tuple[str, ...]:
    """The error of a row in each format of `HEADS`."""
    from halfstep.rehearsal.result import FORMATS

    cells = [_percent(rehearsal.predict(row, fmt).error) for fmt in FORMATS]
    return (*cells, *(_percent(block.error) for block in row.blocks.values()), *("-",) * (2 - len(row.blocks)))


def margin_text(rehearsal: Rehearsal, row: Row) -> str:
    """The factor from the largest magnitude to fp16's limit, as a power of two; negative beyond it."""
    from halfstep.rehearsal.result import FORMATS

    margin = rehearsal.predict(row, FORMATS[0]).overflow_margin
    return f"2^{margin:.1f}" if math.isfinite(margin) else "-"


def _risks(rehearsal: Rehearsal) -> str:
    lines = [
        f"  {_short(risk.module, 32):<32}  {risk.kind:<19}  2^{risk.margin:.1f} below the limit"
        for risk in rehearsal.risks[:MOST_RISKS]
    ]
    if len(rehearsal.risks) > MOST_RISKS:
        lines.append(f"  and {len(rehearsal.risks) - MOST_RISKS} more (--json lists all)")
    title = ["Close to overflow; none was observed in these steps"] if lines else []
    return "\n".join([*title, *lines, *_wrapped([observed_text(rehearsal)])])


def observed_text(rehearsal: Rehearsal) -> str:
    """The conditions of which the prediction knows nothing."""
    return (
        f"Observed: {count_text(rehearsal.steps, 'step')} at batch {rehearsal.batch} with the job's learning rate. A larger batch or "
        "learning rate and later training were not observed."
    )


def proposal_lines(rehearsal: Rehearsal) -> list[str]:
    """The proposed policy and its reasons."""
    proposal = rehearsal.proposal
    lines = [f"Proposed: --precision '{proposal.policy}'"]
    if proposal.scale is not None:
        scale = proposal.scale
        lines.append(
            f"  best loss scale 2^{scale.exponent}, gradient error {_percent(scale.error)}; overflow above 2^{scale.highest}"
        )
    reasons = proposal.reasons
    lines += _wrapped(f"- {reason}" for reason in reasons[:MOST_REASONS])
    if len(reasons) > MOST_REASONS:
        lines.append(f"  and {len(reasons) - MOST_REASONS} more reasons (--json lists all)")
    return lines


def _wrapped(texts: Iterable[str]) -> list[str]:
    return [
        line for text in texts for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    ]


def _range(row: Row) -> str:
    exponents = [e for e in (row.stats.percentile(0), row.stats.percentile(100)) if e is not None]
    return f"2^{exponents[0]}..{exponents[1]}" if exponents else "zero"


def _short(name: str, width: int) -> str:
    """The end of a long name, which distinguishes modules."""
    return name if len(name) <= width else f"..{name[2 - width :]}"


def _percent(error: float) -> str:
    if math.isinf(error):
        return "over"
    if math.isnan(error):
        return "nan"
    if error < 0.00095:
        return f"{100 * error:.2f}%"
    return f"{100 * error:.1f}%" if error < 0.0995 else f"{100 * error:.0f}%"
