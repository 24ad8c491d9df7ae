"""The process in which one run happens."""

import json
import os

import pytest

from comparison_jobs import write_job
from halfstep.comparison.child import main, why_failed
from halfstep.comparison.record import read_run
from halfstep.comparison.settings import CompareSettings
from halfstep.errors import OverflowStop


def converse(tmp_path, requests, fault="pass", *, listening=True, **more):
    """Run the child's main in this process; its exit code and answers."""
    spec = {
        "target": str(write_job(tmp_path, fault)), "data_dir": None, "seed": 1, "batch": 8, "out": str(tmp_path / "run.jsonl"),
        "settings": CompareSettings(steps=8, warmup=2).as_dict(), "contender": {"label": "bf16", "policy": "bf16"}, **more,
    }  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    reader, writer = os.pipe()
    if not listening:
        os.close(reader)
        return main([str(tmp_path / "spec.json"), str(writer)], [json.dumps(r) + "\n" for r in requests]), []
    code = main([str(tmp_path / "spec.json"), str(writer)], [json.dumps(r) + "\n" for r in requests])
    with os.fdopen(reader) as answers:
        return code, [json.loads(line) for line in answers]


def test_a_run_is_a_conversation(tmp_path):
    """Warm up, two turns, finish: four answers, and the run file is whole."""
    requests = [{"do": "warm"}, {"do": "slice", "count": 3}, {"do": "slice", "count": 3}, {"do": "finish"}]
    code, answers = converse(tmp_path, requests)
    assert (code, [a["is"] for a in answers]) == (0, ["done"] * 4)
    run = read_run(tmp_path / "run.jsonl")
    assert (len(run.loss), [len(turn) for turn in run.slices], run.seed) == (8, [3, 3], 1)
    assert "stopped_after" not in run.measured


def test_a_failure_is_answered_and_written_with_what_was_there(tmp_path, capsys):
    """The fourth loss raises: the answer names the line, and the file has the steps before it."""
    fault = "import builtins; builtins.n = getattr(builtins, 'n', 0) + 1; assert builtins.n < 4, 'enough'"
    code, answers = converse(tmp_path, [{"do": "warm"}, {"do": "slice", "count": 3}], fault)
    assert code == 1
    assert (answers[-1]["is"], answers[-1]["kind"]) == ("failed", "job")
    assert "enough" in answers[-1]["reason"]
    assert "job.py:" in answers[-1]["reason"]
    run = read_run(tmp_path / "run.jsonl")
    assert run.failure["kind"] == "job"
    assert len(run.loss) == 3
    assert "Traceback" in capsys.readouterr().err


def test_a_survey_is_answered(tmp_path):
    """Machine and job, and no run file."""
    code, answers = converse(tmp_path, [{"do": "survey"}], contender=None)
    assert code == 0
    assert answers[0]["survey"]["num_params"] == 161
    assert not (tmp_path / "run.jsonl").exists()


def test_a_parent_that_was_killed_is_no_failure_of_the_run(tmp_path):
    """Nobody hears the answer: the child ends and writes no run file, so that --resume makes the run again."""
    code, _ = converse(tmp_path, [{"do": "warm"}, {"do": "slice", "count": 3}], listening=False)
    assert code == 1
    assert not (tmp_path / "run.jsonl").exists()


def test_without_a_parent_it_ends(tmp_path):
    """The end of its input is the end of the child."""
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
def test_failures_are_sorted_by_what_to_do(error, kind, words):
    """Out of memory, overflow, unsupported, or an error."""
    found = why_failed(error)
    assert found["kind"] == kind
    assert words in found["reason"]
