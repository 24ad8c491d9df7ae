"""Messages between a comparison and its child processes."""

import json
from pathlib import Path

import pytest

from comparison_cases import write_case
from halfstep.comparison.measurements import Failure
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.spec import Answer, ChildSpec, Request, TrialSpec
from halfstep.comparison.survey import read_survey
from halfstep.comparison.variant import parse_variants


def through_json(value):
    """The value after a round trip through JSON."""
    return type(value).from_dict(json.loads(json.dumps(value.as_dict())))


def test_a_spec_survives_json():
    """The child gets the spec that the parent wrote, with and without a trial."""
    settings = CompareSettings(steps=16)
    (variant,) = parse_variants(["bf16-lean,compile=on"])
    trial = TrialSpec(variant, settings, 3, 8, survey=True, gradients=Path("/g"), repeat=1, eager_gradients=Path("/e"))
    spec = ChildSpec("digits", None, settings, trial, "out.jsonl", ("halfstep", "compare"))
    assert through_json(spec) == spec
    assert through_json(ChildSpec("digits", "data", settings)).trial is None


@pytest.mark.parametrize("message", [Request("warm"), Request("slice", 5), Answer(), Answer(Failure("job", "why"))])
def test_requests_and_answers_survive_json(message):
    """Both ends of the pipe have the same message."""
    assert through_json(message) == message


def test_an_answer_may_carry_a_survey(tmp_path):
    """The survey of a preflight arrives unchanged."""
    survey = read_survey(write_case(tmp_path / "c"))
    assert through_json(Answer(survey=survey)).survey == survey
