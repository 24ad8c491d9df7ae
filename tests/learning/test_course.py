"""The units: complete, found by name and number, and proven in order."""

import pytest

from halfstep.errors import HalfstepError
from halfstep.learning import course
from halfstep.learning.course import find_unit, prove
from halfstep.learning.experiment import EXPERIMENTS, Proof
from halfstep.learning.units import UNITS
from halfstep.report.topics import TOPICS


def test_there_are_nine_complete_units():
    """Each has objectives, a text, experiments and further reading that exists."""
    assert len(UNITS) == 9
    for name, unit in UNITS.items():
        assert unit.name == name
        assert unit.objectives
        assert unit.text
        assert set(unit.experiments) <= set(EXPERIMENTS)
        topics = [each.removeprefix("halfstep explain ") for each in unit.see if each.startswith("halfstep explain ")]
        assert all(topic in TOPICS or topic.startswith("HS") for topic in topics)
        assert unit.see


def test_the_known_imprecisions_of_the_sources_are_corrected():
    """Underflow, update(), 8 GPUs to 4, losses under autocast and max_grad_norm each have a correction."""
    text = " ".join(correction for unit in UNITS.values() for correction in unit.corrections)
    assert all(
        word in text
        for word in ("under autocast, zero gradients", "update()", "8 to 5", "composed by hand", "max_grad_norm")
    )


@pytest.mark.parametrize(
    ("asked", "name"), [("formats", "formats"), ("Stays_in FP32", "stays-in-fp32"), ("1", "memory"), ("9", "scale")]
)
def test_a_unit_is_found_by_name_and_number(asked, name):
    """Case and separators do not matter."""
    assert find_unit(asked).name == name


@pytest.mark.parametrize("asked", ["format", "0", "10", ""])
def test_an_unknown_unit_lists_the_known_ones(asked):
    """The error has the names of all units."""
    with pytest.raises(HalfstepError, match="Unknown unit .*memory, formats"):
        find_unit(asked)


def test_a_unit_holds_only_if_every_claim_does(monkeypatch):
    """One false claim makes the unit's result false; proofs are reported as they come."""
    outcomes = {"range": True, "spacing": False, "long-sum": True}
    monkeypatch.setattr(course, "run_experiment", lambda name: Proof(name, "", (), outcomes[name], "", 0.0))
    reported = []
    result = prove(UNITS["formats"], lambda proof: reported.append(proof.experiment))
    assert reported == list(outcomes)
    assert not result.holds
    outcomes["spacing"] = True
    assert prove(UNITS["formats"]).holds
