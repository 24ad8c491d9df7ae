"""What a script printed, compared with what was measured: counts, numbers and names of layers.

A count is recognized without knowing the script's wording: the same line is printed in several runs, and the same number in it equals
the measured count of each run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

__all__ = ["named_layer", "numbers", "prints_count"]

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORDS = {"no": 0, "none": 0, "zero": 0, "one": 1, "once": 1, "two": 2, "twice": 2, "three": 3, "four": 4, "five": 5}
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})\b", re.IGNORECASE)
_BAD = re.compile(r"\b(inf|nan)\b|overflow|unstable|non-?finite|not finite|first bad|culprit|65504", re.IGNORECASE)


def numbers(text: str) -> list[float]:
    """All numbers of a text."""
    return [float(match) for match in _NUMBER.findall(text)]


def prints_count(runs: Sequence[tuple[str, int]]) -> bool:
    """Whether each output, given with the true count, has that count at the same place of the same line.

    A run whose count is 0 may print no such line. At least one count must be above 0.
    """
    places = [_places(output) for output, _ in runs]
    positive = [index for index, (_, count) in enumerate(runs) if count]
    if not positive:
        return False
    for place, value in places[positive[0]].items():
        if value == runs[positive[0]][1] and all(
            each.get(place, 0.0 if count == 0 else None) == count for each, (_, count) in zip(places, runs, strict=True)
        ):
            return True
    return False


def _places(output: str) -> dict[tuple[str, int], float]:
    """(line without its numbers, position of a number in it) -> the number, as printed last."""
    result: dict[tuple[str, int], float] = {}
    for text in re.split(r"[\r\n]+", output):
        line = _WORD.sub(lambda match: str(_WORDS[match[0].casefold()]), text)
        # "1 step was skipped" and "2 steps were skipped" are the same line.
        key = re.sub(r"s\b", "", _NUMBER.sub("#", line).casefold().replace("were", "was")).strip()
        for position, value in enumerate(numbers(line)):
            result[key, position] = value
    return result


def named_layer(output: str, unstable: Collection[str], all_names: Collection[str]) -> str | None:
    """The layer that a script reports as unstable: one of `unstable` if it is right, else what it names, or None.

    A line of the kind that is printed for every layer (a table) names none of them, unless it is marked inf, NaN or the like; then the
    first marked one counts, because inf spreads to all layers after it.
    """
    names = sorted({*unstable, *all_names}, key=len, reverse=True)
    lines = [(line, _names_in(line, names)) for line in re.split(r"[\r\n]+", output)]
    lines = [(line, present) for line, present in lines if present]
    kinds: dict[str, set[str]] = {}
    for line, present in lines:
        kinds.setdefault(_kind(line, present), set()).update(present)
    single = [(line, present[0]) for line, present in lines if len(kinds[_kind(line, present)]) == 1]
    strong = [name for line, name in single if _BAD.search(line)]
    weak = [
        name for line, name in single if not name.isdecimal() or re.search(r"layer|module|block", line, re.IGNORECASE)
    ]
    marked = [present[0] for line, present in lines if _BAD.search(line)]
    for choice in (strong, weak, marked[:1]):
        if choice:
            return next((name for name in choice if name in unstable), choice[-1])
    return None


def _kind(line: str, present: Sequence[str]) -> str:
    for name in present:
        line = _pattern(name).sub("@", line)
    return re.sub(r"\s+", " ", re.sub(r"\b(inf|nan|true|false)\b", "#", _NUMBER.sub("#", line), flags=re.IGNORECASE))


def _pattern(name: str) -> re.Pattern[str]:
    # A name that is a number ("2" in a Sequential) must not be a part of a decimal number.
    tail = r"(?![\w])(?!\.\d)" if name.isdecimal() else r"(?!\w)(?!\.(?!weight|bias)\w)"
    return re.compile(rf"(?<![\w.]){re.escape(name)}(?:\.(?:weight|bias))?{tail}")


def _names_in(line: str, names: Sequence[str]) -> list[str]:
    places: dict[str, tuple[int, int]] = {}
    for name in names:
        match = _pattern(name).search(line)
        if match and not any(start <= match.start() < end for start, end in places.values()):
            places[name] = match.span()
    return sorted(places, key=lambda name: places[name])
