"""Training on several ranks: through open_group in one launch of many cases, and through torchrun itself."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.backends.launch import Launch
from halfstep.checkpoint.retention import CheckpointFolder
from halfstep.checkpoint.runlog import read_runlog
from halfstep.errors import SettingError
from halfstep.train import TrainConfig, train
from halfstep.train.build import resolve_backend
from halfstep.train.launched import restarted
from launch_commands import digest_of, torchrun
from launch_job import make_job
from launch_program import CONFIG
from rank_processes import cases_of_ranks

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The folder of the runs, and for each rank the result of every case."""
    folder = tmp_path_factory.mktemp("launched")
    results = cases_of_ranks(TESTS / "launch_program.py", folder, timeout=240)
    return folder, [{case.pop("case"): case for case in of_rank} for of_rank in results]


def test_ranks_end_alike_and_rank_0_alone_writes(launched):
    """The same weights, loss and validation on both ranks, and one run file with one line per step."""
    folder, (first, second) = launched
    for name in ("steps", "digest", "loss", "validation"):
        assert first["undisturbed"][name] == second["undisturbed"][name]
    run = read_runlog(folder / "undisturbed" / "run.jsonl")
    assert [record["attempted"] for record in run.records] == list(range(1, 17))
    assert run.header["ranks"] == {"backend": "ddp", "world_size": 2, "batch_per_rank": 4}


def test_random_numbers_differ_between_ranks(launched):
    """Dropout differs, while the initial weights are the same."""
    _, (first, second) = launched
    assert first["undisturbed"]["random"] != second["undisturbed"]["random"]


def test_the_global_batch_and_the_validation_are_those_of_one_process(launched, tmp_path):
    """Without dropout: training loss and validation agree with a single run at the same --batch, to rounding."""
    _, (first, _) = launched
    config = TrainConfig(**CONFIG)
    alone = train(make_job(dropout=0.0), config, precision="fp32", out=tmp_path / "run")
    assert first["exact"]["loss"] == pytest.approx(alone.loss, rel=1e-4)
    assert first["exact"]["validation"] == pytest.approx(alone.validation, rel=1e-4)


def test_a_signal_to_one_rank_stops_all_after_the_same_step_with_a_checkpoint(launched):
    """And the resumed run ends with the weights of the undisturbed one, bit for bit."""
    _, results = launched
    for rank in results:
        assert rank["stopped"]["stopped_by"] == "SIGTERM"
        assert rank["stopped"]["steps"] == results[0]["stopped"]["steps"] < 16
        assert rank["resumed"]["digest"] == rank["undisturbed"]["digest"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("other setting", "setting max_norm: 1.0 on rank 0, 2.0 on rank 1"),
        ("other model", "parameter weight: float32 (2, 8) on rank 0, float32 (3, 8) on rank 1"),
        ("odd batch", "cannot be divided among 2"),
        ("unwritable", "is not a directory"),
    ],
)
def test_what_cannot_run_is_the_same_error_on_every_rank(launched, case, message):
    """Differences between ranks, and failures of rank 0 alone."""
    _, results = launched
    assert all(message in rank[case]["error"] for rank in results)


def test_an_inf_on_one_rank_skips_the_step_on_all_and_names_the_rank(launched):
    """The weights stay the same on both; the run file has the rank, and no batch of rank 0 is blamed."""
    folder, (first, second) = launched
    assert first["overflow"]["digest"] == second["overflow"]["digest"]
    run = read_runlog(folder / "overflow" / "run.jsonl")
    assert [record["attempted"] for record in run.records if record["skipped"]] == [5]
    events = {event["event"]: event for event in run.events}
    assert events["loss-of-rank"]["rank"] == 1
    assert "batch" not in events["nan-loss"]["message"]


