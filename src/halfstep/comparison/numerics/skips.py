"""What a comparison reports about skipped steps: what was observed, and the cause where a step was examined.

The loss scale is named as the cause only of a step that was computed again with and without it. Of the other steps it is known whether the
loss was finite. Where it was not, the loss scale is ruled out: it multiplies the loss after the forward pass. Where it was, the
backward pass overflowed, at this scale or at any, and no note is written: a dynamic loss scale does this in every healthy run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from halfstep.comparison.measurements import SkipCause
from halfstep.comparison.record import RunRecord
from halfstep.hardware.units import count_text

__all__ = ["root_cause", "skip_notes"]

_NO_COSINE = "the gradients of the first step have no cosine"


def skip_notes(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    """The notes of a row."""
    known: set[tuple[str, str | None]] = set()  # causes and modules that a note is about
    notes = [note for run in runs for note in (*_first_step(run, known), *_later_steps(run, known))]
    unexamined = sum(_num_unexamined(run) for run in runs)
    if unexamined:
        notes.append(
            f"{count_text(unexamined, 'further step')} {'was' if unexamined == 1 else 'were'} skipped with a loss that is not finite; "
            "the loss scale does not act on the forward pass, so it is not the cause"
        )
    return tuple(dict.fromkeys(notes))


def root_cause(run: RunRecord) -> str:
    """Why a run has no finite loss, as a sentence, if a step of it was examined; otherwise empty."""
    return next((_sentence(cause) for cause in _causes(run) if not cause.scale_too_high), "")


def _first_step(run: RunRecord, known: set[tuple[str, str | None]]) -> Iterator[str]:
    cause = next((cause for cause in _causes(run) if cause.step == 1), None)
    gradients = run.measured.gradients
    has_no_cosine = gradients is not None and not math.isfinite(gradients.cosine)
    if cause is not None:
        if (cause.cause, cause.module) in known:
            return
        known.add((cause.cause, cause.module))
        text = f"step 1 was skipped: {_sentence(cause)}"
        if cause.scale_too_high:
            text = f"the gradients of the first step overflowed at the initial loss scale {cause.scale:g}: {cause.sentence.rstrip('.')}"
        yield f"{text}; {_NO_COSINE}" if has_no_cosine else text
    elif has_no_cosine:
        if run.loss and not math.isfinite(run.loss[0]):
            yield f"{_NO_COSINE}: its loss is not finite, so the loss scale is not the cause"
        else:
            yield f"{_NO_COSINE}: they are not finite, although its loss is; the cause is not known"


def _later_steps(run: RunRecord, known: set[tuple[str, str | None]]) -> Iterator[str]:
    """One note for each cause and module that no earlier note is about."""
    for cause in _causes(run):
        if (cause.cause, cause.module) not in known and not cause.scale_too_high:
            known.add((cause.cause, cause.module))
            after = " (after training)" if cause.step > len(run.loss) else ""
            yield f"step {cause.step}{after} was skipped: {_sentence(cause)}"


def _num_unexamined(run: RunRecord) -> int:
    examined = {cause.step for cause in _causes(run)}
    pairs = enumerate(zip(run.loss, run.skipped, strict=True), start=1)
    return sum(skipped and not math.isfinite(loss) and step not in examined for step, (loss, skipped) in pairs)


def _sentence(cause: SkipCause) -> str:
    return cause.sentence.rstrip(".")


def _causes(run: RunRecord) -> tuple[SkipCause, ...]:
    return run.measured.skip_causes or ()
