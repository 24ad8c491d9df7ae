"""`halfstep train` and `halfstep export` at the command line."""

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from halfstep.checkpoint.directory import load_checkpoint
from halfstep.cli import cli
from halfstep.errors import HalfstepError


def run(*args):
    return CliRunner().invoke(cli, [str(a) for a in args])


JOB = """
import torch
import torch.nn.functional as F
import halfstep

x = torch.linspace(-1, 1, 64).reshape(-1, 1)
job = halfstep.Job(
    model=lambda: torch.nn.Linear(1, 1),
    data=lambda batch_size, split: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 3 * x), batch_size),
    loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
)
other = 3
"""


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def test_a_job_file_is_trained_and_its_masters_exported(job_file, tmp_path):
    """train, then export in fp32 and bf16: the fp32 file has the masters, bf16 their rounding."""
    out = tmp_path / "run"
    result = run("train", job_file, "-p", "bf16-lean", "--epochs", 3, "--batch", 8, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)
    assert outcome["steps"] == 24
    assert outcome["precision"] == "bf16-lean"
    exported = json.loads(run("export", out, "--json").stdout)
    full = load_file(exported["path"])
    assert {t.dtype for t in full.values()} == {torch.float32}
    half = load_checkpoint(outcome["checkpoint"]).weights
    assert {t.dtype for t in half.values()} == {torch.bfloat16}
    assert all(torch.allclose(full[n], half[n].float(), rtol=2**-8) for n in full)
    assert any(not torch.equal(full[n], half[n].float()) for n in full)
    assert run("export", out, "--dtype", "bf16", "--out", tmp_path / "w.safetensors", "--best").exit_code == 0
    assert {t.dtype for t in load_file(tmp_path / "w.safetensors").values()} == {torch.bfloat16}


def test_several_precisions_stand_side_by_side(job_file, tmp_path):
    """Several precisions have one directory and one row each."""
    result = run("train", job_file, "-p", "fp32", "-p", "bf16", "--steps", 2, "--out", tmp_path / "both")
    assert result.exit_code == 0, result.output
    assert "val loss" in result.stdout
    assert (tmp_path / "both" / "bf16" / "run.jsonl").exists()
    assert (tmp_path / "both" / "fp32" / "run.jsonl").exists()


def test_resume_needs_only_the_directory(job_file, tmp_path, monkeypatch):
    """Job, precision and settings come from the run, whatever the current directory; more steps may be requested."""
    out = tmp_path / "run"
    assert (
        run("train", job_file, "-p", "fp16", "--steps", 3, "--batch", 8, "--set", "seed=4", "--out", out).exit_code == 0
    )
    monkeypatch.chdir(tmp_path)
    for steps, named in ((5, []), (6, [job_file])):
        result = run("train", *named, "--resume", "--out", out, "--steps", steps, "--json")
        outcome = json.loads(result.stdout)
        assert (outcome["steps"], outcome["precision"]) == (steps, "fp16")


def test_a_run_without_a_recorded_job_needs_a_target(job_file, tmp_path):
    """A run started from Python has no target, and resuming it does not fall back to digits."""
    out = tmp_path / "run"
    run("train", job_file, "-p", "fp32", "--steps", 2, "--out", out)
    path = out / "run.jsonl"
    first, _, rest = path.read_text().partition("\n")
    header = {key: value for key, value in json.loads(first).items() if key != "source"}
    path.write_text(json.dumps(header) + "\n" + rest)
    rejected = run("train", "--resume", "--out", out, "--steps", 3)
    assert "has no record of its job" in str(rejected.exception)
    assert run("train", job_file, "--resume", "--out", out, "--steps", 3).exit_code == 0


def test_the_ema_can_be_exported(job_file, tmp_path):
    """--ema writes the EMA, and raises if the run has none."""
    run("train", job_file, "-p", "fp32", "--steps", 4, "--set", "ema=0.5", "--out", tmp_path / "run")
    assert run("export", tmp_path / "run", "--ema", "--out", tmp_path / "a.safetensors").exit_code == 0
    assert run("export", tmp_path / "run", "--out", tmp_path / "b.safetensors").exit_code == 0
    a, b = (load_file(tmp_path / f"{n}.safetensors") for n in "ab")
    assert not torch.equal(a["weight"], b["weight"])
    run("train", job_file, "-p", "fp32", "--steps", 1, "--out", tmp_path / "plain")
    assert isinstance(run("export", tmp_path / "plain", "--ema").exception, HalfstepError)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "digitz"], "digits"),
        (["train", "no/such/job.py"], "no/such/job.py"),
        (["train", "{job}:other"], "not a halfstep.Job"),
        (["train", "{job}:none"], "has no 'none'"),
        (["train", "{job}", "--set", "bach=2"], "Did you mean 'batch'"),
        (["train", "{job}", "--batch", "2", "--set", "batch=3"], "set twice"),
        (["train", "{job}", "--steps", "0"], "steps=0"),
        (["train", "{job}", "-p", "bf61"], "Did you mean 'bf16'"),
        (["train", "{job}", "-p", "fp8", "--steps", "1"], "fp8"),
        (["train", "{job}", "--resume"], "--resume needs --out"),
        (["train", "{job}", "--resume", "--out", "{tmp}/nothing"], "resume"),
        (["train", "{job}", "--resume", "--out", "{tmp}", "-p", "fp32", "-p", "bf16"], "one run"),
        (["export", "{tmp}"], "has no checkpoint"),
        (["export", "{tmp}/nothing"], "nothing"),
        (["export", "{job}"], "job.py"),
    ],
)
def test_bad_input_is_one_message(args, message, job_file, tmp_path, monkeypatch):
    """Each mistake is a HalfstepError that explains what to do, never a traceback."""
    monkeypatch.chdir(tmp_path)
    result = run(*[a.format(job=job_file, tmp=tmp_path) for a in args])
    assert isinstance(result.exception, HalfstepError), result.exception
    assert message in str(result.exception)


def test_export_replaces_nothing_without_force(job_file, tmp_path):
    """An existing file is replaced only with --force, and the error about an unknown dtype lists the known ones."""
    run("train", job_file, "-p", "fp32", "--steps", 1, "--out", tmp_path / "run")
    target = tmp_path / "w.safetensors"
    target.write_text("mine")
    assert isinstance(run("export", tmp_path / "run", "--out", target).exception, HalfstepError)
    assert target.read_text() == "mine"
    assert run("export", tmp_path / "run", "--out", target, "--force").exit_code == 0
    assert "fp32, bf16" in str(run("export", tmp_path / "run", "--dtype", "int8").exception)
