"""Which failure of several ranks is the cause, and comparisons that really run on two ranks."""

import json

import pytest

from comparison_jobs import write_ranks_job
from halfstep.comparison import compare
from halfstep.comparison.child import classify_failure
from halfstep.comparison.measurements import LOST, Failure
from halfstep.comparison.ranks.processes import choose_failure, thread_variables
from halfstep.comparison.settings import CompareSettings
from halfstep.jobs.job import JobError

OWN, WAITED = Failure("out of memory", "no memory."), Failure(LOST, "connection closed.")
ABORTED, KILLED = Failure("killed", "killed by SIGABRT."), Failure("killed", "killed by SIGKILL.")


@pytest.mark.parametrize(
    ("failures", "silent", "kind", "words"),
    [
        ({0: WAITED, 1: OWN}, [], "out of memory", "Rank 1 of 2: no memory."),
        ({0: WAITED, 1: KILLED}, [], "killed", "Rank 1 of 2: killed by SIGKILL."),
        ({1: KILLED}, [0], "killed", "Rank 1 of 2"),
        ({0: WAITED}, [1], LOST, "Rank 1 of 2 did not answer, and the others waited for it for timeout=9 s"),
        ({0: ABORTED}, [1], LOST, "Rank 1 of 2 did not answer"),
        ({0: ABORTED, 1: WAITED}, [], "killed", "Rank 0 of 2"),
        ({}, [0], LOST, "Rank 0 of 2 did not answer"),
        ({0: WAITED, 1: WAITED}, [], LOST, "connection closed."),
    ],
)
def test_the_cause_is_reported_and_not_its_consequences(failures, silent, kind, words):
    """A rank's own error comes before those of ranks that waited for it; a rank that hangs is named."""
    failure = choose_failure(failures, silent, 2, 9.0)
    assert failure.kind == kind
    assert words in failure.reason


def test_ranks_share_the_cores(monkeypatch):
    """Unless the user has chosen the number of threads."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert thread_variables(CompareSettings(ranks=2)) == {"OMP_NUM_THREADS": "4"}
    assert thread_variables(CompareSettings(ranks=16)) == {"OMP_NUM_THREADS": "1"}
    assert thread_variables(CompareSettings()) == {}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert thread_variables(CompareSettings(ranks=2)) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_two_ranks_learn_as_one_process(tmp_path):
    """The same global batches: the same losses, gradients and validation, for the baseline as well; memory is per rank."""
    job = str(write_ranks_job(tmp_path))
    options = {"steps": 6, "repeats": 1, "batch": 8, "warmup": 2}
    one = compare(job, ["fp32"], out=tmp_path / "one", **options)
    two = compare(job, ["fp32", "fp16"], peers=["torch-amp:fp32"], ranks=2, out=tmp_path / "two", **options)
    assert [row.status for row in two.rows] == ["done"] * 3
    (fp32,) = (run for run in two.runs if run.variant.label == "fp32")
    assert fp32.loss == pytest.approx(one.runs[0].loss, abs=1e-6)
    for label in ("fp32", "torch-amp:fp32"):
        row = two.row(label)
        assert row.loss.value == pytest.approx(one.row("fp32").loss.value, abs=1e-6)
        assert row.metric.value == pytest.approx(one.row("fp32").metric.value, abs=1e-6)
        assert row.samples_per_second.value * row.step_seconds.value == pytest.approx(8)
        assert len(row.rank_peaks) == row.num_ranks == 2
        assert row.peak_bytes == max(row.rank_peaks)
    assert two.row("torch-amp:fp32").cosine == pytest.approx(1, abs=1e-6)
    values = json.loads((tmp_path / "two" / "comparison.json").read_text())
    assert values["rows"][0]["num_ranks"] == 2
    assert "--backend ddp --ranks 2" in " ".join(values["machines"][0]["command"])


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_shards_learn_as_one_process(tmp_path):
    """FSDP2 rows, lean ones included; what is not measured on shards is noted."""
    job = str(write_ranks_job(tmp_path))
    options = {"steps": 4, "repeats": 1, "batch": 8, "warmup": 2}
    one = compare(job, ["fp32"], out=tmp_path / "one", **options)
    two = compare(job, ["fp32", "bf16-lean"], backend="fsdp", ranks=2, out=tmp_path / "two", **options)
    assert [row.status for row in two.rows] == ["done"] * 2
    assert two.row("fp32").loss.value == pytest.approx(one.row("fp32").loss.value, abs=1e-5)
    assert two.row("bf16-lean").cosine == pytest.approx(1, abs=1e-2)
    assert any("the model is sharded" in note for note in two.notes)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_rank_that_dies_or_hangs_ends_its_row(tmp_path):
    """Within the timeout, with the rank in the reason; the other rows continue."""
    fault = """
    kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    lean = model[0].weight.dtype is torch.bfloat16
    if rank == 1 and lean and torch.is_grad_enabled():
        raise ValueError("a fault of mine")
    if rank == 1 and not lean and kind is torch.bfloat16:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and kind is torch.float16:
        time.sleep(600)
    """
    job = str(write_ranks_job(tmp_path, fault))
    rows = ["fp32", "bf16", "fp16", "bf16-lean"]
    done = compare(job, rows, ranks=2, timeout=10, steps=4, repeats=1, batch=8, out=tmp_path / "out")
    assert done.row("fp32").status == "done"
    assert "Rank 1 of 2: The process was killed by SIGKILL" in done.row("bf16").reason
    assert "Rank 1 of 2 did not answer" in done.row("fp16").reason
    assert "Rank 1 of 2" in done.row("bf16-lean").reason
    assert "a fault of mine" in done.row("bf16-lean").reason


def test_an_error_of_the_connection_is_no_cause_of_its_own():
    """Neither where it is raised, nor inside an error of the job whose forward sent a message."""
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer.")
    wrapped = JobError("loss raised RuntimeError")
    wrapped.__cause__ = closed
    assert [classify_failure(error).kind for error in (closed, wrapped)] == [LOST, LOST]
    assert classify_failure(JobError("loss raised ValueError")).kind == "job"
