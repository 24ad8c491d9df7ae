"""Runs with a ds_config.json: killed and resumed at every stage, moved between backends, and through the command line."""

import json
from pathlib import Path

import pytest
import torch

from halfstep.backends.context import RunContext
from halfstep.checkpoint.runlog import read_runlog
from halfstep.errors import SettingError
from halfstep.train import TrainConfig
from halfstep.train.optimizer import replace_optimizer
from halfstep.train.zero_file import ZeroFile
from launch_commands import digest_of, torchrun
from launch_job import make_job
from rank_processes import DEEPSPEED, cases_of_ranks, free_port

PROGRAM = Path(__file__).parents[1] / "zero_train_program.py"
STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The folder of the runs, and for each case the result of every rank."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install halfstep[deepspeed]")
    folder = tmp_path_factory.mktemp("zero")
    ports = [free_port() for _ in STAGES]
    lines = cases_of_ranks(PROGRAM, folder, *ports, timeout=600, imports=DEEPSPEED)
    return folder, {line[0]["case"]: line for line in map(list, zip(*lines, strict=True))}


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_bits(launched):
    """At every stage, with the optimizer and scheduler of the file, in lean presets and under autocast."""
    _, cases = launched
    for stage in STAGES:
        assert {rank["signal"] for rank in cases[f"killed {stage}"]} == {9}
        whole, resumed = cases[f"whole {stage}"], cases[f"resumed {stage}"]
        assert {rank["steps"] for rank in (*whole, *resumed)} == {8}
        assert len({rank["digest"] for rank in (*whole, *resumed)}) == 1, stage


@pytest.mark.slow
def test_a_run_continues_on_another_backend(launched):
    """Every stage on ddp and fsdp, and these on ZeRO, with the losses of the run that was not moved."""
    _, cases = launched
    moves = [(f"{name} from stage {stage}", stage) for stage in STAGES for name in ("ddp", "fsdp")]
    for name, whole in (*moves, ("stage 2 from ddp", 2), ("stage 2 from fsdp", 2)):
        for moved, stayed in zip(cases[name], cases[f"whole {whole}"], strict=True):
            assert moved["steps"] == 8
            assert moved["loss"] == pytest.approx(stayed["loss"], rel=1e-3), name


@pytest.mark.slow
def test_the_run_file_has_the_rows_and_the_configuration_of_deepspeed(launched):
    """What DeepSpeed stores and reduces, read from its engine, and the configuration that it got."""
    folder, _ = launched
    header = read_runlog(folder / "whole-2" / "run.jsonl").header
    assert header["ranks"]["backend"] == "deepspeed"
    assert header["ranks"]["deepspeed"]["fp16"] == {"enabled": True, "loss_scale": 1.0}
    rows = json.dumps(header["truth"])
    assert "ZeRO stage 2, DeepSpeedZeroOptimizer" in rows
    assert "1/2 of them on each rank" in rows


@pytest.mark.slow
def test_the_command_line_restarts_a_killed_run(tmp_path, launched):
    """Under torchrun, with everything from the file: a rank is killed, and the run ends as one that was not."""
    folder, cases = launched
    options = ("--ds-config", folder / "ds-2.json")
    code, output = torchrun(tmp_path / "run", fault="kill:1:9", restarts=1, backend=options)
    assert code == 0, output
    assert "gradient_clipping: 0.5 in the file, 0.0 in this run; Halfstep clips at 0.5" in output
    assert "its optimizer AdamW is used instead of the job's" in output
    assert digest_of(tmp_path / "run") == cases["whole 2"][0]["digest"]


@pytest.mark.slow
def test_a_one_bit_optimizer_replaces_that_of_the_file(launched):
    """At stage 0, which is data parallelism; partitions of ZeRO are rejected with the reason, on every rank."""
    folder, cases = launched
    first, second = cases["one-bit 0"]
    assert first["steps"] == 8
    assert first["digest"] == second["digest"]
    assert "1-bit Adam on 2 ranks" in json.dumps(read_runlog(folder / "one-bit-0" / "run.jsonl").header["truth"])
    assert all("gives each rank a part of the gradients" in rank["error"] for rank in cases["one-bit 2"])


def file_of(tmp_path, **blocks):
    """A file with these blocks, as the settings of a run."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(blocks))
    return TrainConfig(steps=1, backend="deepspeed", ds_config=str(path))


def test_blocks_of_the_file_replace_those_of_the_job(tmp_path, caplog):
    """The log names what is replaced; "auto" and missing blocks leave the job's."""
    job = make_job(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3))
    run, model = RunContext.single("cpu"), torch.nn.Linear(2, 2)
    blocks = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "scheduler": {"type": "WarmupLR", "params": {}}}
    caplog.set_level("INFO")
    file = ZeroFile(file_of(tmp_path, **blocks), job)
    optimizer = file.optimizer(run, model)
    assert isinstance(optimizer, torch.optim.SGD)
    assert isinstance(file.scheduler(run, model, optimizer), torch.optim.lr_scheduler.LambdaLR)
    assert "its optimizer SGD is used instead of the job's" in caplog.text
    assert "its scheduler WarmupLR is used instead of the job's" in caplog.text
    open_blocks = {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}
    for file in (ZeroFile(file_of(tmp_path, **open_blocks), job), ZeroFile(TrainConfig(steps=1), job)):
        optimizer = file.optimizer(run, model)
        assert isinstance(optimizer, torch.optim.AdamW)
        assert isinstance(file.scheduler(run, model, optimizer), torch.optim.lr_scheduler.StepLR)


def test_settings_of_the_file_reach_the_optimizer_that_replaces_its_own(tmp_path, caplog):
    """`--set optimizer=` has the rates and betas of the file's optimizer; one without betas is rejected by its name."""
    caplog.set_level("INFO")
    run, model = RunContext.single("cpu"), torch.nn.Linear(2, 2)
    block = {"type": "AdamW", "params": {"lr": 0.5, "betas": [0.7, 0.8], "weight_decay": 0.25}}
    own = ZeroFile(file_of(tmp_path, optimizer=block), make_job()).optimizer(run, model)
    (group,) = replace_optimizer("onebit-adam,freeze_step=3", own).param_groups
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (0.5, (0.7, 0.8), 0.25)
    assert "OneBitAdam replaces AdamW, with its groups and lr, betas, eps, weight_decay" in caplog.text
    sgd = ZeroFile(file_of(tmp_path, optimizer={"type": "SGD", "params": {"lr": 0.5}}), make_job()).optimizer(
        run, model
    )
    with pytest.raises(SettingError, match="SGD, which it would replace, has no betas"):
        replace_optimizer("onebit-adam", sgd)
