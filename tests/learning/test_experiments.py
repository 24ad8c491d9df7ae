"""The experiments of the course: each claim is true, and an experiment notices if it is not."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.events import logger
from halfstep.hardware.measure import UNSTEADY, Measured
from halfstep.hardware.probe import find_gpu
from halfstep.learning.experiment import EXPERIMENTS, run_experiment
from halfstep.learning.experiments import speed
from halfstep.learning.questions import QUESTIONS
from halfstep.learning.units import UNITS

SLOW = {"eight-to-four"}  # plans five steps of ViT-L/16


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in EXPERIMENTS])
def test_every_claim_is_true_here(name):
    """The experiment runs, measures something, and confirms its claim."""
    proof = run_experiment(name)
    assert proof.holds, [f"{r.label}: {r}" for r in proof.readings]
    assert proof.readings
    assert proof.meaning
    assert proof.claim == EXPERIMENTS[name].claim


@pytest.mark.parametrize(
    ("ratios", "spread", "holds"), [([1.5], 0.1, False), ([1.5], 0.9, True), ([1.5, 0.8], 0.1, True)]
)
def test_a_busy_machine_contradicts_nothing(ratios, spread, holds, monkeypatch):
    """An emulated format that is faster than fp32 in every measurement disproves the claim, unless timings vary too much."""
    results = iter([*ratios, *ratios[-1:] * 3])

    def measure(*_, **__):
        ratio = next(results)
        return [Measured("fp32", 10.0, 0.1, 5, 1.0, 256), Measured("bf16", 10 * ratio, spread, 5, ratio, 256)]

    monkeypatch.setattr(speed, "measure_matmuls", measure)
    monkeypatch.setattr(speed, "probe", lambda: find_gpu("T4"))
    proof = run_experiment("matmul-speed")
    assert proof.holds is holds
    assert ("vary too much" in proof.meaning) is (spread > UNSTEADY)


def test_every_experiment_is_used():
    """Each experiment belongs to a unit or a question, and units and questions name existing ones."""
    used = {name for unit in UNITS.values() for name in unit.experiments} | {q.experiment for q in QUESTIONS}
    assert used == set(EXPERIMENTS)


def test_an_experiment_leaves_the_process_as_it_was():
    """Random state and log level are restored."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    level = logger.level
    run_experiment("lost-updates")
    assert torch.equal(torch.rand(3), expected)
    assert logger.level == level


def test_unknown_experiment_suggests_a_name():
    """A misspelled name is an error with the nearest one."""
    with pytest.raises(HalfstepError, match="Did you mean 'spacing'"):
        run_experiment("spacin")


def test_a_silent_missing_update_would_be_noticed(monkeypatch):
    """If step() did not raise without update(), the claim would be reported as not true."""
    monkeypatch.setattr(torch.amp.GradScaler, "step", lambda self, optimizer: None)
    assert not run_experiment("missing-update").holds


def test_a_step_in_spite_of_inf_would_be_noticed(monkeypatch):
    """If the scaler stepped with an inf gradient, the claim would be reported as not true."""
    monkeypatch.setattr(torch.amp.GradScaler, "step", lambda self, optimizer: optimizer.step())
    monkeypatch.setattr(torch.amp.GradScaler, "update", lambda self: None)
    assert not run_experiment("skipped-step").holds


def test_clipping_that_does_nothing_would_be_noticed(monkeypatch):
    """If clip_grad_norm_ did not clip, the claims about clipping would be reported as not true."""
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda params, max_norm: torch.tensor(1.0))
    assert not run_experiment("clipping-order").holds
    assert not run_experiment("skipped-clip").holds


def test_a_format_without_underflow_would_be_noticed(monkeypatch):
    """If fp16 were fp32, the loss would not stand still, and the experiments report it."""
    monkeypatch.setattr(torch, "float16", torch.bfloat16)
    assert not run_experiment("standing-still").holds
    assert not run_experiment("scaler-by-format").holds


def test_only_experiments_need_torch():
    """Units, quiz, progress and their rendering are loaded without torch, numpy or rich."""
    modules = "cli.learn", "learning.course", "learning.quiz", "learning.progress", "report.learn.text"
    code = "import sys; " + "; ".join(f"import halfstep.{m}" for m in modules)
    code += "; print({'torch', 'numpy', 'rich'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
