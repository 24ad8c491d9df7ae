"""A traced step follows the Engine's set-up: several optimizers, buffers and EMA."""

import torch
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.jobs.job import Job
from halfstep.planning.estimator import Estimator
from halfstep.planning.trace import StepOptions
from halfstep.precision.policy import Policy
from planning_jobs import batches, loss, mlp, small_job

WEIGHTS, BIASES = 16 * 64 + 64 * 4, 64 + 4


def breakdown(job, precision, **options):
    """The categories of memory at the peak of a step."""
    return Estimator(job, Policy.parse(precision), options=StepOptions(**options)).at(4).peak.breakdown


def two_optimizers(model):
    """AdamW for matrices, SGD with momentum for the rest."""
    matrices, rest = ([p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    return [torch.optim.AdamW(matrices, lr=1e-3), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


class TwoOptimizers(Job):
    """A job with two optimizers, which the Engine accepts and the field `optimizer` of a Job does not yet."""

    def call(self, field, run_context, **values):
        if field == "optimizer":
            return two_optimizers(values["model"])
        return super().call(field, run_context, **values)


def test_several_optimizers_are_planned_as_the_engine_runs_them():
    """A step with several optimizers has the states of all of them, in stock and lean precisions."""
    job = TwoOptimizers(model=mlp, data=batches, loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    model = mlp()
    assert len(Engine(model, two_optimizers(model), "bf16-lean").optimizers) == 2
    assert breakdown(job, "fp32")["states"] == 4 * (2 * WEIGHTS + BIASES) + 4 * 2  # with a step count per AdamW tensor
    lean = breakdown(job, "bf16-lean")
    assert lean["master"] == 2 * (WEIGHTS + BIASES)
    assert lean["states"] >= 4 * (2 * WEIGHTS + BIASES)


def test_buffers_are_counted_with_the_copies_for_a_skipped_step():
    """The memory of buffers includes the copies that the Engine restores after a skipped step."""
    job = small_job(model=lambda: nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)))
    assert breakdown(job, "fp32")["buffers"] == 2 * (2 * 64 * 4 + 8)


def test_ema_covers_the_parameters_that_optimizers_own():
    """The EMA is fp32 in every precision, and only of parameters that an optimizer updates."""
    for precision in ("fp32", "bf16-lean"):
        assert breakdown(small_job(), precision, ema=True)["average"] == 4 * (WEIGHTS + BIASES)
    frozen = small_job(optimizer=lambda model: torch.optim.AdamW(model[2].parameters(), lr=1e-3))
    assert breakdown(frozen, "fp32", ema=True)["average"] == 4 * (64 * 4 + 4)


class LogDeterminant(nn.Module):
    """A layer with operations that have no 16-bit kernels, or none for a 16-bit weight and an fp32 input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))
        self.token = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        x = x.clone()
        x[torch.arange(2)] = self.token
        return x @ self.weight - torch.slogdet(self.weight)[1] - torch.matrix_exp(self.weight).sum()


def test_models_with_operations_without_16_bit_kernels_are_planned():
    """Every preset plans a model with decompositions, spectral norm and a 16-bit weight written into an fp32 input."""
    spectral = nn.utils.parametrizations.spectral_norm
    job = small_job(model=lambda: nn.Sequential(LogDeterminant(), spectral(nn.Linear(16, 64)), nn.Linear(64, 4)))
    for precision in ("fp32", "bf16", "bf16-lean", "fp16-lean"):
        assert sum(breakdown(job, precision).values()) > 0
