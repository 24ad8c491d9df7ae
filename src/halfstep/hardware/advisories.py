"""Known numerical defects of the libraries underneath, by version, GPU and feature.

A run can follow every rule and still compute wrong numbers, because a kernel or a library has a bug. Each such defect
that has a public thread is one `Advisory`: which versions have it, on which GPUs, what a program must use to meet it,
what happens, and what to do. `advisories_for` selects those that apply to an environment. The table is
`halfstep.hardware.advisory_table`; `halfstep check`, `halfstep probe` and docs/advisories.md read it.

How a version range is decided: the lower bound is the first version that the thread or the released source shows to be
affected, the upper bound the first release with the fix. Where no release has the fix, the range is open and `checked`
names the newest release that was looked at. Versions nobody reported are not included.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from halfstep.hardware.advisory import Advisory
from halfstep.hardware.advisory_table import ADVISORIES
from halfstep.hardware.versions import matches

__all__ = ["Environment", "advisories_for"]


@dataclass(frozen=True)
class Environment:
    """The versions and the GPU that a program runs with, as far as they are known."""

    versions: Mapping[str, str] = field(default_factory=dict)  # package -> version
    arch: str = ""  # "sm90", "gfx942", "apple-m2"; empty if unknown
    kind: str = ""  # cuda, rocm, xpu, mps or cpu; empty if unknown


def advisories_for(environment: Environment, features: Collection[str] | None = None) -> tuple[Advisory, ...]:
    """The advisories that apply to an environment; with `features`, only those that a program using these can meet.

    An advisory about certain GPUs applies only if the GPU is known to be one of them.
    """
    return tuple(a for a in ADVISORIES if _is_affected(a, environment) and (features is None or _is_used(a, features)))


def _is_used(advisory: Advisory, features: Collection[str]) -> bool:
    return all(name in features for name in advisory.features) and not any(n in features for n in advisory.unless)


def _is_affected(advisory: Advisory, environment: Environment) -> bool:
    if advisory.package not in environment.versions:
        return False
    for affected in advisory.affected:
        version = environment.versions.get(affected.package)
        if version is not None and not matches(version, affected.versions):
            return False
    if advisory.kinds and environment.kind not in advisory.kinds:
        return False
    return not advisory.archs or any(fnmatchcase(environment.arch, pattern) for pattern in advisory.archs)
