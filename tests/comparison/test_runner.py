"""Rows that take turns, in processes of their own."""

import json
import signal
import subprocess
import sys

import pytest

from comparison_jobs import FAULTY, write_job
from forked_python import forking
from halfstep.comparison import compare
from halfstep.comparison.runner import Runner, SilentObserver, _ActiveRun
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.variant import parse_variants
from halfstep.errors import HalfstepError


class Witness(SilentObserver):
    """Notes who did what, in order."""

    def __init__(self):
        self.turns, self.failures = [], []

    def stepped(self, label, repeat, count):
        self.turns.append((label, repeat, count))

    def failed(self, label, repeat, reason):
        self.failures.append((label, repeat, reason))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A comparison in which bf16 meets a NaN, fp16 is killed, fp8 is not built, a peer is missing and fp32 is fine."""
    folder = tmp_path_factory.mktemp("faulty")
    witness = Witness()
    with forking():
        comparison = compare(
            str(write_job(folder, FAULTY)),
            ["fp32", "bf16", "fp16", "fp8"],
            peers=["torch-amp:fp32"],
            steps=12,
            repeats=2,
            batch=8,
            warmup=2,
            out=folder / "out",
            observer=witness,
        )
    return comparison, witness, folder / "out"


def test_one_failure_does_not_stop_the_others(faulty):
    """fp32 and the peer are done; each of the others says why it is not."""
    comparison, _, _ = faulty
    status = {row.label: row.status for row in comparison.rows}
    assert status == {"fp32": "done", "bf16": "failed", "fp16": "failed", "fp8": "failed", "torch-amp:fp32": "done"}
    assert "the loss is not finite from step 1 on" in comparison.row("bf16").reason
    assert "killed by SIGKILL" in comparison.row("fp16").reason
    assert "not implemented yet" in comparison.row("fp8").reason
    assert comparison.row("bf16").nonfinite == 24
    assert comparison.row("bf16").skips == 24


def test_rows_take_turns_in_alternating_order(faulty):
    """fp32's turns lie between the others', first to last and back; a row that cannot run here is not tried again."""
    _, witness, _ = faulty
    first = [label for label, repeat, count in witness.turns if repeat == 0 and count != 2]
    assert first == ["fp32", "bf16", "torch-amp:fp32", "torch-amp:fp32", "bf16", "fp32"]
    assert sorted(label for label, _, _ in witness.failures) == ["fp16", "fp8"]
    assert {label for label, repeat, _ in witness.turns if repeat == 1} == {"fp32", "bf16", "torch-amp:fp32"}


def test_everything_is_on_disk_and_nothing_else(faulty):
    """Run files, survey and result; no gradients, no specs; logs of failures only."""
    comparison, _, out = faulty
    names = {path.name for path in (out / "runs").iterdir()}
    runs = {f"{label}-{r}.jsonl" for label in ("fp32", "bf16", "torch-amp-fp32") for r in (0, 1)}
    assert names == runs | {"fp16-0.jsonl", "fp8-0.jsonl", "fp16-0.log", "fp8-0.log"}
    assert json.loads((out / "comparison.json").read_text()) == comparison.as_dict()


def test_the_peer_in_fp32_learns_as_fp32_does(faulty):
    """The same weights and batches in different processes and loops."""
    comparison, _, _ = faulty
    row = comparison.row("torch-amp:fp32")
    assert row.loss_gap.value == pytest.approx(0, abs=1e-5)
    assert row.cosine == pytest.approx(1, abs=1e-6)
    assert not [note for note in comparison.notes if "differ" in note]


@pytest.mark.usefixtures("forked")
def test_a_faulty_job_is_one_error(tmp_path):
    """A loss that is no scalar is said once, by the survey, and nothing runs."""
    job = write_job(tmp_path, "value = model(batch[0])")
    with pytest.raises(HalfstepError, match="where one number is needed"):
        compare(str(job), ["fp32", "bf16"], out=tmp_path / "out")
    assert not list((tmp_path / "out" / "runs").glob("*.jsonl"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_job_may_change_the_folder(tmp_path, monkeypatch):
    """Paths are meant from where the comparison was started."""
    (tmp_path / "elsewhere").mkdir()
    job = write_job(tmp_path)
    job.write_text(f"import os; os.chdir({str(tmp_path / 'elsewhere')!r})\n{job.read_text()}")
    monkeypatch.chdir(tmp_path)
    comparison = compare("job.py", ["fp32", "bf16"], steps=4, repeats=1, batch=8, out="out")
    assert [row.status for row in comparison.rows] == ["done", "done"]
    assert comparison.row("bf16").cosine is not None
    assert not list((tmp_path / "elsewhere").iterdir())


def test_rows_that_do_not_fit_together_run_one_after_the_other(tmp_path, monkeypatch):
    """On a GPU always, and on a CPU where memory would be short."""
    variants = parse_variants(["fp32", "bf16"])
    runner = Runner(
        variants, CompareSettings(), tmp_path, target=None, data_dir=None, command=(), observer=SilentObserver(), stopped=lambda: False
    )  # fmt: skip
    assert runner._fits_together("cpu", 2**20)
    assert not runner._fits_together("cpu", 2**50)
    assert not runner._fits_together("cuda", 2**20)


def test_a_row_shares_its_gradients_with_its_compiled_forms(tmp_path):
    """All forms of a precision use one file, whatever their order; a precision in one form has none."""
    rows = parse_variants(["bf16,compile=on", "fp32", "bf16", "fp16", "fp8,compile=on", "bf16,compile=max-autotune"])
    runner = Runner(
        rows, CompareSettings(), tmp_path, target=None, data_dir=None, command=(), observer=SilentObserver(), stopped=lambda: False
    )  # fmt: skip
    files = [runner._eager_gradients(row, tmp_path / "first.safetensors") for row in rows]
    shared = tmp_path / "bf16-0.safetensors"
    assert files == [shared, None, shared, None, None, shared]


@pytest.mark.slow  # compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("forked")
def test_a_compiled_row_listed_first_still_has_a_difference(tmp_path):
    """In the first round compiled rows run last, and the saved gradients are removed at the end."""
    rows = ["bf16-lean,compile=on", "bf16-lean", "fp32"]
    done = compare(str(write_job(tmp_path)), rows, steps=4, repeats=1, batch=8, out=tmp_path / "out")
    assert 0 <= done.row("bf16-lean,compile=on").eager_error < 0.05
    assert done.row("bf16-lean").eager_error is None
    assert not list((tmp_path / "out" / "runs").glob("*.safetensors"))


def test_a_row_that_is_far_too_slow_is_cut(tmp_path):
    """After two turns and ten seconds at 20 times the reference's pace, a row has told what it can; others go on."""
    rows = parse_variants(["fp32", "bf16", "fp16", "bf16-lean"])
    runner = Runner(
        rows, CompareSettings(), tmp_path, target=None, data_dir=None, command=(), observer=SilentObserver(), stopped=lambda: False
    )  # fmt: skip
    left = list(runner.settings.slices())[2:]
    seconds = (0.3, 60.0, 5.0, 9.0)  # bf16 is too slow, fp16 is not, bf16-lean has not taken long yet
    live = [_ActiveRun(row, None, None, list(left), 32, took) for row, took in zip(rows, seconds, strict=True)]
    runner._cut_slow(live)
    assert [run.turns for run in live] == [left, [], left, left]
    assert runner.abandoned == {"bf16"}
    runner._cut_slow([run for run in live if run.variant.label != "fp32"])
    assert runner.abandoned == {"bf16"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_next_process_starts_while_the_one_before_ends(tmp_path, monkeypatch):
    """As on a GPU: one run after the other, the next begun before `finish`; a failure between does not stop them."""
    order = []
    start, finish = Runner._start, Runner._finish
    monkeypatch.setattr(Runner, "_fits_together", lambda *_: False)
    monkeypatch.setattr(Runner, "_may_start_early", lambda *_: True)
    monkeypatch.setattr(
        Runner, "_start", lambda self, row, *a: (order.append(f"start {row.label}"), start(self, row, *a))[1]
    )
    monkeypatch.setattr(Runner, "_finish", lambda self, *a: (order.append("finish"), finish(self, *a))[1])
    done = compare(str(write_job(tmp_path)), ["fp32", "fp8", "bf16"], steps=4, repeats=2, batch=8, out=tmp_path / "out")
    first = ["start fp32", "start fp8", "finish", "start bf16", "finish", "finish"]
    assert order == [*first, "start bf16", "start fp32", "finish", "finish"]
    assert {row.label: row.status for row in done.rows} == {"fp32": "done", "fp8": "failed", "bf16": "done"}
    assert {p.name for p in (tmp_path / "out" / "runs").iterdir() if p.suffix != ".jsonl"} == {"fp8-0.log"}


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done_and_still_reports(tmp_path):
    """SIGINT in the middle of a round: exit 130, and every row is there as far as it came."""
    job = write_job(tmp_path)
    out = tmp_path / "out"
    words = ["compare", str(job), "-p", "fp32", "-p", "bf16", "--steps", "200000", "--batch", "8", "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-m", "halfstep", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        for line in running.stderr:
            if line.startswith("repeat 1"):
                break
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=600)
    assert running.returncode == 130
    assert f"--resume {out}" in said
    values = json.loads((out / "comparison.json").read_text())
    assert values["stopped_by"] == "SIGINT"
    assert any("stopped early" in note for note in values["notes"])
    assert (out / "report.html").exists()
    assert "verdict" in values


# The clock of a child that only its loss moves: by 2 ms in fp32 and 4 ms in bf16, and by more while the machine is "busy".
SIMULATED = """
from halfstep.comparison import clock

class SimulatedClock:
    now = 0.0

    @classmethod
    def perf_counter(cls):
        return cls.now

clock.time = SimulatedClock
"""
STEP = "SimulatedClock.now += (.004 if torch.is_autocast_enabled('cpu') else .002) * (1.7 if os.path.exists({busy!r}) else 1)"


@pytest.mark.slow  # a dozen processes
@pytest.mark.usefixtures("forked")
def test_a_load_during_half_the_comparison_does_not_change_the_verdict(tmp_path):
    """Turns share whatever the machine does: where all steps take longer for half of the run, the recommendation stays."""
    busy = tmp_path / "busy"
    job = write_job(tmp_path, STEP.format(busy=str(busy)))
    job.write_text(SIMULATED + job.read_text())
    options = {"precisions": ["fp32", "bf16"], "steps": 60, "repeats": 3, "batch": 8}
    calm = compare(str(job), out=tmp_path / "calm", **options)

    class HalfWay(Witness):
        def stepped(self, label, repeat, count):
            super().stepped(label, repeat, count)
            num_steps = sum(turn[2] for turn in self.turns)
            if 90 < num_steps <= 270:
                busy.touch()
            else:
                busy.unlink(missing_ok=True)

    loaded = compare(str(job), out=tmp_path / "loaded", observer=HalfWay(), **options)
    assert (calm.verdict.use, calm.verdict.kind) == (loaded.verdict.use, loaded.verdict.kind) == ("fp32", "slower")
    assert calm.row("bf16").speedup.value == pytest.approx(0.5)
    assert loaded.row("bf16").speedup.value == pytest.approx(0.5, rel=0.15)
