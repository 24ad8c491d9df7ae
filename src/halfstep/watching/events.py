"""Events of a run: what happened, the evidence, and what to do about it.

Each rule looks at one kind of evidence and is silent unless the evidence supports the statement:

    skip             the step was skipped; which gradients were not finite, where that is known
    scale            the loss scale changed; after a backoff, the gradients of the skip before it
    lost-updates     16-bit weights without a master: over two intervals of several steps, more than half of the elements
                     with a gradient did not change at all (`watching.updates`)
    drift            a tensor in fp16 grows from sample to sample and is within a factor of 4 of fp16's largest value
    no-activations   activations were requested and cannot be seen

and of losses, in `watching.losses`, nan-loss and loss-spike.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from halfstep.precision.formats import FP16, Format, get_format
from halfstep.watching.sample import Rows, Sample
from halfstep.watching.updates import MIN_STEPS

__all__ = ["DriftRule", "Event", "LostUpdateRule", "OutcomeRule"]

_MOST_NAMED = 8
# In the words of the topics, which have the numbers.
_SEARCH = (
    "A few skipped steps at the start and an occasional one later are normal: that is how dynamic loss scaling searches "
    "(halfstep explain loss-scaling)."
)


@dataclass(frozen=True)
class Event:
    """Something that happened in a run, with its evidence and advice."""

    kind: str
    step: int
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""
    rank: int | None = None  # that reports it; None with one process

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a run file."""
        values = {
            "kind": self.kind,
            "step": self.step,
            "message": self.message,
            "data": dict(self.data),
            "advice": self.advice,
        }
        return values if self.rank is None else values | {"rank": self.rank}

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        return f"step {self.step}{rank}: {self.message}{' ' if self.advice else ''}{self.advice}"


def _listed(names: Mapping[str, Any] | list[str]) -> str:
    shown = list(names)[:_MOST_NAMED]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


# --- outcomes of steps --------------------------------------------------------------------------------------------------


class OutcomeRule:
    """Skipped steps and changes of the loss scale."""

    def __init__(self) -> None:
        self._scale: float | None = None
        self._responsible: dict[str, int | None] = {}
        self._consecutive = 0

    def observe(
        self,
        step: int,
        *,
        skipped: bool,
        scale: float | None,
        nonfinite: Mapping[str, int | None],
        ranks: Sequence[int] = (),
    ) -> Iterator[Event]:
        """The events of one step; `nonfinite` has the parameters whose gradients were not finite, if they are known.

        Its values are numbers of elements, or None. `ranks` are those whose own gradients were not finite, if they are known.
        """
        if scale is not None and self._scale is not None and scale != self._scale:
            yield self._scale_event(step, scale)
        if not skipped:
            self._consecutive, self._responsible = 0, {}
            self._scale = scale
            return
        self._consecutive += 1
        self._responsible |= nonfinite
        self._scale = scale
        where = f" in {_listed(nonfinite)}" if nonfinite else ""
        data: dict[str, Any] = {"scale": scale, "parameters": dict(nonfinite), "consecutive": self._consecutive}
        if ranks:
            data["ranks"] = list(ranks)
            where += f" on rank {', '.join(map(str, ranks))}"
        advice = ""
        if scale is None or scale == 1.0:
            advice = "There is no loss scale to lower: look for NaN in the data, the loss or the weights."
        yield Event("skip", step, f"skipped, gradients not finite{where}.", data, advice)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values, for a checkpoint."""
        return {"scale": self._scale, "responsible": dict(self._responsible), "consecutive": self._consecutive}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the rule that this state is of."""
        self._scale, self._consecutive = state["scale"], state["consecutive"]
        self._responsible = dict(state["responsible"])

    def _scale_event(self, step: int, scale: float) -> Event:
        before = self._scale
        assert before is not None
        lowered = scale < before
        data = {"before": before, "after": scale, "parameters": dict(self._responsible) if lowered else {}}
        cause = f" after overflows in {_listed(self._responsible)}" if lowered and self._responsible else ""
        verb = "lowered" if lowered else "raised"
        return Event(
            "scale", step, f"loss scale {verb} from {before:g} to {scale:g}{cause}.", data, _SEARCH if lowered else ""
        )


