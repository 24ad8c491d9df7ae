"""`halfstep train` and `halfstep export` at the command line."""

import json
import re

import pytest
import torch
from click.testing import CliRunner
from safetensors import SafetensorError
from safetensors.torch import load_file

from halfstep.checkpoint.directory import load_checkpoint
from halfstep.cli import cli, main
from halfstep.cli.train import _read_deepspeed
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


def test_a_run_has_a_page(job_file, tmp_path, caplog):
    """report.html has the curves and the heat map of the run file; a page that cannot be written does not fail the run."""
    result = run("train", job_file, "-p", "fp16,loss_scale=64", "--steps", 4, "--out", tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert result.exit_code == 0
    assert f"report      {tmp_path / 'run' / 'report.html'}" in result.stdout
    assert "Loss scale, as a power of 2" in page
    assert "Heat map of the exponents of gradients" in page
    (tmp_path / "other" / "report.html").mkdir(parents=True)
    result = run("train", job_file, "-p", "fp32", "--steps", 2, "--out", tmp_path / "other")
    assert result.exit_code == 0
    assert "report.html was not written" in caplog.text


def test_several_precisions_stand_side_by_side(job_file, tmp_path):
    """Several precisions have one directory and one row each."""
    result = run("train", job_file, "-p", "fp32", "-p", "bf16", "--steps", 2, "--out", tmp_path / "both")
    assert result.exit_code == 0, result.output
    assert "val loss" in result.stdout
    assert (tmp_path / "both" / "bf16" / "run.jsonl").exists()
    assert (tmp_path / "both" / "fp32" / "run.jsonl").exists()


def test_loggers_of_the_command_get_each_run(job_file, tmp_path, monkeypatch):
    """`--logger` opens the logger for each precision, with its directory, and closes it."""
    from halfstep.integrations import loggers

    opened = []

    class Remembering(loggers.Logger):
        library = "json"  # installed everywhere

        def _open(self):
            opened.append(self)
            self.tags, self.is_closed = set(), False
            return self

        def scalars(self, values, step):
            self.tags |= values.keys()

        def text(self, tag, text, step):
            self.tags.add(tag)

        def _close(self):
            self.is_closed = True

    monkeypatch.setitem(loggers.LOGGERS, "wandb", Remembering)
    result = run(
        "train", job_file, "-p", "fp32", "-p", "bf16", "--steps", 2, "--out", tmp_path / "o", "--logger", "wandb:mine"
    )
    assert result.exit_code == 0, result.output
    assert [each._info.out.name for each in opened] == ["fp32", "bf16"]
    assert all(each.is_closed and each._project == "mine" and "train/loss" in each.tags for each in opened)


def test_resume_needs_only_the_directory(job_file, tmp_path, monkeypatch):
    """Job, precision and settings come from the run, whatever the current directory; more steps may be requested."""
    out = tmp_path / "run"
    assert (
        run("train", job_file, "-p", "bf16-lean", "--steps", 3, "--batch", 8, "--set", "seed=4", "--out", out).exit_code
        == 0
    )
    monkeypatch.chdir(tmp_path)
    for steps, named in ((5, []), (6, [job_file])):
        result = run("train", *named, "--resume", "--out", out, "--steps", steps, "--json")
        outcome = json.loads(result.stdout)
        assert (outcome["steps"], outcome["precision"]) == (steps, "bf16-lean")


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
        (["train", "{job}", "--logger", "wandbb"], "Did you mean 'wandb'"),
        (["train", "{job}", "--logger", "tensorboard", "--logger", "tensorboard"], "names a logger twice"),
        (["export", "{tmp}"], "has no checkpoint"),
        (["export", "{tmp}/nothing"], "nothing"),
        (["export", "{job}"], "job.py"),
        (["train", "{job}", "--out", "{job}"], "is not a directory"),
        (["train", "{job}", "--out", "{job}/below"], "is not a directory"),
        (["train", "{job}", "--resume", "--out", "{job}"], "is not a directory"),
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


# Each is appended to JOB: what goes wrong in people's job files, and the one message about it.
FAULTS = {
    "assertion": ("assert x is None, 'bad config'", r"at .*job.py:\d+: AssertionError: bad config"),
    "syntax": ("def f(:", r"is not valid Python at .*job.py:\d+"),
    "import": ("import no_such_module", r"at .*job.py:\d+: ModuleNotFoundError"),
    "exit while loading": ("raise SystemExit(5)", "exited while it was loaded"),
    "dict": ("job = dict(model=job.model)", r"halfstep.Job\(\*\*job\)"),
    "exit": ("loss = lambda model, batch: __import__('sys').exit(3)", r"The loss .* called sys.exit\(3\) at .*job.py"),
    "interrupt": ("def loss(model, batch): raise KeyboardInterrupt", "The job raised KeyboardInterrupt at .*job.py"),
    "recursion": ("def loss(model, batch): return loss(model, batch)", "The loss .* RecursionError"),
    "memory": ("def loss(model, batch): raise MemoryError", "Out of main memory at .*job.py.*--batch.*halfstep plan"),
    "gpu memory": ("def loss(model, batch): raise torch.OutOfMemoryError('CUDA')", "Out of GPU memory at .*job.py"),
    "schedulers": ("scheduler = lambda optimizer: [torch.optim.lr_scheduler.StepLR(optimizer, 1)]", "ChainedScheduler"),
    "epochs": ("class S:\n    def step(self, epoch): pass\nscheduler = lambda optimizer: S()", "step.. needs 'epoch'"),
}
REBUILD = """
job = halfstep.Job(
    model=job.model, data=job.data, loss=globals().get("loss", job.loss), optimizer=job.optimizer,
    scheduler=globals().get("scheduler"),
)
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_job_file_is_one_message_and_exit_code_1(fault, tmp_path, capsys):
    """Whatever the file raises, and wherever, the message has the user's own line where there is one."""
    code, message = FAULTS[fault]
    path = tmp_path / "job.py"
    path.write_text(JOB + code + "\n" + ("" if fault == "dict" else REBUILD))
    with pytest.raises(SystemExit) as caught:
        main(["train", str(path), "-p", "fp32", "--steps", "2", "--out", str(tmp_path / "run")])
    text = capsys.readouterr().err
    assert caught.value.code == 1
    assert "Traceback" not in text
    assert re.search(message, text.replace("\n", " ")), text


def test_a_run_that_did_not_train_exits_with_1(job_file, tmp_path):
    """The summary has the reason instead of "done", and so has the JSON."""
    job_file.write_text(
        JOB
        + "job = halfstep.Job(job.model, job.data, lambda model, batch: model(batch[0]).sum() * float('nan'), job.optimizer)\n"
    )
    result = run("train", job_file, "-p", "fp32", "--steps", 2, "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "failed after 2 steps" in result.stdout
    assert "all 2 steps were skipped" in result.stdout
    result = run("train", job_file, "-p", "fp32", "--steps", 2, "--out", tmp_path / "json", "--json")
    assert "all 2 steps were skipped" in json.loads(result.stdout)["problem"]


def test_the_default_batch_size_of_a_job_file_is_used(job_file, tmp_path):
    """As the job's signature has it, unless --batch overrides it."""
    job_file.write_text(JOB.replace("batch_size, split", "split, batch_size=16"))
    for options, steps in (([], 4), (["--batch", 8], 8)):
        result = run("train", job_file, "-p", "fp32", "--epochs", 1, "--out", tmp_path / str(steps), "--json", *options)
        assert json.loads(result.stdout)["steps"] == steps


LAUNCH = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        ({"WORLD_SIZE": "2"}, (), "RANK is not set"),
        (LAUNCH, ("--backend", "single"), "each of them would do the whole run"),
        (LAUNCH, ("--no-out",), "needs --out DIR"),
        (LAUNCH, ("-p", "fp32", "-p", "bf16"), "at most one --precision"),
        ({}, ("--backend", "dpp"), "Did you mean 'ddp'"),
        ({}, ("--backend", "ddp", "--set", "backend=ddp"), "backend is set twice"),
        ({}, ("--backend", "deepspeed", "--ds-config", "missing.json"), "missing.json"),
        ({}, ("--backend", "ddp", "--set", "ds_config=x.json"), "x.json"),
    ],
)
def test_launches_that_cannot_work_are_rejected(job_file, monkeypatch, tmp_path, variables, options, message):
    """Before anything waits for other ranks or writes."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    out = () if "--no-out" in options else ("--out", tmp_path / "run")
    result = run("train", job_file, *out, "--steps", 1, *(each for each in options if each != "--no-out"))
    assert message in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_a_deepspeed_configuration_decides_what_the_command_leaves_open(tmp_path):
    """Precision, norm, accumulation and micro-batch come from the file, unless the command line has them."""
    file = tmp_path / "ds.json"
    file.write_text('{"fp16": {"enabled": true}, "gradient_clipping": 0.5, "gradient_accumulation_steps": 4}')
    overrides = {"ds_config": str(file)}
    decided = {"ds_config": str(file), "backend": "deepspeed", "max_norm": 0.5, "accumulate": 4}
    assert _read_deepspeed(overrides, (), 2) == (decided, ("fp16-lean",))
    overrides = {"ds_config": str(file), "max_norm": None, "accumulate": 1, "backend": "deepspeed", "batch": 6}
    assert _read_deepspeed(overrides, ("fp32",), 2) == (overrides, ("fp32",))
    file.write_text('{"bf16": {"enabled": true}, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}')
    fields, _ = _read_deepspeed({"ds_config": str(file)}, (), 2)
    assert (fields["batch"], fields["accumulate"], fields["max_norm"]) == (8, 8, 1.0)


def test_auto_values_of_a_deepspeed_configuration_are_the_defaults_of_a_run(tmp_path):
    """All but the precision, which the command must then have."""
    file = tmp_path / "ds.json"
    keys = ("gradient_clipping", "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
    blocks = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero_optimization": {"stage": 2}}
    file.write_text(json.dumps({"bf16": {"enabled": "auto"}, **dict.fromkeys(keys, "auto"), **blocks}))
    fields, precision = _read_deepspeed({"ds_config": str(file)}, ("bf16-lean",), 2)
    assert (fields["max_norm"], fields["accumulate"], precision) == (1.0, 1, ("bf16-lean",))
    assert "batch" not in fields
    with pytest.raises(HalfstepError, match="pass precision"):
        _read_deepspeed({"ds_config": str(file)}, (), 2)


def test_mistakes_of_a_deepspeed_configuration_stop_the_command_with_their_line(job_file, tmp_path):
    """All of them in one message with rule and fix, before anything is written."""
    file = tmp_path / "ds.json"
    file.write_text(
        '{\n"fp16": {"enabled": true, "hysteresis": 0},\n"gradient_cliping": 1.0,\n"zero_optimization": {"stage": 2}\n}'
    )
    result = run("train", job_file, "--ds-config", file, "--out", tmp_path / "run")
    message = str(result.exception)
    assert "2 mistakes" in message
    assert "line 2: HS213" in message
    assert "line 3: HS252" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "error", [SafetensorError("No space left on device (os error 28)"), OSError(28, "No space left on device")]
)
def test_an_export_to_a_full_disk_is_one_message_and_leaves_nothing(error, job_file, tmp_path, monkeypatch):
    """safetensors reports a full disk as an error of its own."""
    run("train", job_file, "-p", "fp32", "--steps", 1, "--out", tmp_path / "run")

    def fail(tensors, path, **_):
        path.write_bytes(b"part")
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    before = sorted(tmp_path.rglob("*"))
    result = run("export", tmp_path / "run", "--out", tmp_path / "w.safetensors")
    assert isinstance(result.exception, HalfstepError)
    assert "could not be written: No space left on device" in str(result.exception)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("where", ["{job}/w.safetensors", "/dev/full"])
def test_an_export_that_cannot_be_written_is_one_message(where, job_file, tmp_path):
    """A file as the directory, or a device as the file; --force does not replace a device."""
    run("train", job_file, "-p", "fp32", "--steps", 1, "--out", tmp_path / "run")
    result = run("export", tmp_path / "run", "--out", where.format(job=job_file), "--force")
    assert isinstance(result.exception, HalfstepError), result.exception
