"""What is compared: a precision of Halfstep's, or the same job in somebody else's loop.

    bf16                                a preset or policy, run by the Engine
    bf16-lean,states=8bit,compile=on    the same with the model compiled
    torch-amp                           a peer, in bf16 unless it says otherwise
    torch-amp:fp16,compile=on           a peer in fp16, compiled
    bf16,compile=reduce-overhead        compiled in a mode of torch.compile, here with CUDA graphs

`compile=` is not part of a policy, because it changes no number format; it is taken off before the policy is parsed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from halfstep.engine.compiling import parse_compile
from halfstep.errors import SettingError, unknown
from halfstep.precision.policy import parse_with_notes

__all__ = ["DEFAULT_PRECISIONS", "PEERS", "PEER_FORMATS", "Contender", "parse_contenders"]

DEFAULT_PRECISIONS = ("fp32", "bf16", "fp16", "bf16-lean", "fp16-lean")
PEERS = ("torch-amp", "accelerate", "fabric")
PEER_FORMATS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Contender:
    """One row of a comparison: who trains (`peer` is None for Halfstep), in which precision, compiled or not."""

    label: str  # unique among the rows, and what `--fail-if` calls it
    policy: str  # as it prints; for a peer, its format
    compile: bool | str = False  # a text is a mode of torch.compile
    peer: str | None = None
    notes: tuple[str, ...] = ()  # what was said about a name of another tool

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """A row out of a file."""
        return cls(**{**values, "notes": tuple(values.get("notes", ()))})

    @property
    def compute(self) -> str:
        """The format its matrix products are asked to run in."""
        return self.policy if self.peer is not None else parse_with_notes(self.policy)[0].compute

    @property
    def keeps_master(self) -> bool:
        """Whether updates are made on fp32 values; peers here always have fp32 weights."""
        return self.peer is not None or parse_with_notes(self.policy)[0].master != "none"


def parse_contenders(precisions: Iterable[str], peers: Iterable[str] = ()) -> tuple[Contender, ...]:
    """The rows that the texts of `--precision` and `--peer` ask for, in order, each once."""
    found = [*(_precision(text) for text in precisions), *(_peer(text) for text in peers)]
    if not found:
        raise SettingError("There is nothing to compare: give at least one precision, such as fp32.")
    for contender in found:
        if sum(other.label == contender.label for other in found) > 1:
            raise SettingError(f"{contender.label!r} is given twice; every row of a comparison is another setting.")
    return tuple(found)


def _precision(text: str) -> Contender:
    rest, compiled = _take_compile(text)
    if rest.partition(",")[0].partition(":")[0].strip() in PEERS:
        raise SettingError(f"{rest!r} is not a precision but a peer; write --peer {rest}.")
    if rest.strip().casefold() == "auto":
        raise SettingError(
            "A comparison names its precisions, and 'auto' would be one of them under another name; "
            "`halfstep probe` says which one it is here."
        )
    policy, notes = parse_with_notes(rest)
    return Contender(_label(str(policy), compiled), str(policy), compiled, notes=notes)


def _peer(text: str) -> Contender:
    rest, compiled = _take_compile(text)
    name, colon, form = (part.strip() for part in rest.partition(":"))
    if name not in PEERS:
        raise unknown("peer", name, PEERS, "Write NAME, NAME:fp16 or NAME,compile=on.")
    if colon and form not in PEER_FORMATS:
        raise unknown("format of a peer", form, PEER_FORMATS)
    form = form or "bf16"
    label = name if form == "bf16" else f"{name}:{form}"
    return Contender(_label(label, compiled), form, compiled, name)


def _label(name: str, compiled: bool | str) -> str:
    return f"{name},compile={'on' if compiled is True else compiled}" if compiled else name


def _take_compile(text: str) -> tuple[str, bool | str]:
    """The text without its `compile=` setting, and what that said."""
    if not isinstance(text, str):
        raise SettingError(f"A precision is text such as 'bf16' or 'bf16-lean,compile=on', not {text!r}.")
    kept: list[str] = []
    compiled: list[bool | str] = []
    for item in text.split(","):
        key, _, value = (part.strip() for part in item.partition("="))
        if key.casefold() != "compile":
            kept.append(item)
        else:
            compiled.append(parse_compile(value))
    if len(compiled) > 1:
        raise SettingError(f"{text!r} gives 'compile' twice; keep one.")
    return ",".join(kept), compiled[0] if compiled else False