# --- updates ------------------------------------------------------------------------------------------------------------


class LostUpdateRule:
    """Weights that have stopped learning because their dtype cannot represent the updates."""

    share = 0.5  # of the elements with a gradient
    intervals = 2  # of at least MIN_STEPS steps, one after the other
    min_moving = 16  # elements with a gradient: fewer are no evidence

    def __init__(self) -> None:
        self._intervals: Counter[str] = Counter()
        self._reported: set[str] = set()

    def observe(self, sample: Sample) -> Iterator[Event]:
        """An event where tensors are reported for the first time."""
        if sample.skipped or sample.gradient_rows.num_nonfinite():
            return
        new: dict[str, float] = {}
        for name, update in sample.updates.items():
            if update.master or update.since is None or update.stuck is None or sample.step - update.since < MIN_STEPS:
                continue
            if update.moving < self.min_moving or update.stuck <= self.share or name in sample.idle:
                self._intervals[name] = 0
                continue
            self._intervals[name] += 1
            if self._intervals[name] >= self.intervals and name not in self._reported:
                new[name] = update.stuck
        if not new:
            return
        self._reported |= new.keys()
        dtypes = sorted({sample.updates[name].dtype for name in new})
        fmt = get_format(dtypes[0])
        assert isinstance(fmt, Format)
        worst = sorted(new, key=lambda name: -new[name])
        yield Event(
            "lost-updates",
            sample.step,
            f"{len(new)} of {len(sample.updates)} tensors have stopped learning: more than half of their elements have not changed since "
            f"step {sample.updates[worst[0]].since} although they have gradients ({_listed(worst)}).",
            {"parameters": new, "dtypes": dtypes},
            f"They are stored in {' and '.join(dtypes)} without an fp32 master, where an update smaller than about "
            f"{fmt.epsilon / 4:.1g} of its weight is lost. Keep fp32 masters: precision {dtypes[0]}-lean, or {dtypes[0]} with fp32 weights "
            "(halfstep explain fp16-vs-bf16).",
        )


# --- ranges -------------------------------------------------------------------------------------------------------------


class DriftRule:
    """fp16 tensors that grow towards the end of their range."""

    samples = 3  # in a row in which the largest value grew
    growth = 4.0  # over these samples
    margin = 4.0  # the factor that is left

    def __init__(self) -> None:
        self._largest: dict[str, deque[float]] = {}
        self._reported: set[str] = set()

    def observe(self, sample: Sample) -> Iterator[Event]:
        """An event for tensors that are reported for the first time."""
        if sample.skipped:
            return
        new: dict[str, float] = {}
        for kind, rows in (("output of ", sample.activation_rows), ("", sample.weight_rows)):
            new |= {f"{kind}{name}": value for name, value in self._grown(kind, rows)}
        if new:
            self._reported |= new.keys()
            yield Event(
                "drift",
                sample.step,
                f"values in fp16 grow towards its largest, {FP16.max:g}: {', '.join(f'{n} {v:g}' for n, v in list(new.items())[:_MOST_NAMED])}.",
                {"largest": new},
                "They will overflow in the forward pass, which no loss scale prevents. Use bf16, keep these modules in fp32 "
                "(keep_fp32=...), or look for a normalisation that is missing (halfstep explain fp16-vs-bf16).",
            )

    def _grown(self, kind: str, rows: Rows) -> Iterator[tuple[str, float]]:
        if FP16.name not in rows.dtypes:
            return
        for name, largest, dtype in zip(rows.names, rows.largest.tolist(), rows.dtypes, strict=True):
            if dtype != FP16.name:
                continue
            history = self._largest.setdefault(kind + name, deque(maxlen=self.samples + 1))
            history.append(largest)
            values = list(history)
            grows = len(values) > self.samples and all(a < b for a, b in pairwise(values))
            near_the_end = largest > FP16.max / self.margin and largest >= self.growth * values[0]
            if grows and near_the_end and kind + name not in self._reported:
                yield name, largest
