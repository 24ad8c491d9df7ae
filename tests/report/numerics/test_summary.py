"""The summary of a run file as plain data."""

import json
import math

from halfstep.checkpoint.runlog import RunLog, read_runlog
from halfstep.report.numerics.summary import run_data


def test_a_run_in_its_last_state(tmp_path):
    """The last step, the observed truth, the last validation and the events that report something, without NaN in the JSON."""
    path = tmp_path / "run.jsonl"
    with RunLog.create(path, command=["a", "b"], policy="fp16", truth={"before": 1}, environment={}) as log:
        log.step(micro_batch=1, attempted=1, applied=1, loss=2.0, scale=8.0, skipped=False)
        log.event("truth", truth={"after": 2})
        log.event("validation", epoch=0, loss=1.5)
        for step in range(2, 72):
            log.step(micro_batch=step, attempted=step, applied=1, loss=math.nan, scale=4.0, skipped=True)
            log.event("skip", step=step, message="skipped.", advice="Look.", data={"scale": math.inf})
        log.event("ended", stopped_by=None, problem="the loss is not finite")
    data = json.loads(json.dumps(run_data(read_runlog(path)), allow_nan=False))
    assert data["last_step"]["attempted"] == 71
    assert data["last_step"]["loss"] == "nan"
    assert data["skips"] == 70
    assert data["event_counts"] == {"skip": 70}
    assert len(data["events"]) == 50
    assert data["events"][-1] == {"step": 71, "kind": "skip", "text": "skipped.", "advice": "Look."}
    assert data["truth"] == {"after": 2}
    assert data["validation"]["loss"] == 1.5
    assert data["outcome"]["problem"] == "the loss is not finite"
    assert (data["command"], data["policy"], data["state"]) == ("a b", "fp16", "ended")


def test_a_run_that_has_not_stepped(tmp_path):
    """Nothing is invented: no step, the truth of the header."""
    path = tmp_path / "run.jsonl"
    RunLog.create(path, command="c", policy="bf16", truth={"before": 1}, environment={}).close()
    data = run_data(read_runlog(path))
    assert (data["last_step"], data["validation"], data["outcome"], data["ended"]) == (None, None, None, False)
    assert data["truth"] == {"before": 1}
