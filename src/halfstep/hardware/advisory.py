"""What is known about one numerical defect of a library: versions, GPUs, features, consequence, remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfstep.hardware.advisory_words import FEATURE_WORDS, FEATURES

__all__ = ["Advisory", "Affected"]


@dataclass(frozen=True)
class Affected:
    """The versions of one package that have a defect."""

    package: str
    versions: str  # ">=2.11,<2.15"; empty for all

    def __str__(self) -> str:
        return f"{self.package} {self.versions}" if self.versions else f"{self.package} (all versions)"


@dataclass(frozen=True)
class Advisory:
    """One known defect, and when a program meets it."""

    id: str
    affected: tuple[Affected, ...]  # the first is required; a further one is compared where its version is known
    features: tuple[str, ...]  # all of them are used
    consequence: str  # one sentence
    remedy: str  # one sentence
    threads: tuple[str, ...]  # public URLs, the main one first
    severity: Literal["error", "warning", "advice"]
    archs: tuple[str, ...] = ()  # patterns such as "sm90" or "gfx11*"; empty for any
    kinds: tuple[str, ...] = ()  # cuda, rocm, mps; empty for any
    unless: tuple[str, ...] = ()  # any of these in the program avoids it
    fixed: str = ""  # the first version without it; empty if no release has a fix
    checked: str = ""  # how the range was verified beyond the thread
    rule: str = ""  # the rule of `halfstep check` that reports it by itself

    @property
    def package(self) -> str:
        """The package whose version decides."""
        return self.affected[0].package

    def may_be_met_by(self, text: str) -> bool:
        """Whether a text mentions every feature it takes to meet this defect."""
        return all(any(word in text for word in FEATURE_WORDS[name]) for name in self.features)

    @property
    def gpus(self) -> str:
        """The GPUs in words; empty for any."""
        return ", ".join(
            self.archs or {"cuda": ("NVIDIA",), "rocm": ("AMD",), "mps": ("Apple",)}.get("".join(self.kinds), ())
        )

    @property
    def usage(self) -> str:
        """What a program must use, in words."""
        return " and ".join(FEATURES[name] for name in self.features)