def test_sums_and_values_of_rank_0_reach_every_rank(launched):
    """The messages of the train loop."""
    _, results = launched
    assert all(rank["sums"] == {"sums": [2.0, 1.0], "largest": 1.0, "from_main": 0} for rank in results)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_killed_rank_is_restarted_by_torchrun_and_changes_nothing(launched, tmp_path):
    """SIGKILL of rank 1 between two checkpoints: no --resume, the weights of the undisturbed run."""
    folder, _ = launched
    code, output = torchrun(tmp_path / "run", fault="kill:1:8", restarts=1)
    assert code == 0, output
    assert "was restarted by torchrun" in output
    assert digest_of(tmp_path / "run") == digest_of(folder / "undisturbed")


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_ten_kills_at_random_steps_change_nothing(launched, tmp_path):
    """Either rank, at any step of the run, in ten attempts of one launch; the eleventh finishes with the same weights."""
    folder, _ = launched
    generator, saved, faults = random.Random(9), 0, []
    for attempt in range(10):
        # Every third step is saved; the last attempts must find some of the 16 steps left.
        step = generator.randrange(1, max(2, min(7, 17 - saved - (9 - attempt) // 2)))
        faults.append(f"kill:{generator.randrange(2)}:{step}:{attempt}")
        saved = (saved + step - 1) // 3 * 3
    assert saved >= 9, faults  # they reach the second epoch
    code, output = torchrun(tmp_path / "run", fault=",".join(faults), restarts=10, timeout=600)
    assert code == 0, (faults, output)
    assert output.count("was restarted by torchrun") == 10, faults
    assert digest_of(tmp_path / "run") == digest_of(folder / "undisturbed"), faults


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_hanging_rank_ends_the_run_and_is_named(tmp_path):
    """Every rank exits within the timeout and some seconds; the message has the rank and the step."""
    code, output = torchrun(tmp_path / "run", "--set", "timeout=8", fault="hang:1:5", timeout=120)
    assert code == 1
    assert "The others wait for rank 1, in the forward of step 5" in output
    assert "[rank 1] Another rank has failed" in output


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_rank_that_dies_ends_the_others(tmp_path):
    """Without restarts: rank 0 does not wait for the timeout, and nothing is lost but the steps since the checkpoint."""
    code, output = torchrun(tmp_path / "run", fault="kill:1:5", timeout=120)
    assert code == 1
    assert "exitcode  : -9" in output
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").latest().name == "step-00000003"


@pytest.mark.slow
def test_an_error_is_shown_with_its_rank_and_in_the_summary_of_torchrun(tmp_path):
    """The message of the rank that failed, and torchrun's root cause."""
    code, output = torchrun(tmp_path / "run", fault="raise:1:5", timeout=120)
    assert code == 1
    assert "halfstep: [rank 1] The loss of the job" in output
    assert "ValueError: sample 17 is broken" in output.split("Root Cause")[1]


@pytest.mark.slow
def test_tasks_of_srun_need_no_torchrun(launched, tmp_path):
    """SLURM's variables alone: the same weights."""
    folder, _ = launched
    command = [
        sys.executable,
        "-m",
        "halfstep",
        "train",
        TESTS / "launch_job.py",
        "-p",
        "fp32",
        "--out",
        tmp_path / "run",
    ]
    command += [
        "--batch",
        8,
        "--epochs",
        2,
        "--set",
        "save_every=3",
        "--set",
        "watch=off",
        "--set",
        "device=cpu",
        "--json",
    ]
    step = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    tasks = [
        subprocess.Popen(
            list(map(str, command)),
            env=os.environ | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    outputs = [task.communicate(timeout=200)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0]
    assert json.loads(outputs[0])["steps"] == 16
    assert not outputs[1]
    assert digest_of(tmp_path / "run") == digest_of(folder / "undisturbed")


def test_backends_follow_the_number_of_ranks():
    """auto is ddp on several ranks, and single there would train every rank alone."""
    assert [resolve_backend("auto", size) for size in (1, 2)] == ["single", "ddp"]
    assert resolve_backend("fsdp", 1) == "fsdp"
    with pytest.raises(SettingError, match="each of them would do the whole run"):
        resolve_backend("single", 2)


def test_a_restart_resumes_its_own_run_only(launched, tmp_path):
    """By torchrun's count, or on another machine by the id of the launch; a first start never does."""
    folder, _ = launched
    run = folder / "undisturbed"  # has no id
    assert not restarted(run, Launch("torchrun"))
    assert restarted(run, Launch("torchrun", restarts=1))
    assert not restarted(run, Launch("torchrun", run_id="job7"))
    assert not restarted(tmp_path, Launch("torchrun", restarts=1))
