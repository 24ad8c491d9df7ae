"""The process of one run."""

import json
import os

import pytest

from comparison_jobs import write_job
from halfstep.comparison.child import classify_failure, main
from halfstep.comparison.record import read_run
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.spec import ChildSpec, TrialSpec
from halfstep.comparison.variant import Variant
from halfstep.errors import OverflowStop


def converse(tmp_path, requests, fault="pass", *, connected=True, survey=False):
    """Run the child's main in this process; its exit code and answers."""
    settings = CompareSettings(steps=8, warmup=2)
    trial = None if survey else TrialSpec(Variant("bf16", "bf16"), settings, 1, 8, survey=False)
    spec = ChildSpec(str(write_job(tmp_path, fault)), None, settings, trial, str(tmp_path / "run.jsonl"))
    (tmp_path / "spec.json").write_text(json.dumps(spec.as_dict()))
    reader, writer = os.pipe()
    if not connected:
        os.close(reader)
        return main([str(tmp_path / "spec.json"), str(writer)], [json.dumps(r) + "\n" for r in requests]), []
    code = main([str(tmp_path / "spec.json"), str(writer)], [json.dumps(r) + "\n" for r in requests])
    with os.fdopen(reader) as answers:
        return code, [json.loads(line) for line in answers]


def test_every_request_of_a_run_is_answered(tmp_path):
    """Warm-up, two turns and finish give four answers and a complete run file."""
    requests = [{"do": "warm"}, {"do": "slice", "count": 3}, {"do": "slice", "count": 3}, {"do": "finish"}]
    code, answers = converse(tmp_path, requests)
    assert (code, [a["is"] for a in answers]) == (0, ["done"] * 4)
    run = read_run(tmp_path / "run.jsonl")
    assert (len(run.loss), [len(turn) for turn in run.slices], run.seed) == (8, [3, 3], 1)
    assert run.measured.stopped_after is None


def test_a_failure_is_answered_and_recorded_with_the_steps_before_it(tmp_path, capsys):
    """The fourth loss raises: the answer names the line, and the file has the first three steps."""
    fault = "import builtins; builtins.n = getattr(builtins, 'n', 0) + 1; assert builtins.n < 4, 'enough'"
    code, answers = converse(tmp_path, [{"do": "warm"}, {"do": "slice", "count": 3}], fault)
    assert code == 1
    assert (answers[-1]["is"], answers[-1]["kind"]) == ("failed", "job")
    assert "enough" in answers[-1]["reason"]
    assert "job.py:" in answers[-1]["reason"]
    run = read_run(tmp_path / "run.jsonl")
    assert run.failure.kind == "job"
    assert len(run.loss) == 3
    assert "Traceback" in capsys.readouterr().err


def test_a_survey_is_answered(tmp_path):
    """A preflight returns the survey and writes no run file."""
    code, answers = converse(tmp_path, [{"do": "survey"}], survey=True)
    assert code == 0
    assert answers[0]["survey"]["num_params"] == 161
    assert not (tmp_path / "run.jsonl").exists()


def test_a_killed_parent_is_not_a_failure_of_the_run(tmp_path):
    """When the reply pipe is closed the child exits without a run file, so that --resume repeats the run."""
    code, _ = converse(tmp_path, [{"do": "warm"}, {"do": "slice", "count": 3}], connected=False)
    assert code == 1
    assert not (tmp_path / "run.jsonl").exists()


def test_the_child_exits_when_its_input_ends(tmp_path):
    """The end of stdin ends the child with exit code 1."""
    assert converse(tmp_path, [{"do": "warm"}]) == (1, [{"is": "done"}])


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (MemoryError(), "out of memory", "Lower the batch"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
            "out of memory",
            "plan",
        ),
        (OverflowStop("100 steps in a row"), "overflow", "100 steps"),
        (NotImplementedError("no such kernel"), "unsupported", "no such kernel"),
        (ValueError("one\ntwo"), "error", "ValueError: one"),
    ],
)
def test_failures_are_classified_by_the_remedy(error, kind, words):
    """Out of memory, overflow, unsupported and other errors have different kinds, each with its reason."""
    failure = classify_failure(error)
    assert failure.kind == kind
    assert words in failure.reason
