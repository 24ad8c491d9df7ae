"""What a child process is told."""

import json
from dataclasses import asdict

from halfstep.comparison.contender import parse_contenders
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.spec import ChildSpec


def test_a_spec_travels_as_plain_values():
    """What the parent writes as JSON is what the child's trial gets."""
    settings = CompareSettings(steps=16)
    (contender,) = parse_contenders(["bf16-lean,compile=on"])
    spec = ChildSpec("digits", None, settings.as_dict(), asdict(contender), 1, 3, 8, survey=True, gradients="/g")
    trial = ChildSpec(**json.loads(json.dumps(asdict(spec)))).trial()
    assert (trial.contender, trial.settings, trial.seed, trial.batch, trial.survey) == (contender, settings, 3, 8, True)
    assert str(trial.gradients) == "/g"
