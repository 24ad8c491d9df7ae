"""`expect`: compare the formats of an inspection with those that a test asks for, and raise with the difference."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.errors import ExpectationError, SettingError, unknown
from halfstep.hardware.tables import plain_table
from halfstep.hardware.units import few
from halfstep.inspection.facts import Fact
from halfstep.precision.formats import FORMATS, canonical_name

__all__ = ["KEYS", "check_expectations", "parse_expectation"]

# The rows in their order, and what each one can be besides a number format.
_WORDS: Mapping[str, tuple[str, ...]] = {
    "weights": (),
    "frozen": ("none",),
    "buffers": ("none",),
    "master": ("none", "split", "kahan"),
    "states": ("none", "4bit"),
    "ema": ("none",),
    "scaler": ("none", "off", "dynamic", "static"),
    "compute": ("none",),
    "backward": ("none",),
    "loss": (),
    "grads": ("none",),
    "accumulate": ("none",),
    "reduce": ("none",),
    "step": ("applied", "skipped"),
}
KEYS = tuple(_WORDS)
_WORDS_ONLY = {"scaler", "step"}
_FORMATS = (*(name for name in FORMATS if name != "8bit-unsigned"), "fp8", "fp64", "int8", "uint8")
# What a wanted format accepts besides itself: a split master is the exact fp32 value.
_ACCEPTS: Mapping[tuple[str, str], tuple[str, ...]] = {("master", "fp32"): ("split",)}


def check_expectations(facts: Mapping[str, Fact], wanted: Mapping[str, str]) -> None:
    """Raise for everything that is in another format than wanted, or was not observed; all of it in one table."""
    if not wanted:
        raise SettingError(f"expect() needs at least one of {', '.join(KEYS)}, such as expect(master='fp32').")
    accepted = {key: parse_expectation(key, text) for key, text in wanted.items()}
    lines, advice = [], []
    for key, formats in accepted.items():
        fact = facts[key]
        if fact.missing:
            lines.append((key, wanted[key], "not observed", ""))
            advice.append(f"{key}: {fact.missing}")
            continue
        others = {form: count for form, count in fact.counts.items() if form not in formats}
        if others:
            names = [name for form in others for name in fact.names.get(form, ())]
            lines.append((key, wanted[key], _shown(fact.counts), few(names)))
            advice += _advice(key, others)
    if lines:
        table = plain_table(("", "expected", "actual", "where"), lines)
        raise ExpectationError("\n".join(["The run is not as expected.", table, *dict.fromkeys(advice)]))


def parse_expectation(key: str, text: str) -> frozenset[str]:
    """The formats that "fp32|bf16" stands for, for one key; unknown keys and formats raise."""
    if key not in _WORDS:
        raise unknown("key of expect()", key, KEYS)
    known = _WORDS[key] if key in _WORDS_ONLY else (*_FORMATS, *_WORDS[key])
    formats: set[str] = set()
    for part in str(text).split("|"):
        name = canonical_name(part)
        if name not in known:
            raise unknown(f"format of {key}", part.strip(), known, "Several are separated by |, such as 'fp32|bf16'.")
        formats |= {name, *_ACCEPTS.get((key, name), ())}
        formats |= {form for form in _FORMATS if name == "fp8" and form.startswith("fp8_")}
    return frozenset(formats)


def _shown(counts: Mapping[str, int]) -> str:
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    return ranked[0][0] if len(ranked) == 1 else ", ".join(f"{form} ({count:,})" for form, count in ranked)


def _advice(key: str, others: Mapping[str, int]) -> list[str]:
    """What a wrong format costs, where that is not obvious."""
    if key == "master" and others.keys() & {"none", "bf16", "fp16"}:
        return [
            "master: an update below half a ulp of a 16-bit weight is lost. Load the weights in fp32 and compute under autocast, or use "
            "halfstep.optim, which stores masters."
        ]
    if key == "ema" and others.keys() & {"bf16", "fp16"}:
        return [
            "ema: the steps of an EMA are below half a ulp of 16-bit copies, which then stop moving. Keep it in fp32."
        ]
    if key == "accumulate" and others.keys() & {"bf16", "fp16"}:
        return ["accumulate: 16-bit sums over micro-batches stagnate. Accumulate in fp32."]
    if key == "accumulate" and "none" in others:
        return ["accumulate: no gradients were added up. Put all micro-batches of one step inside the block."]
    return []
