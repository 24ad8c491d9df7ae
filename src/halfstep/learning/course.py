"""A unit that is run: its experiments in order, and whether every claim is true here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from halfstep.errors import unknown
from halfstep.learning.experiment import Proof, run_experiment
from halfstep.learning.units import UNITS, Unit

__all__ = ["UnitResult", "find_unit", "prove"]


@dataclass(frozen=True)
class UnitResult:
    """A unit, with the proofs of its claims measured now."""

    unit: Unit
    proofs: tuple[Proof, ...]

    @property
    def holds(self) -> bool:
        """Whether every claim is true by the numbers measured here."""
        return all(proof.holds for proof in self.proofs)


def find_unit(name: str) -> Unit:
    """The unit with this name or number; case is ignored, and spaces and underscores count as dashes."""
    key = "-".join(name.casefold().replace("_", " ").replace("-", " ").split())
    if key.isdecimal() and 1 <= int(key) <= len(UNITS):
        return tuple(UNITS.values())[int(key) - 1]
    if key not in UNITS:
        raise unknown("unit", name, UNITS)
    return UNITS[key]


def prove(unit: Unit, report: Callable[[Proof], None] = lambda _: None) -> UnitResult:
    """Run the experiments of a unit; `report` gets each proof as soon as it is there."""
    proofs = []
    for name in unit.experiments:
        proofs.append(run_experiment(name))
        report(proofs[-1])
    return UnitResult(unit, tuple(proofs))
