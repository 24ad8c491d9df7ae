"""The decisions of one simulated run, and the search for others.

A run takes a decision where the script tests something unknown. The same question gets the same answer in the same run. The
first run follows the defaults; each further one repeats the decisions of an earlier run up to one that it takes differently, those
with the fewest differences first. So nothing needs to be copied or undone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from halfstep.check.regex import regex

__all__ = ["MAX_DECISIONS", "MAX_RUNS", "PRECISION", "Exhausted", "Path", "Search"]

MAX_DECISIONS = 60  # of a run, that others may take differently
NUM_REJECTED = 4  # last decisions of a run that raises, which are the first to take differently
MAX_RUNS = 60
MAX_RUN_STEPS = 20_000
# What may change what happens to gradients; what decides the format comes first.
PRECISION = regex(r"amp|fp16|bf16|half|precision|scaler|clip|accum|(?<!requires_)grad|cuda|dtype|finite|nan|inf|%")
_FORMAT = regex(r"amp\b|use_amp|fp16|bf16|half|float16|precision|scaler|dtype|autocast")
_HARDWARE = regex(r"is_(bf16|bfloat16|fp16)\w*_supported")


class Exhausted(Exception):
    """A run takes too long."""


class Path:
    """The decisions of one run."""

    def __init__(self, forced: tuple[int, ...], steps: int) -> None:
        self.forced = forced
        self.taken: list[tuple[str, int, int]] = []  # question, chosen option, number of options
        self.answers: dict[str, int] = {}
        self.has_raised = False  # the script rejects what this run decided last, probably
        self.steps = steps
        self._counter = 0

    def choose(self, question: str, num_options: int = 2, default: int = 0) -> int:
        """The option for a question; `default` unless this run is to differ here."""
        if question in self.answers:
            return self.answers[question]
        index = len(self.taken)
        chosen = self.forced[index] if index < len(self.forced) else default
        if index >= MAX_DECISIONS or chosen >= num_options:
            chosen = default
        self.taken.append((question, chosen, num_options))
        self.answers[question] = chosen
        return chosen

    def settle(self, question: str, option: int) -> None:
        """Record an answer that follows from others."""
        self.answers.setdefault(question, option)

    def fresh(self, name: str) -> str:
        """A key that nothing else has."""
        self._counter += 1
        return f"{name}#{self._counter}"

    def has_guessed_format(self) -> bool:
        """Whether something unknown that this run decided on is about a format, or whether there is a scaler."""
        return any(_FORMAT.search(question) and not _HARDWARE.search(question) for question, _, _ in self.taken)

    def step(self) -> None:
        """Count a statement or expression."""
        self.steps -= 1
        if self.steps < 0:
            raise Exhausted


class Search:
    """The runs of a script, those first that differ from the defaults least."""

    def __init__(self, steps: int) -> None:
        self._waiting: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
        self._number = 0
        self.steps = steps  # statements and expressions that all runs together may evaluate

    def paths(self) -> Iterator[Path]:
        """Paths to run; each is looked at for others when the next is requested."""
        for _ in range(MAX_RUNS):
            if not self._waiting or self.steps <= 0:
                return
            cost, _, forced = heapq.heappop(self._waiting)
            path = Path(forced, min(self.steps, MAX_RUN_STEPS))
            before = path.steps
            yield path
            self.steps -= before - path.steps
            self._branch(path, cost)

    def _branch(self, path: Path, cost: int) -> None:
        chosen = tuple(option for _, option, _ in path.taken)
        for index in range(len(path.forced), min(len(chosen), MAX_DECISIONS)):
            question, own, num_options = path.taken[index]
            is_rejected = path.has_raised and index >= len(chosen) - NUM_REJECTED
            extra = 1 if is_rejected or _FORMAT.search(question) else 2 if PRECISION.search(question) else 3
            for option in range(num_options):
                if option != own:
                    self._number += 1
                    heapq.heappush(self._waiting, (cost + extra, self._number, (*chosen[:index], option)))
