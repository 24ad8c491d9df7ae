"""Which precision a machine should train in, with the reason for the choice and for every format not chosen.

The rule is short, because the table of facts (`halfstep.hardware.devices`) has done the work:

    bf16 native                      -> bf16: fp32's range, so no loss scale
    else fp16 native                 -> fp16 with a dynamic loss scale
    else                             -> fp32: 16 bits would be slower here, or no faster

fp8 is never chosen: its preset has a name, and training in it is not built yet. tf32 is not chosen where bf16
or fp16 is native, because they are faster and use half the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfstep.errors import SettingError
from halfstep.hardware.devices import FORMAT_NAMES
from halfstep.hardware.probe import Hardware, probe
from halfstep.precision.policy import Policy, parse_with_notes

__all__ = ["Choice", "Rejection", "choose", "resolve"]


@dataclass(frozen=True)
class Rejection:
    """A format that was not chosen, and why."""

    format: str
    reason: str

    def __str__(self) -> str:
        return f"not {self.format}: {self.reason}"


@dataclass(frozen=True)
class Choice:
    """A policy, the reasons for it, and the reason against every other format."""

    policy: Policy
    reasons: tuple[str, ...]
    rejected: tuple[Rejection, ...]

    def __str__(self) -> str:
        return "\n  ".join([str(self.policy), *self.reasons, *map(str, self.rejected)])


def choose(hardware: Hardware | None = None) -> Choice:
    """The precision to train in on `hardware` (default: this machine), with all reasons."""
    hardware = hardware or probe()
    chosen = _pick(hardware)
    rejected = tuple(Rejection(name, _against(name, chosen, hardware)) for name in FORMAT_NAMES if name != chosen)
    return Choice(parse_with_notes(chosen)[0], _reasons(chosen, hardware), rejected)


def resolve(precision: Any, hardware: Hardware | None = None) -> tuple[Policy, tuple[str, ...]]:
    """Turn a precision setting into a policy, with notes for the user.

    "auto" is `choose()` and its reasons. A torch dtype and a number of bits are names of other tools. Anything else is the policy it names, with a note if `hardware` is passed and runs
    that policy's format slowly or not at all.
    """
    # Recognised by name: this package does not import torch.
    kind = type(precision)
    if (kind.__module__, kind.__name__) == ("torch", "dtype") or kind is int:
        precision = str(precision)
    if not isinstance(precision, str | Policy):
        raise SettingError(
            f"precision={precision!r} must be a preset such as 'bf16', a Policy, a torch dtype or 'auto', not {kind.__name__}."
        )
    if isinstance(precision, str) and precision.strip().casefold() == "auto":
        choice = choose(hardware)
        return choice.policy, choice.reasons
    policy, notes = (precision, ()) if isinstance(precision, Policy) else parse_with_notes(precision)
    if hardware is not None and hardware.support[policy.compute] != "native":
        notes = (*notes, f"On {hardware.name}, {policy.compute} is {_how(policy.compute, hardware)}.")
    return policy, notes


def _pick(hardware: Hardware) -> str:
    return next((name for name in ("bf16", "fp16") if hardware.support[name] == "native"), "fp32")


def _reasons(chosen: str, hardware: Hardware) -> tuple[str, ...]:
    support = hardware.support
    if chosen == "bf16":
        reasons = [
            f"bf16 is native on {hardware.name}: {support.why('bf16')}.",
            "It has fp32's range, so it needs no loss scale.",
        ]
        if hardware.kind == "cpu":
            reasons.append("On a CPU the gain is in large matrix products; a small model may see none.")
    elif chosen == "fp16":
        reasons = [
            f"fp16 is native on {hardware.name}: {support.why('fp16')}.",
            f"bf16 would need no loss scale, but is {_how('bf16', hardware)}.",
            "fp16 reaches only from 2^-24 to 65504, so the loss is scaled dynamically.",
        ]
    elif not hardware.known:
        reasons = [f"Halfstep has no facts about {hardware.name} ({hardware.arch}), and fp32 runs everywhere."]
    else:
        slower = "slower or no faster" if "emulated" in {support["bf16"], support["fp16"]} else "no faster"
        formats = f"bf16 is {_WORDS[support['bf16']]}, fp16 is {_WORDS[support['fp16']]}"
        reasons = [
            f"No 16-bit format is faster than fp32 on {hardware.name} ({formats}).",
            f"Mixed precision would be {slower} here.",
        ]
        if hardware.kind != "cpu":
            reasons.append("To save memory all the same, try --precision fp16, and measure it first.")
    if chosen != "fp32" and not hardware.known:
        reasons.append(
            f"This is assumed: Halfstep has no facts about {hardware.arch}, only about older relatives of it."
        )
    return tuple(reasons)


def _against(name: str, chosen: str, hardware: Hardware) -> str:
    native, why = hardware.support[name] == "native", hardware.support.why(name)
    if name == "fp32":
        return f"slower than {chosen} here, and twice its bytes; it stays the reference to compare with."
    if name == "fp8":
        return f"{_how(name, hardware)}; {'but' if native else 'and'} training in fp8 is not built yet in Halfstep."
    if not native:
        return f"{_how(name, hardware)}.{_MPS_FP16 if (name, hardware.kind) == ('fp16', 'mps') else ''}"
    if name == "tf32" and chosen == "fp32":
        return "native here, but it drops 13 of fp32's 23 fraction bits; select it with --precision tf32."
    if name == "tf32":
        return f"native here, but slower than {chosen} and twice its bytes; it needs no change to a model."
    return f"native here as well ({why}), but its short range needs a loss scale, and {chosen} needs none."


_WORDS = {"native": "native", "slow": "slow", "emulated": "emulated", "none": "not available"}
_MPS_FP16 = " And torch's fused optimizers ignore the loss scale on MPS before torch 2.13, so it needs fused=False there. To try it: --precision fp16."


def _how(name: str, hardware: Hardware) -> str:
    """How a format runs, as text that can follow "is"."""
    why = hardware.support.why(name)
    word = _WORDS[hardware.support[name]]
    if not hardware.known and hardware.support[name] == "none":
        word = "not assumed"
    return word + (f": {why}" if why else "")
