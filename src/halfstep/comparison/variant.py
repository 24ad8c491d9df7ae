"""What is compared: a Halfstep precision, or the same job in another library's training loop.

    bf16                                a preset or policy, run by the Engine
    bf16-lean,states=8bit,compile=on    the same with the model compiled
    torch-amp                           a baseline (`--peer`), in bf16 by default
    torch-amp:fp16,compile=on           a baseline in fp16, compiled
    bf16,compile=reduce-overhead        compiled in a torch.compile mode, here with CUDA graphs

`compile=` is not part of a policy because it changes no number format; it is removed before the policy is parsed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from halfstep.engine.compiling import parse_compile
from halfstep.errors import SettingError, unknown
from halfstep.precision.policy import parse_with_notes

__all__ = ["BASELINES", "BASELINE_FORMATS", "DEFAULT_PRECISIONS", "Variant", "parse_variants"]

DEFAULT_PRECISIONS = ("fp32", "bf16", "fp16", "bf16-lean", "fp16-lean")
BASELINES = ("torch-amp", "accelerate", "fabric")
BASELINE_FORMATS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Variant:
    """One row of a comparison: the training loop (`baseline` is None for Halfstep), its precision, compiled or not."""

    label: str  # unique among the rows, and its name in `--fail-if`
    policy: str  # as it prints; for a baseline, its format
    compile: bool | str = False  # a string is a torch.compile mode
    baseline: str | None = None
    notes: tuple[str, ...] = ()  # about a precision name that was mapped from another tool

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for files."""
        return {
            "label": self.label,
            "policy": self.policy,
            "compile": self.compile,
            "peer": self.baseline,
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The variant that `as_dict` wrote."""
        return cls(
            values["label"],
            values["policy"],
            values.get("compile", False),
            values.get("peer"),
            tuple(values.get("notes", ())),
        )

    @property
    def compute(self) -> str:
        """The format requested for matrix products."""
        return self.policy if self.baseline is not None else parse_with_notes(self.policy)[0].compute

    @property
    def has_fp32_master(self) -> bool:
        """Whether updates are applied to fp32 values; baselines always have fp32 weights here."""
        return self.baseline is not None or parse_with_notes(self.policy)[0].master != "none"

    @property
    def is_plain_fp32(self) -> bool:
        """Whether this is what the other rows are compared with: Halfstep's fp32, not compiled."""
        return self.baseline is None and self.policy == "fp32" and not self.compile

    def is_compiled_form_of(self, other: Variant) -> bool:
        """Whether this is another row's loop and precision, compiled, and that one is not."""
        same = (self.policy, self.baseline) == (other.policy, other.baseline)
        return same and bool(self.compile) and not other.compile


def parse_variants(precisions: Iterable[str], baselines: Iterable[str] = ()) -> tuple[Variant, ...]:
    """The rows that the values of `--precision` and `--peer` request, in order."""
    variants = [*(_precision(text) for text in precisions), *(_baseline(text) for text in baselines)]
    if not variants:
        raise SettingError("There is nothing to compare: give at least one precision, such as fp32.")
    labels = [variant.label for variant in variants]
    for label in labels:
        if labels.count(label) > 1:
            raise SettingError(f"{label!r} is given twice; remove one.")
    return tuple(variants)


def _precision(text: str) -> Variant:
    rest, compiled = _split_compile(text)
    if rest.partition(",")[0].partition(":")[0].strip() in BASELINES:
        raise SettingError(f"{rest!r} is not a precision but another library's loop; write --peer {rest}.")
    if rest.strip().casefold() == "auto":
        raise SettingError(
            "'auto' cannot be compared, because it stands for one of the other precisions; `halfstep probe` shows which "
            "one it is on this machine."
        )
    policy, notes = parse_with_notes(rest)
    return Variant(_label(str(policy), compiled), str(policy), compiled, notes=notes)


def _baseline(text: str) -> Variant:
    rest, compiled = _split_compile(text)
    name, colon, form = (part.strip() for part in rest.partition(":"))
    if name not in BASELINES:
        raise unknown("peer", name, BASELINES, "Write NAME, NAME:fp16 or NAME,compile=on.")
    if colon and form not in BASELINE_FORMATS:
        raise unknown("peer format", form, BASELINE_FORMATS)
    form = form or "bf16"
    label = name if form == "bf16" else f"{name}:{form}"
    return Variant(_label(label, compiled), form, compiled, name)


def _label(name: str, compiled: bool | str) -> str:
    return f"{name},compile={'on' if compiled is True else compiled}" if compiled else name


def _split_compile(text: str) -> tuple[str, bool | str]:
    """The text without its `compile=` setting, and the value of that setting."""
    if not isinstance(text, str):
        raise SettingError(f"A precision is a string such as 'bf16' or 'bf16-lean,compile=on', not {text!r}.")
    rest: list[str] = []
    compiled: list[bool | str] = []
    for item in text.split(","):
        key, _, value = (part.strip() for part in item.partition("="))
        if key.casefold() != "compile":
            rest.append(item)
        else:
            compiled.append(parse_compile(value))
    if len(compiled) > 1:
        raise SettingError(f"{text!r} sets 'compile' twice; remove one.")
    return ",".join(rest), compiled[0] if compiled else False
